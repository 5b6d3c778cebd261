"""Hand-off queue from the thread that receives a base to the threads that load it.

Each rank of the replica has one loader (``ranks`` reaches those of the other ranks). A base that is
loaded in place has no copy that waits for a commit: each bucket is loaded from the memory that it
was received in, and that memory is then used again. Nothing here knows where buckets come from, or
how they are loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from rollout_side.memory.segment import Segment
from weft_rl.contract.errors import (
    DigestMismatchError,
    LoadFailedError,
    NotReadyError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.progress import PROGRESS_SECONDS
from weft_rl.transport.wire.buckets import in_manifest_order

#: Seconds without progress in which an engine may finish its layers after the last bucket.
FINISHING_SECONDS = 60.0


class SharedBucket(NamedTuple):
    """Place where other processes find a bucket."""

    buffers: Sequence[Segment]
    """All buffers that a side group receives in: the same object for each of its buckets."""
    number: int
    """Number of the buffer that the bucket lies in, from its first byte on."""


class Handoff(Protocol):
    """One rank's end of a transfer that is loaded in place."""

    @property
    def transfer_id(self) -> str:
        """Transfer that brings the buckets."""

    @property
    def version(self) -> PolicyVersion:
        """Version that the buckets belong to."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of that version; another rank's end may block for it."""

    @property
    def content_digest(self) -> bytes:
        """Content digest of the version, once the loader was given all buckets."""

    @property
    def error(self) -> WeftError | None:
        """Error that ended it before it was loaded whole; None if there is none."""

    @property
    def is_begun(self) -> bool:
        """True if the loader was given a bucket."""

    @property
    def is_complete(self) -> bool:
        """True if all is loaded here, and on the ranks that this one waits for."""

    def fail(self, error: WeftError) -> None:
        """End the transfer on all ranks: every wait, now and later, raises ``error``. The first
        error counts, and a complete load is not undone."""

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every bucket with its index, in order; block for each. Once only, on the loader's
        thread.

        A bucket's memory may be written again when the next one is asked for, or the iterator is
        closed. On an accelerator both wait until the calling thread's current stream has done all
        its work.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: The error that has ended the transfer.
        """

    def report_progress(self) -> None:
        """Report, on the loader's thread, that it works; may be called at any rate."""

    def complete(self) -> None:
        """Report that this rank's loader is done with all buckets.

        Raises:
            WeftError: The error that has ended the transfer before.
        """


class _QueuedBucket(NamedTuple):
    wire: torch.Tensor
    shared: SharedBucket | None


@dataclass
class _Loader:
    """Progress of one rank's loader."""

    num_taken: int = 0
    num_loaded: int = 0
    is_complete: bool = False


class HandoffQueue:
    """``Handoff`` of the receiving rank: the ordered buckets of one transfer. Each is put once, and
    taken once by each rank's loader.

    It outlives a side group: what was put stays, and the receiver of the next group resumes there.
    The receiver bounds the memory: it puts no more buckets than it has buffers.

    Args:
        transfer_id: Transfer that brings the buckets.
        version: Version that the buckets belong to.
        manifest: Manifest of that version.
        deadline: ``time.monotonic()`` at which both sides give up.
        num_loaders: Number of ranks of the replica. The first is this process's; others are given
            no bucket before it was.
    """

    def __init__(
        self,
        transfer_id: str,
        version: PolicyVersion,
        manifest: Manifest,
        deadline: float,
        num_loaders: int = 1,
    ) -> None:
        self.transfer_id, self.version, self.manifest = transfer_id, version, manifest
        self._changed = threading.Condition()
        self._deadline = deadline
        self._digests: list[Sequence[int]] = []
        #: Buckets by index, until every loader is done with them.
        self._waiting: dict[int, _QueuedBucket] = {}
        self._loaders = [_Loader() for _ in range(num_loaders)]
        self.error: WeftError | None = None
        self._on_progress: Callable[[int], None] = lambda bucket: None

    # -- either side, any thread ---------------------------------------------------

    @property
    def digests(self) -> list[Sequence[int]]:
        """Digests of the tensors of each bucket that was put; a copy."""
        with self._changed:
            return list(self._digests)

    @property
    def num_loaders(self) -> int:
        """Number of ranks that load what is put."""
        return len(self._loaders)

    @property
    def content_digest(self) -> bytes:
        return content_digest(in_manifest_order(self.manifest, self.digests))

    @property
    def is_begun(self) -> bool:
        return self._loaders[0].num_taken > 0

    @property
    def is_complete(self) -> bool:
        """True if every rank has loaded all buckets and is done."""
        return all(loader.is_complete for loader in self._loaders)

    def report_to(self, on_progress: Callable[[int], None]) -> None:
        """Set the callback for the bucket that is being loaded; it replaces the former one."""
        self._on_progress = on_progress

    def resume(self, deadline: float) -> None:
        """Let the transfer resume in another group, until ``deadline`` if that is later.

        Raises:
            WeftError: The error that has ended the transfer.
        """
        with self._changed:
            self._check()
            self._deadline = max(self._deadline, deadline)
            self._changed.notify_all()

    def fail(self, error: WeftError) -> None:
        with self._changed:
            if self.error is None and not self.is_complete:
                self.error = copy_error(error)
            self._waiting.clear()
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake a waiting receiver, so that it calls its ``check`` now."""
        with self._changed:
            self._changed.notify_all()

    # -- the receiver's thread -----------------------------------------------------

    def put(
        self,
        index: int,
        wire: torch.Tensor,
        digests: Sequence[int],
        shared: SharedBucket | None = None,
    ) -> None:
        """Hand over a verified bucket; a bucket that was put before is dropped.

        Args:
            wire: uint8, the bucket's payload and trailer. Loaders read it until
                ``is_loaded(index)``.
            digests: Digests of the bucket's tensors.
            shared: Place where other ranks find the bucket, if there are any.

        Raises:
            DigestMismatchError: It has other bytes than the first time, which may be loaded.
            WeftError: The error that has ended the transfer.
        """
        with self._changed:
            self._check()
            if index < len(self._digests):
                if self._digests[index] != digests:
                    raise DigestMismatchError(
                        f"bucket {index} of {self.version} came again with other bytes, after it "
                        "was loaded in place; push again"
                    )
                return
            assert index == len(self._digests), "buckets are put in order"
            self._digests.append(digests)
            self._waiting[index] = _QueuedBucket(wire, shared)
            self._changed.notify_all()

    def is_loaded(self, index: int) -> bool:
        """Return whether every loader is done with a bucket, so that its memory may be written."""
        with self._changed:
            self._check()
            return index < self._num_loaded()

    def wait_loaded(self, index: int, check: Callable[[], None]) -> None:
        """Block until ``is_loaded(index)``.

        Args:
            check: Called before each wait, and after ``wake``; raises to end the wait.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: The error that has ended the transfer, or what ``check`` raised.
        """
        self._wait(lambda: index < self._num_loaded(), f"load bucket {index}", check)

    def wait_complete(self, check: Callable[[], None]) -> None:
        """Block until every loader is done with all buckets; raises as ``wait_loaded`` does.

        Once this process's loader was given the last bucket, it is inside the engine, which
        finishes its layers and cannot report. For ``FINISHING_SECONDS`` this method reports in its
        place. Another rank's process reports for itself, as long as it runs.
        """
        given_at, own = 0.0, self._loaders[0]

        def finishing() -> None:
            nonlocal given_at
            if own.num_taken == len(self.manifest.buckets) and not own.is_complete:
                given_at = given_at or time.monotonic()
                if time.monotonic() - given_at < FINISHING_SECONDS:
                    self.report_progress()

        self._wait(lambda: self.is_complete, "load the last bucket", check, finishing)

    def _wait(
        self,
        done: Callable[[], bool],
        what: str,
        check: Callable[[], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        with self._changed:
            while True:
                self._check()
                if done():
                    return
                check()
                on_progress()
                if not self._wait_once():
                    raise TransferTimeoutError(
                        f"the engine did not {what} of {self.version} before the deadline"
                    )

    # -- a loader's thread ---------------------------------------------------------

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """See ``Handoff``; of this process's loader."""
        for index in range(len(self.manifest.buckets)):
            with self._taken(0) as waiting:
                try:
                    yield index, waiting.wire
                finally:
                    synchronize()

    def shared_buckets(self, loader: int) -> Iterator[tuple[int, SharedBucket, Sequence[int]]]:
        """Yield the index, place and tensor digests of every bucket for another rank's loader.
        Otherwise as ``buckets``."""
        if not 0 < loader < len(self._loaders) or self._loaders[loader].num_taken:
            raise NotReadyError(f"rank {loader} has no load of {self.version} to begin; push again")
        for index in range(len(self.manifest.buckets)):
            with self._taken(loader) as waiting:
                assert waiting.shared is not None, "buckets are shared where there are more ranks"
                yield index, waiting.shared, self._digests[index]

    def report_progress(self) -> None:
        self._on_progress(max(0, self._num_taken() - 1))

    def complete(self, loader: int = 0) -> None:
        with self._changed:
            self._check()
            state = self._loaders[loader]
            assert state.num_taken == len(self.manifest.buckets), "the loader left buckets out"
            state.num_loaded, state.is_complete = state.num_taken, True
            self._changed.notify_all()

    @contextmanager
    def _taken(self, loader: int) -> Iterator[_QueuedBucket]:
        """Lend the next bucket to a loader, which is done with it at the end."""
        waiting = self._take(loader)
        self.report_progress()
        try:
            yield waiting
        finally:
            with self._changed:
                state = self._loaders[loader]
                state.num_loaded = state.num_taken
                if state.num_loaded <= self._num_loaded():
                    self._waiting.pop(state.num_loaded - 1, None)
                self._changed.notify_all()

    def _take(self, loader: int) -> _QueuedBucket:
        state = self._loaders[loader]
        with self._changed:
            while True:
                self._check()
                if state.num_taken < (self._loaders[0].num_taken if loader else len(self._digests)):
                    state.num_taken += 1
                    self._changed.notify_all()
                    return self._waiting[state.num_taken - 1]
                if not self._wait_once():
                    self.error = TransferTimeoutError(
                        f"bucket {state.num_taken} of {self.version} did not arrive before the "
                        "deadline"
                    )
                    self._changed.notify_all()

    # -- how, with the lock held ---------------------------------------------------

    def _num_taken(self) -> int:
        return min(loader.num_taken for loader in self._loaders)

    def _num_loaded(self) -> int:
        return min(loader.num_loaded for loader in self._loaders)

    def _check(self) -> None:
        if self.error is not None:
            raise copy_error(self.error)

    def _wait_once(self) -> bool:
        """Wait for a change, or for a moment; return False if the deadline has passed."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._changed.wait(min(left, PROGRESS_SECONDS))
        return True


def copy_error(error: WeftError) -> WeftError:
    """Copy an error without its traceback, whose frames would keep buckets alive. Several threads
    can raise copies of one error."""
    return error_from_reason(error.reason, error.message, error.metadata)


def synchronize() -> None:
    """Block until the calling thread's current CUDA stream has done its work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


class HandoffSlot:
    """Slot of a worker's hand-off queue, of which there is at most one; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handoff: HandoffQueue | None = None

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """Transfer that is loaded in place, or was and waits for its commit; empty if there is
        none."""
        handoff = self._handoff
        return (handoff.transfer_id,) if handoff is not None else ()

    def put(self, handoff: HandoffQueue) -> None:
        """Put a new queue in the slot; the former one is ended."""
        with self._lock:
            former, self._handoff = self._handoff, handoff
        if former is not None:
            former.fail(TransferAbortedError(f"{handoff.version} is loaded in place instead"))

    def of(self, transfer_id: str) -> HandoffQueue | None:
        """Return a transfer's queue; None if it is not, or no longer, loaded in place."""
        handoff = self._handoff
        return handoff if handoff is not None and handoff.transfer_id == transfer_id else None

    def forget(self, transfer_id: str) -> HandoffQueue | None:
        """Remove and return the queue of a transfer, which is committed; None if it is not held."""
        with self._lock:
            handoff = self.of(transfer_id)
            if handoff is not None:
                self._handoff = None
            return handoff

    def discard(self, transfer_id: str) -> None:
        """Remove a transfer's queue, and end it."""
        if (handoff := self.forget(transfer_id)) is not None:
            handoff.fail(TransferAbortedError(f"{transfer_id} was discarded"))


_log = logging.getLogger(__name__)

# A loader ends at its next bucket, so this bounds the load of one bucket.
_END_SECONDS = 20.0


class InPlaceLoad:
    """Thread that loads a hand-off's buckets on one rank; it begins at once.

    Args:
        handoff: Hand-off to load from.
        load: Called once on that thread, with the hand-off. If it has changed nothing, it raises
            what the hand-off raised, or any typed error. If weights may be mixed, it raises
            LoadFailedError with metadata ``dirty`` "true". Any other error counts as that.
    """

    def __init__(self, handoff: Handoff, load: Callable[[Handoff], None]) -> None:
        self.handoff = handoff
        self.seconds = 0.0
        """Seconds that the load took, once it has ended."""
        self._load = load
        self._changed = False
        self._thread = threading.Thread(
            target=self._run, name=f"weft-load-{handoff.version}", daemon=True
        )
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """Thread that loads."""
        return self._thread

    @property
    def transfer_id(self) -> str:
        """Transfer that brings the buckets."""
        return self.handoff.transfer_id

    @property
    def is_running(self) -> bool:
        """True if the thread may still touch the weights."""
        return self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """True if all was loaded; on the receiving rank, by every rank."""
        return self.handoff.is_complete

    @property
    def is_void(self) -> bool:
        """True if the load ended before its first bucket."""
        return self.handoff.error is not None and not self.handoff.is_begun

    def check(self) -> None:
        """Check that the load has not ended with an error.

        Raises:
            NotReadyError: The load has ended with an error.
        """
        if (error := self.handoff.error) is not None:
            raise NotReadyError(
                f"transfer {self.transfer_id} has ended on this replica: {error.message}"
            )

    def end(self, timeout_seconds: float = _END_SECONDS) -> bool:
        """End the load, unless it is complete; block until the thread has ended.

        Returns:
            Whether the weights have changed: loaded whole, or mixed.
        """
        self.handoff.fail(TransferAbortedError("the load in place was ended"))
        self._thread.join(timeout_seconds)
        return self._changed or self._thread.is_alive()

    def confirm(self, expected_digest: bytes) -> float:
        """Check that the version to be committed was loaded; return the seconds that it took.

        Raises:
            LoadFailedError: Metadata ``dirty``: other bytes, or not all, are loaded.
            NotReadyError: The load is not complete and has changed nothing; it is ended.
        """
        if not self.is_complete:
            changed = self.end()
            what = f"{self.handoff.version} cannot be committed: it was not loaded whole"
            if changed:
                raise LoadFailedError(
                    f"{what}, and the weights are mixed", metadata={"dirty": "true"}
                )
            raise NotReadyError(what)
        digest = self.handoff.content_digest
        if digest != expected_digest:
            error = DigestMismatchError(
                f"{self.handoff.version} was loaded with digest {digest.hex()}, but the commit is "
                f"for {expected_digest.hex()}"
            )
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error
        self._thread.join(_END_SECONDS)
        return self.seconds

    def _run(self) -> None:
        handoff, began = self.handoff, time.perf_counter()
        try:
            self._load(handoff)
            self.seconds, self._changed = time.perf_counter() - began, True
            handoff.complete()
        except WeftError as error:
            self._changed |= error.metadata.get("dirty") == "true"
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 (the edge of a thread)
            _log.exception("loading %s in place failed", handoff.version)
            self._changed = True
            self._fail(
                LoadFailedError(
                    f"loading {handoff.version} in place failed: {type(error).__name__}: {error}",
                    metadata={"dirty": "true"},
                )
            )

    def _fail(self, error: WeftError) -> None:
        _log.warning("loading %s in place failed: %s", self.handoff.version, error)
        self.handoff.fail(error)
