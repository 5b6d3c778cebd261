"""Sockets of this host's processes: connecting in time, closing in forked children."""

from __future__ import annotations

import os
import socket
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
