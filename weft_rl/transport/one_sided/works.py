"""Broadcasts under way, and the secrets by which a group's members know each other."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from weft_rl.interrupts import Flag
from weft_rl.transport.one_sided.errors import OneSidedError
from weft_rl.transport.one_sided.messages import SECRET_BYTES
from weft_rl.transport.wire.options import Arrived, BucketOptions

_PREFIX = "one-sided"


def recorded(buffer: torch.Tensor) -> torch.cuda.Event | None:
    """Record an event behind what this thread's stream was given for the buffer's GPU; None on a
    CPU."""
    if not buffer.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(buffer.device))
    return event


class OneSidedWork:
    """A broadcast; see ``backends.Work``.

    Args:
        buffer: Bytes to send, or memory to receive them in.
        options: ``borrows``: whether a receiver's thread may ``lend`` it the bytes instead.
    """

    def __init__(self, buffer: torch.Tensor, options: BucketOptions) -> None:
        self.buffer, self.options, self.borrows = buffer, options, options.borrows
        self.tail: bytes | None = None
        self._lock = threading.Lock()  # guards what is lent
        self._lent: torch.Tensor | None = None
        self._return: Callable[[], None] | None = None
        #: How a receiver tells the sender that it keeps the bucket.
        self.tell_kept: Callable[[], None] | None = None
        #: Whether every receiver has said so, at the sender.
        self.is_kept = False
        #: What the buffer must not be written before; None on a CPU.
        self.after = recorded(buffer)
        self._woken = Flag()
        self._error = ""
        self.done = False

    def end(self, error: str = "") -> None:
        """Mark the broadcast as ended: nothing here touches the buffer any more. Only the first
        call counts.

        Args:
            error: Reason why it failed. A text: an exception would hold frames, and they buffers.
        """
        if not self.done:
            self._error, self.done = error, True
            self.wake()

    def lend(self, content: torch.Tensor, give_back: Callable[[], None]) -> bool:
        """Offer the sender's memory to be read there, in place of a copy; before ``end``.

        Args:
            content: The bytes.
            give_back: Called once nobody reads them any more, by whichever thread.

        Returns:
            True if that will be; False if nobody reads what comes any more.
        """
        with self._lock:
            if not self.borrows:
                return False
            self._lent, self._return = content, give_back
            return True

    @property
    def arrived(self) -> Arrived:
        """See ``Work``."""
        return Arrived(self._lent, self.tail)

    def give_back(self) -> None:
        """See ``Work``."""
        with self._lock:
            self.borrows, self._lent = False, None
            give_back, self._return = self._return, None
        if give_back is not None:
            give_back()

    def keep(self) -> bool:
        """See ``Work``; a sender that is gone is found out elsewhere."""
        if self.tell_kept is not None:
            with contextlib.suppress(OneSidedError):
                self.tell_kept()
        return self.tell_kept is not None

    def wait_until(self, deadline: float) -> bool:
        """See ``Work``."""
        return self._woken.wait(deadline - time.monotonic())

    def finish(self) -> None:
        """See ``Work``."""
        if self._error:
            raise OneSidedError(self._error)

    def wake(self) -> None:
        """See ``Work``."""
        self._woken.set()


class Store(Protocol):
    """Part of a ``RendezvousStore`` that is used here: only the group's members have it."""

    def set(self, key: str, value: bytes | str) -> None:
        """Make a value known."""

    def get(self, key: str) -> bytes:
        """Block until the value is known, and return it."""


class Place:
    """Identity of a member: a secret whose digest the group's store has. By it a socket tells the
    store's rank from any other process of the same user."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.secret = os.urandom(SECRET_BYTES)

    def announce(self, rank: int, socket_name: str = "") -> None:
        """Publish the secret's digest in the group's store, and the name of the socket where the
        sender listens."""
        digest = hashlib.sha256(self.secret).hexdigest()
        self._store.set(f"{_PREFIX}/{rank}", f"{digest} {socket_name}")

    def find(self, rank: int) -> tuple[str, str]:
        """Return a member's digest and the name of its socket; blocks until it has announced
        them."""
        digest, _, name = self._store.get(f"{_PREFIX}/{rank}").decode().partition(" ")
        return digest, name


def check_secret(secret: bytes, digest: str, rank: int) -> None:
    """Refuse a peer that is not the group's member of that rank.

    Raises:
        OneSidedError: It is not.
    """
    if not hmac.compare_digest(hashlib.sha256(secret).hexdigest(), digest):
        raise OneSidedError(f"a process that is not the group's says that it is rank {rank}")


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
