"""Lanes of a side group: one sender, and all the receivers of its bytes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch

from weft_rl.contract.backends import BACKENDS, GLOO
from weft_rl.contract.errors import (
    PeerUnavailableError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.interrupts import PROGRESS_SECONDS, report_while
from weft_rl.transport.backends import (
    SENDER_RANK,
    Backend,
    Work,
    open_backend,
    works_to_hold,
)
from weft_rl.transport.rendezvous_store import RendezvousStore
from weft_rl.transport.wire.buckets import WHOLE, ArrivedBucket, BucketOptions
from weft_rl.transport.wire.lane_options import LaneOptions

__all__ = [
    "SENDER_RANK",
    "Operation",
    "SideGroup",
    "num_parked_groups",
    "on_device",
    "window",
]

CPU = torch.device("cpu")


def window(device: torch.device, backend: str) -> int:
    """Return how many buckets a sender keeps under way: one for each of its buffers. The sender
    announces the number, since a receiver may have no more receives posted.

    On an accelerator a receive that waits for its sender occupies the device, where an
    allocation, or the loading of a kernel, may wait for it: if the sender itself waited
    for this receiver's word, that would be for ever. A bucket is sent there in less time
    than its release takes over the control plane, so one more is under way; and another where
    receives occupy nothing.
    """
    if device.type == "cpu":
        return 2
    return 3 if BACKENDS[backend].blocks_gpu else 4


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Run what this thread does inside the ``with`` on ``device``, beside all else: on a CUDA
    stream of its own. Does nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_new_stream(device)):
        yield


def same_stream(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a function whose context lets another thread work in this one's CUDA stream."""
    if device.type != "cuda":
        return contextlib.nullcontext
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _silent() -> None:
    pass


class Operation:
    """A broadcast under way. It owns a reference to its buffer until it ends."""

    def __init__(self, group: SideGroup, work: Work, buffer: torch.Tensor) -> None:
        self._group = group
        self._work = work
        self._buffer = buffer

    def wait(self, deadline: float, on_progress: Callable[[], None] = _silent) -> None:
        """Block until the bytes are sent or received.

        Args:
            deadline: ``time.monotonic()`` at which to give up.
            on_progress: Called at least every ``PROGRESS_SECONDS`` while it blocks.

        Raises:
            TransferTimeoutError: Not done by then; abort the group.
            PeerUnavailableError: The connection broke.
            WeftError: The error that ``SideGroup.abort`` was called with.
        """
        while not (
            ended := self._work.wait_until(min(deadline, time.monotonic() + PROGRESS_SECONDS))
        ):
            self._group.check()
            if time.monotonic() >= deadline:
                break
            on_progress()
        self._group.check()
        if not ended:
            raise TransferTimeoutError("a bucket was neither sent nor received before the deadline")
        try:
            self._work.finish()
        except RuntimeError as error:
            raise PeerUnavailableError(f"the side group broke: {error}") from error
        self._group.finished(self)

    @property
    def done(self) -> bool:
        """True if the backend has let go of the buffer."""
        return self._work.done

    @property
    def arrived(self) -> ArrivedBucket:
        """Way in which the bytes of a receive have arrived, after ``wait``."""
        return self._work.arrived

    def give_back(self) -> None:
        """Give borrowed memory back to the sender, once nothing reads it any more. Every receive
        that borrows must do so.

        Raises:
            PeerUnavailableError: The sender has left: it may have changed the bytes meanwhile.
        """
        try:
            self._work.give_back()
        except RuntimeError as error:
            raise PeerUnavailableError(f"the side group broke: {error}") from error

    def receive_again(self, deadline: float) -> bool:
        """Receive a bucket that was found garbled once more, from the sender itself; see
        ``backends.Work``. After ``give_back``."""
        return self._work.receive_again(self._buffer, deadline)

    def keep(self) -> bool:
        """Tell the sender at once that this rank has verified the bucket and keeps it, whatever
        becomes of this group; after ``give_back``.

        Returns:
            True if the backend carries that; else the sender waits for the coordinator's word.
        """
        return self._work.keep()

    @property
    def is_kept(self) -> bool:
        """True once every receiver of a send has said that it keeps the bucket. It may never be
        said: then the coordinator's word is the only one."""
        return self._work.is_kept

    def wake(self) -> None:
        """End ``wait`` early; it then asks the group why."""
        self._work.wake()


class SideGroup:
    """One rank's membership of one lane of a side group: all of it where one rank sends.

    Args:
        store: The lane's rendezvous store; kept referenced here.
        rank: Rank of this process in the lane; its sender is 0.
        size: Number of members.
        options: Options of the lane.
        backend: One of ``backends.available_backends(device)``.
        device: Device of this rank's buffers.

    Forming is lazy: the constructor returns at once, connections are made by the
    first broadcast. One thread sends or receives; ``abort`` may come from any.

    Raises:
        UnsupportedError: A backend this process does not have.
    """

    def __init__(
        self,
        store: RendezvousStore,
        rank: int,
        size: int,
        options: LaneOptions,
        *,
        backend: str = GLOO,
        device: torch.device = CPU,
    ) -> None:
        self.rank, self.size = rank, size
        self._error: WeftError | None = None
        self._lock = threading.Lock()
        self._in_flight: list[Operation] = []
        self._backend: Backend | None = open_backend(backend, store, rank, size, device, options)
        if backend == GLOO:  # NCCL has threads that must not outlive the driver
            _PARKED.opened(self._backend)

    def broadcast(
        self,
        buffer: torch.Tensor,
        timeout_seconds: float,
        forming: Callable[[], None] = _silent,
        options: BucketOptions = WHOLE,
    ) -> Operation:
        """Send (rank 0) or receive (others) a uint8 buffer; returns at once, but for the first one
        of a backend that connects its members in it.

        Every rank must call it with the same number of bytes in the same order.
        The buffer must not be touched until the operation has ended; if it is
        abandoned, the backend may still use it for up to ``timeout_seconds``.

        Args:
            forming: Called at least every ``PROGRESS_SECONDS`` while it connects.
            options: Options of what goes beside the buffer; see ``Operation.arrived``.

        Raises:
            PeerUnavailableError: The group could not be formed.
            WeftError: The error that ``abort`` was called with.
        """
        with self._lock:
            self.check()
            backend = self._backend
        assert backend is not None  # ``check`` raises once it is closed
        # Outside the lock: forming may take long, and ``abort`` must get in meanwhile.
        try:
            if backend.is_formed:
                work = backend.broadcast(buffer, timeout_seconds, options)
            else:
                work = self._form(backend, buffer, timeout_seconds, forming, options)
        except RuntimeError as error:
            self.check()
            raise PeerUnavailableError(f"the side group could not be formed: {error}") from error
        operation = Operation(self, work, buffer)
        with self._lock:
            if self._error is None:
                self._in_flight.append(operation)
                return operation
        # The caller never gets it, so nobody else could give back what it borrows.
        with contextlib.suppress(PeerUnavailableError):
            operation.give_back()
        _PARKED.park(backend, [operation])
        raise self._error

    def _form(
        self,
        backend: Backend,
        buffer: torch.Tensor,
        timeout_seconds: float,
        forming: Callable[[], None],
        options: BucketOptions,
    ) -> Work:
        """Begin the first broadcast, which waits inside the library for all members. It runs on
        another thread, with this one's CUDA stream, so that this one can report and be aborted."""
        with_stream = same_stream(buffer.device)

        def first() -> Work:
            with with_stream():
                return backend.broadcast(buffer, timeout_seconds, options)

        def on_progress() -> None:
            self.check()
            forming()

        return report_while(first, on_progress)

    def check(self) -> None:
        """Raise the error that ``abort`` was called with, if it was called."""
        if self._error is not None:
            raise self._error

    def finished(self, operation: Operation) -> None:
        """Forget an operation that has ended."""
        with self._lock:
            if operation in self._in_flight:  # not so if ``close`` came between
                self._in_flight.remove(operation)

    def abort(self, error: WeftError) -> None:
        """Make every wait, now and later, raise ``error``; never blocks.

        What a backend cannot abort is abandoned: group, buffers and store are parked
        until it lets go of them.
        """
        with self._lock:
            if self._error is None:
                self._error = error
            operations, backend = list(self._in_flight), self._backend
        if backend is not None:
            backend.abort()
        for operation in operations:
            operation.wake()
        _PARKED.park(backend, operations)

    def close(self, settle_seconds: float = 0.0) -> bool:
        """Leave the group; operations still under way are parked, not waited for.

        With none under way the backend's threads and sockets end here. They must not
        wait for this object: it lies in a circle of references, and the collector
        may come late.

        Args:
            settle_seconds: How long to wait until memory is safe to use again.

        Returns:
            True if it is; False if an abandoned operation may still touch its buffer.
        """
        with self._lock:
            if self._error is None:
                self._error = TransferAbortedError("this rank left the side group")
            operations, self._in_flight = self._in_flight, []
            backend, self._backend = self._backend, None
        if backend is None:
            return False
        backend.abort()
        _PARKED.park(backend, operations)
        return not operations or backend.settle(settle_seconds)


#: For a few instructions on threads that are about to run.
_DROP_WAITS = 2000


class _ParkedGroups:
    """Groups whose operations may still touch memory, held until they end or the process does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Operation, object] = {}
        self._open: weakref.WeakSet[Backend] = weakref.WeakSet()

    def opened(self, backend: Backend) -> None:
        """Register the backend of a group that was opened, by a weak reference."""
        with self._lock:
            self._open.add(backend)

    def park(self, backend: object, operations: list[Operation]) -> None:
        with self._lock:
            held = {**self._held, **dict.fromkeys(operations, backend)}
            self._held = {op: of for op, of in held.items() if not op.done}

    def count(self) -> int:
        with self._lock:
            return len({id(backend) for backend in self._held.values()})

    def abandon(self) -> None:
        """Keep held and open groups from being destroyed as the process ends. Destructors of held
        ones would wait for their operations, as long as a push may take. Those of open ones close
        connections, and operations end by that while the interpreter is torn down (see
        ``works_to_hold``)."""
        with self._lock:
            held, opened = dict(self._held), list(self._open)
        left = (held, opened, works_to_hold(_DROP_WAITS))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))


_PARKED = _ParkedGroups()
atexit.register(_PARKED.abandon)


def num_parked_groups() -> int:
    """Return the number of groups abandoned with operations that had not ended when last
    checked."""
    return _PARKED.count()
