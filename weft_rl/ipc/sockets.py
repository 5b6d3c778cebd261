"""Sockets of this host's processes: connecting in time, closing in forked children; and the waker
of a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from typing import Final

# Between two attempts to connect to who has not accepted yet.
_RETRY_SECONDS: Final = 0.005


def connect_unix(connecting: socket.socket, address: str, timeout_seconds: float) -> None:
    """Connect a socket and set its timeout; blocks while the listener's backlog is full. The kernel
    waits for that only where a socket has no timeout.

    Raises:
        BlockingIOError: The backlog was full for as long.
        OSError: Nobody listens.
    """
    deadline = time.monotonic() + timeout_seconds
    connecting.settimeout(timeout_seconds)
    while True:
        try:
            connecting.connect(address)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return


_SOCKETS: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Close a socket in each child that this process forks from now on, which takes nothing from
    this process."""
    _SOCKETS.add(sock)


def _close_inherited() -> None:
    for sock in _SOCKETS:
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)


class Wakeup:
    """Waker of a thread that waits in ``selectors``; used from any other."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor to wait for, for ``selectors``."""
        return self._fd

    def set(self) -> None:
        """Wake the thread."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Let the thread wait again."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor; ``set`` does nothing from now on."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
