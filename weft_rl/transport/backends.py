"""Backends that carry a side group's bytes: NCCL between accelerators' memories, gloo between
hosts', and our own: within one host (``one_sided``) and between hosts (``stream``).

The libraries' backends are built directly on torch's process-group classes, so the application's
own ``torch.distributed`` state is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions

from weft_rl.contract.backends import BACKENDS, NCCL, ONE_SIDED, STREAM
from weft_rl.contract.errors import UnsupportedError
from weft_rl.interrupts import Flag
from weft_rl.transport.host_memory import host_buffer
from weft_rl.transport.one_sided import directory, memory
from weft_rl.transport.one_sided.members import OneSidedReceiver, OneSidedSender
from weft_rl.transport.rendezvous_store import RendezvousStore
from weft_rl.transport.stream import listening
from weft_rl.transport.stream.members import StreamReceiver, StreamSender
from weft_rl.transport.wire.buckets import (
    IN_ITS_BUFFER,
    WHOLE,
    ArrivedBucket,
    BucketOptions,
    write_tail,
)
from weft_rl.transport.wire.lane_options import LaneOptions

_log = logging.getLogger(__name__)

#: Rank of the sender in every side group.
SENDER_RANK = 0

# How long NCCL's watchdog would let an operation last. It ends the process when that
# is over, so it must never be: our own deadlines abort long before.
_NEVER = timedelta(days=30)
_POLL_SECONDS = 0.0001


class Work(Protocol):
    """A broadcast that a library carries out."""

    def wait_until(self, deadline: float) -> bool:
        """Block until the broadcast ended or was woken, at most until ``time.monotonic()`` is
        ``deadline``. Return False at the deadline."""

    def finish(self) -> None:
        """Make the bytes usable by this thread, once the broadcast has ended.

        Raises:
            RuntimeError: The connection broke.
        """

    @property
    def done(self) -> bool:
        """True if the library has let go of the buffer."""

    @property
    def arrived(self) -> ArrivedBucket:
        """Way in which the bytes have arrived, once the broadcast has ended; until
        ``give_back``."""

    def give_back(self) -> None:
        """Report that nothing reads lent memory any more, nor will. Must be called wherever a
        broadcast borrows.

        Raises:
            RuntimeError: The sender has left: it may have changed the bytes meanwhile.
        """

    def receive_again(self, buffer: torch.Tensor, deadline: float) -> bool:
        """Receive the bucket once more, into the same buffer, from the sender itself: other members
        may have garbled it on its way. Blocks, until ``time.monotonic()`` is ``deadline``.

        Returns:
            False if the bytes have come from the sender anyway, or it cannot be reached.
        """

    def keep(self) -> bool:
        """Tell the sender that this receiver has verified the bucket and keeps it; never blocks,
        never raises. Returns whether the backend carries that."""

    @property
    def is_kept(self) -> bool:
        """True once every receiver has said to this sender that it keeps the bucket; never, where
        receivers cannot say so."""

    def wake(self) -> None:
        """End ``wait_until`` early."""


class Backend(Protocol):
    """One rank's membership of a group, as its library knows it."""

    @property
    def is_formed(self) -> bool:
        """True if ``broadcast`` returns at once; else it blocks until all members take part in it,
        or ``abort`` is called."""

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> Work:
        """Begin to send or receive; see ``SideGroup.broadcast``."""

    def abort(self) -> None:
        """End what is under way, as far as the library can; never blocks, never raises."""

    def settle(self, timeout_seconds: float) -> bool:
        """Block until no operation can touch memory any more, after ``abort``.

        Returns:
            True if that is so; always False where the library cannot tell.
        """


def available_backends(device: torch.device) -> tuple[str, ...]:
    """List the backends that a process with weights on ``device`` can use, best first. Only
    ``trial`` finds out whether two processes share a host."""
    return tuple(name for name in BACKENDS if not why_unavailable(name, device))


def why_unavailable(backend: str, device: torch.device) -> str:
    """Return why a process with weights on ``device`` cannot use a backend; empty if it can."""
    if backend not in BACKENDS:
        return "this process knows none of that name"
    if device.type == "cpu" and not BACKENDS[backend].on_host:
        return "it moves weights between NVIDIA GPUs, and this process has none"
    if backend == NCCL and not dist.is_nccl_available():
        return "this torch is built without it"
    if backend == ONE_SIDED:
        missing = memory.why_unavailable() if device.type == "cuda" else ""
        return missing or directory.why_unavailable()
    return listening.why_unavailable() if backend == STREAM else ""


def gpu_uuid(device: torch.device) -> str:
    """Return an accelerator's UUID as NVIDIA's driver prints it; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocate(backend: str, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a zeroed uint8 buffer that a sender may send from over this backend.

    Not ``torch.empty``: touched memory is sent and filled more than twice as fast. On the host it
    is locked where this process uses a GPU.

    Raises:
        CapacityError: This machine has no room.
    """
    if backend == ONE_SIDED:
        return memory.allocate(num_bytes, device)
    if device.type == "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return host_buffer(num_bytes, locked=True).zero_()
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def open_backend(
    name: str,
    store: RendezvousStore,
    rank: int,
    size: int,
    device: torch.device,
    options: LaneOptions,
) -> Backend:
    """Join a group over the named backend; see ``SideGroup``.

    Raises:
        UnsupportedError: A backend that this process does not have.
    """
    if why := why_unavailable(name, device):
        raise UnsupportedError(
            f"side-group backend {name!r} is not available for {device}: {why}; "
            f"have {', '.join(available_backends(device))}"
        )
    if name == NCCL:
        return _NcclBackend(store, rank, size, device)
    if name == ONE_SIDED:
        return (
            OneSidedSender(store, size)
            if rank == SENDER_RANK
            else OneSidedReceiver(store, rank, device)
        )
    if name == STREAM:
        member = StreamSender if rank == SENDER_RANK else StreamReceiver
        return member(store, rank, size, options)
    return _GlooBackend(store, rank, size, options.host)


class _LibraryWork:
    """Broadcast over a library, by which receivers borrow nothing and say nothing to the sender."""

    arrived = IN_ITS_BUFFER
    is_kept = False

    def give_back(self) -> None:
        pass

    def receive_again(self, buffer: torch.Tensor, deadline: float) -> bool:
        return False

    def keep(self) -> bool:
        return False


# -- gloo ------------------------------------------------------------------------

# Gloo's threads drop what told of an operation's end, and then the operation with its tensor
# unless it is held here, too. Either takes the interpreter's lock, and a thread that asks for
# that while the interpreter is torn down ends the process with SIGABRT. Each leaves its dict by a
# function of C: one of Python may give the lock away after it, and would have to ask for it again.
_TOLD: dict[int, weakref.ref[_EndCallback]] = {}
_SENT: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[_GlooWork]]] = {}


def works_to_hold(num_waits: int) -> list[object]:
    """Return the operations that must never be dropped as the process ends, so that gloo's threads
    need no interpreter any more. First waits for what these are about to drop, at most
    ``num_waits`` times for a millisecond: a clock also counts the time that a machine stands still.
    """
    while True:
        works = [work() for _, work in [*_SENT.values()]]
        if (not _TOLD and None not in works) or not num_waits:
            return [work for work in works if work is not None]
        time.sleep(0.001)
        num_waits -= 1


class _EndCallback:
    """Callback on gloo's thread that tells that an operation has ended."""

    def __init__(self, ended: Flag) -> None:
        self._ended = ended

    def __call__(self, future: object) -> None:
        key = id(self)
        _TOLD[key] = weakref.ref(self, partial(_TOLD.pop, key))
        self._ended.set()


class _GlooWork(_LibraryWork):
    """Broadcast over gloo.

    Args:
        sent: Tensor that gloo was given: a handle of the buffer that nobody else has.
    """

    def __init__(self, work: Any, sent: torch.Tensor) -> None:
        self._work = work
        self._ended = Flag()
        key = id(sent)
        _SENT[key] = weakref.ref(sent, partial(_SENT.pop, key)), weakref.ref(self)
        work.get_future().add_done_callback(_EndCallback(self._ended))

    def wait_until(self, deadline: float) -> bool:
        return self._ended.wait(deadline - time.monotonic())

    def finish(self) -> None:
        # The future is done a moment before the work says so: this wait is that moment.
        self._work.wait()

    @property
    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wake(self) -> None:
        self._ended.set()


class _GlooBackend:
    """Backend between hosts' memories. Forming is lazy: the first broadcast connects.

    It cannot be aborted (``ProcessGroupGloo.abort`` does nothing in torch 2.13): what is
    under way is left to its own timeout, and its memory with it.
    """

    def __init__(self, store: RendezvousStore, rank: int, size: int, host: str) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=True)]
        options._timeout = store.timeout
        self._store = store  # the group holds its C++ half only
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    #: Threads of its own connect.
    is_formed = True

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> Work:
        write_tail(buffer, options)
        how = BroadcastOptions()
        how.rootRank = SENDER_RANK
        how.timeout = timedelta(seconds=timeout_seconds)
        sent = buffer.view_as(buffer)
        return _GlooWork(self._group.broadcast([sent], how), sent)

    def abort(self) -> None:
        pass

    def settle(self, timeout_seconds: float) -> bool:
        return False


# -- NCCL ------------------------------------------------------------------------


class _NcclWork(_LibraryWork):
    """Broadcast over NCCL. Its end is polled, not waited for: a wait inside CUDA could not be
    woken."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._woken = False

    def wait_until(self, deadline: float) -> bool:
        while not (self._woken or self._work.is_completed()):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def finish(self) -> None:
        self._work.wait()  # what this stream does next comes after it

    @property
    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wake(self) -> None:
        self._woken = True


class _NcclBackend:
    """Backend between accelerators' memories, on ``device``.

    The communicator is made by the first broadcast (about a second) and kept. Work is
    ordered after what the calling thread's current CUDA stream was given before.

    ``abort`` frees every member that is left, when all of them do it (measured: 0.1 to
    0.5 s); a communicator that failed is never destroyed in another way.
    """

    def __init__(self, store: RendezvousStore, rank: int, size: int, device: torch.device) -> None:
        group_class: Any = dist.ProcessGroupNCCL
        options = group_class.Options()
        options._timeout = _NEVER
        options.config.blocking = 0  # forming can be aborted, too
        self._store = store  # the group holds its C++ half only
        self._device = device
        with _tame_watchdog():
            self._group: Any = group_class(store, rank, size, options)
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None
        self.is_formed = False

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> Work:
        write_tail(buffer, options)
        how = BroadcastOptions()
        how.rootRank = SENDER_RANK
        with torch.cuda.device(self._device):
            work = _NcclWork(self._group.broadcast([buffer], how))
        self.is_formed = True
        return work

    def abort(self) -> None:
        with self._lock:
            if self._ending is None:
                self._ending = threading.Thread(
                    target=self._abort, name="weft-nccl-abort", daemon=True
                )
                self._ending.start()

    def settle(self, timeout_seconds: float) -> bool:
        if self._ending is None:
            return False
        self._ending.join(timeout_seconds)
        return not self._ending.is_alive()

    def _abort(self) -> None:
        try:
            self._group.abort()
        except Exception:  # noqa: BLE001 (the edge of a thread)
            _log.exception("NCCL could not abort a side group")


_WATCHDOG = {
    # It would end the process of a trainer whose peer has died.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # It would be looked for in the group's store, also after that is gone.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Waits must only order streams: we watch the clock ourselves.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_environment_lock = threading.Lock()


@contextlib.contextmanager
def _tame_watchdog() -> Iterator[None]:
    """Keep a process group that is made inside the ``with`` from ending this process.

    torch reads these variables when a group is made, and from the environment only; the
    application's own groups keep what it has set for them.
    """
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _WATCHDOG}
        os.environ.update(_WATCHDOG)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
