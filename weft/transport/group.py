"""A side group: the processes between which one trainer's bytes flow.

Built directly on torch's process-group classes, so the application's own
``torch.distributed`` state is neither used nor touched.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions

from weft.contract.errors import (
    PeerUnavailableError,
    TransferAbortedError,
    TransferTimeoutError,
    UnsupportedError,
    WeftError,
)
from weft.transport.store import GroupStore

#: Backends this build can form, best first.
BACKENDS = ("gloo",)
#: Rank of the sender in every side group.
SENDER_RANK = 0


class Operation:
    """A broadcast under way. It owns a reference to its buffer until it ends."""

    def __init__(self, group: SideGroup, work: Any, buffer: torch.Tensor) -> None:
        self._group = group
        self._work = work
        self._buffer = buffer
        self._wake = threading.Event()
        work.get_future().add_done_callback(lambda _: self._wake.set())

    def wait(self, deadline: float) -> None:
        """Block until the bytes are sent or received.

        Args:
            deadline: ``time.monotonic()`` at which to give up.

        Raises:
            TransferTimeoutError: Not done by then; abort the group.
            PeerUnavailableError: The connection broke.
            WeftError: What ``SideGroup.abort`` was called with.
        """
        ended = self._wake.wait(max(0.0, deadline - time.monotonic()))
        self._group.check()
        if not ended:
            raise TransferTimeoutError("a bucket was neither sent nor received before the deadline")
        # The future is done a moment before the work says so: this wait is that moment.
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerUnavailableError(f"the side group broke: {error}") from error
        self._group.finished(self)

    @property
    def done(self) -> bool:
        """Whether the backend has let go of the buffer."""
        return bool(self._work.is_completed())

    def wake(self) -> None:
        """End ``wait`` early; it then asks the group why."""
        self._wake.set()


class SideGroup:
    """One rank's membership of a side group.

    Args:
        store: The group's rendezvous store; kept referenced here.
        rank: Of this process; the sender is 0.
        size: Number of members.
        backend: One of ``BACKENDS``.
        host: Address of this machine that peers connect to.

    Forming is lazy: the constructor returns at once, connections are made by the
    first broadcast. One thread sends or receives; ``abort`` may come from any.

    Raises:
        UnsupportedError: A backend this build does not have.
    """

    def __init__(
        self, store: GroupStore, rank: int, size: int, *, backend: str = "gloo", host: str
    ) -> None:
        if backend not in BACKENDS:
            raise UnsupportedError(
                f"side-group backend {backend!r} is not available here; have {', '.join(BACKENDS)}"
            )
        self.rank, self.size = rank, size
        self._store: GroupStore | None = store
        self._error: WeftError | None = None
        self._lock = threading.Lock()
        self._in_flight: list[Operation] = []
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=True)]
        options._timeout = store.timeout
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, buffer: torch.Tensor, timeout_seconds: float) -> Operation:
        """Send (rank 0) or receive (others) a uint8 buffer; returns at once.

        Every rank must call it with the same number of bytes in the same order.
        The buffer must not be touched until the operation has ended; if it is
        abandoned, the backend may still use it for up to ``timeout_seconds``.
        """
        options = BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.timeout = timedelta(seconds=timeout_seconds)
        with self._lock:
            self.check()
            operation = Operation(self, self._group.broadcast([buffer], options), buffer)
            self._in_flight.append(operation)
        return operation

    def check(self) -> None:
        """Raise what ``abort`` was called with, if it was."""
        if self._error is not None:
            raise self._error

    def finished(self, operation: Operation) -> None:
        """Forget an operation that has ended."""
        with self._lock:
            if operation in self._in_flight:  # not so if ``close`` came between
                self._in_flight.remove(operation)

    def abort(self, error: WeftError) -> None:
        """Make every wait, now and later, raise ``error``; never blocks.

        Gloo cannot be aborted (its ``abort`` does nothing in torch 2.13), so its
        operations are abandoned: group, buffers and store are parked until the
        backend lets go of them.
        """
        with self._lock:
            if self._error is None:
                self._error = error
            operations = list(self._in_flight)
            backend = (self._group, self._store)
        for operation in operations:
            operation.wake()
        _PARKED.park(backend, operations)

    def close(self) -> None:
        """Leave the group; operations still under way are parked, not waited for.

        With none under way the backend's threads and sockets end here. They must not
        wait for this object: it lies in a circle of references, and the collector
        may come late.
        """
        with self._lock:
            if self._error is None:
                self._error = TransferAbortedError("this rank left the side group")
            operations, self._in_flight = self._in_flight, []
            backend, self._group, self._store = (self._group, self._store), None, None
        _PARKED.park(backend, operations)


class _Parked:
    """Groups whose operations may still touch memory, held until they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[object, list[Operation]]] = []

    def park(self, backend: object, operations: list[Operation]) -> None:
        with self._lock:
            self._held = [
                (held, left)
                for held, ops in self._held
                if (left := [op for op in ops if not op.done])
            ]
            if pending := [op for op in operations if not op.done]:
                self._held.append((backend, pending))

    def count(self) -> int:
        with self._lock:
            return len(self._held)


_PARKED = _Parked()


def num_parked_groups() -> int:
    """Groups abandoned with operations that had not ended when last looked at."""
    return _PARKED.count()
