"""The hand-off queue from the thread that receives a base to those that load it: one of each
rank of the replica (``ranks`` is how the others are reached).

Where a base is loaded in place there is no copy that waits for a commit: each bucket is
loaded from the memory it was received in, which is then received into again. Nothing
here knows where buckets come from, or what a loader does with them.
"""

from __future__ import annotations

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
    NotReadyError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.speaking import SPEAK_SECONDS
from weft_rl.transport.wire.buckets import in_manifest_order

#: How long an engine may take, without a word, to finish its layers after the last bucket.
FINISHING_SECONDS = 60.0


class Shared(NamedTuple):
    """Where other processes find a bucket."""

    buffers: Sequence[Segment]
    """All that a side group receives in: the same object for each of its buckets."""
    number: int
    """Of the one that the bucket lies in, from its first byte on."""


class Handoff(Protocol):
    """One rank's end of a transfer that is loaded in place."""

    @property
    def transfer_id(self) -> str:
        """Whose buckets."""

    @property
    def version(self) -> PolicyVersion:
        """What they are of."""

    @property
    def manifest(self) -> Manifest:
        """Of that version; another rank's end may block for it."""

    @property
    def content_digest(self) -> bytes:
        """Of the version, once the loader was given all."""

    @property
    def error(self) -> WeftError | None:
        """Why it has ended without being loaded whole; None if it has not."""

    @property
    def is_begun(self) -> bool:
        """Whether the loader was given a bucket."""

    @property
    def is_complete(self) -> bool:
        """Whether all was loaded: here, and as far as this rank waits for others, there."""

    def fail(self, error: WeftError) -> None:
        """End it, on all ranks: every wait, now and later, raises ``error``. The first error
        stays, and what was loaded whole is not undone."""

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every bucket with its index, in order; blocks for each. Once only, on the loader's
        thread.

        A bucket's memory may be written again when the next one is asked for, or the
        iterator is closed. On an accelerator that waits until all has been done that
        was given to the calling thread's current stream.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: The transfer has ended: why.
        """

    def speak(self) -> None:
        """Say, in the loader's thread, that it works; as often as one likes."""

    def complete(self) -> None:
        """Say that this rank's loader has done with all.

        Raises:
            WeftError: It has ended before: why.
        """


class _Waiting(NamedTuple):
    wire: torch.Tensor
    shared: Shared | None


@dataclass
class _Loader:
    """How far one rank has come."""

    num_taken: int = 0
    num_loaded: int = 0
    is_complete: bool = False


class HandoffQueue:
    """The receiving rank's ``Handoff``: one transfer's buckets, in order, each put once and
    taken once by each rank's loader.

    It outlives a side group: what was put stays, and the receiver of the next group resumes
    there. Memory is bounded by the receiver, which puts no more buckets than it
    has buffers.

    Args:
        transfer_id: Whose buckets.
        version: What they are of.
        manifest: Of that version.
        deadline: ``time.monotonic()`` at which both sides give up.
        num_loaders: Ranks of the replica. The first is this process's; others are given no
            bucket before it was.
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
        #: By index, until every loader is done with it.
        self._waiting: dict[int, _Waiting] = {}
        self._loaders = [_Loader() for _ in range(num_loaders)]
        self._error: WeftError | None = None
        self._speak: Callable[[int], None] = lambda bucket: None

    # -- either side, any thread ---------------------------------------------------

    @property
    def digests(self) -> list[Sequence[int]]:
        """Digests of the tensors of each bucket that was put; a copy."""
        with self._changed:
            return list(self._digests)

    @property
    def num_loaders(self) -> int:
        """Ranks that load what is put."""
        return len(self._loaders)

    @property
    def content_digest(self) -> bytes:
        """See ``Handoff``."""
        return content_digest(in_manifest_order(self.manifest, self.digests))

    @property
    def error(self) -> WeftError | None:
        """See ``Handoff``."""
        return self._error

    @property
    def is_begun(self) -> bool:
        """See ``Handoff``."""
        return self._loaders[0].num_taken > 0

    @property
    def is_complete(self) -> bool:
        """Whether every rank has loaded all and is done."""
        return all(loader.is_complete for loader in self._loaders)

    def tell(self, speak: Callable[[int], None]) -> None:
        """Let the loader say which bucket it loads; replaces what was told before."""
        self._speak = speak

    def resume(self, deadline: float) -> None:
        """Let it resume in another group, until ``deadline`` if that is later.

        Raises:
            WeftError: It has ended: why.
        """
        with self._changed:
            self._check()
            self._deadline = max(self._deadline, deadline)
            self._changed.notify_all()

    def fail(self, error: WeftError) -> None:
        """See ``Handoff``."""
        with self._changed:
            if self._error is None and not self.is_complete:
                self._error = copy_error(error)
            self._waiting.clear()
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a wait of the receiver ask its ``check`` now."""
        with self._changed:
            self._changed.notify_all()

    # -- the receiver's thread -----------------------------------------------------

    def put(
        self,
        index: int,
        wire: torch.Tensor,
        digests: Sequence[int],
        shared: Shared | None = None,
    ) -> None:
        """Hand over a verified bucket; one that was put before came again, and is dropped.

        Args:
            wire: uint8, the bucket's payload and trailer. Loaders read it until
                ``is_loaded(index)``.
            digests: Of its tensors.
            shared: Where other ranks find it, if there are any.

        Raises:
            DigestMismatchError: Other bytes came than the first time, which may be loaded.
            WeftError: It has ended: why.
        """
        with self._changed:
            self._check()
            if index < len(self._digests):
                if self._digests[index] != digests:
                    raise DigestMismatchError(
                        f"bucket {index} of {self.version} came again with other bytes, and is "
                        "loaded in place: push again"
                    )
                return
            assert index == len(self._digests), "buckets are put in order"
            self._digests.append(digests)
            self._waiting[index] = _Waiting(wire, shared)
            self._changed.notify_all()

    def is_loaded(self, index: int) -> bool:
        """Whether every loader has done with a bucket: its memory may be written."""
        with self._changed:
            self._check()
            return index < self._num_loaded()

    def wait_loaded(self, index: int, check: Callable[[], None]) -> None:
        """Block until ``is_loaded(index)``.

        Args:
            check: Called before each wait, and after ``wake``; raises to end it.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: It has ended, or what ``check`` raised.
        """
        self._wait(lambda: index < self._num_loaded(), f"load bucket {index}", check)

    def wait_complete(self, check: Callable[[], None]) -> None:
        """Block until every loader is done with all; raises as ``wait_loaded`` does.

        Once this process's loader was given the last bucket it is inside the engine, which
        finishes its layers and cannot speak: that it still works is said from here, for
        ``FINISHING_SECONDS``. Another rank's process says so itself, as long as it runs.
        """
        given_at, own = 0.0, self._loaders[0]

        def finishing() -> None:
            nonlocal given_at
            if own.num_taken == len(self.manifest.buckets) and not own.is_complete:
                given_at = given_at or time.monotonic()
                if time.monotonic() - given_at < FINISHING_SECONDS:
                    self.speak()

        self._wait(lambda: self.is_complete, "load the last bucket", check, finishing)

    def _wait(
        self,
        done: Callable[[], bool],
        what: str,
        check: Callable[[], None],
        speak: Callable[[], None] = lambda: None,
    ) -> None:
        with self._changed:
            while True:
                self._check()
                if done():
                    return
                check()
                speak()
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

    def shared_buckets(self, loader: int) -> Iterator[tuple[int, Shared, Sequence[int]]]:
        """As ``buckets``, of another rank's loader: where each lies, and its tensors' digests.

        Raises:
            NotReadyError: There is no such loader, or it was given buckets before.
        """
        if not 0 < loader < len(self._loaders) or self._loaders[loader].num_taken:
            raise NotReadyError(f"{self.version} is not to be loaded by rank {loader} anew")
        for index in range(len(self.manifest.buckets)):
            with self._taken(loader) as waiting:
                assert waiting.shared is not None, "buckets are shared where there are more ranks"
                yield index, waiting.shared, self._digests[index]

    def speak(self) -> None:
        """See ``Handoff``."""
        self._speak(max(0, self._num_taken() - 1))

    def complete(self, loader: int = 0) -> None:
        """See ``Handoff``."""
        with self._changed:
            self._check()
            state = self._loaders[loader]
            assert state.num_taken == len(self.manifest.buckets), "the loader left buckets out"
            state.num_loaded, state.is_complete = state.num_taken, True
            self._changed.notify_all()

    @contextmanager
    def _taken(self, loader: int) -> Iterator[_Waiting]:
        """The next bucket of a loader, which is done with it at the end."""
        waiting = self._take(loader)
        self.speak()
        try:
            yield waiting
        finally:
            with self._changed:
                state = self._loaders[loader]
                state.num_loaded = state.num_taken
                if state.num_loaded <= self._num_loaded():
                    self._waiting.pop(state.num_loaded - 1, None)
                self._changed.notify_all()

    def _take(self, loader: int) -> _Waiting:
        state = self._loaders[loader]
        with self._changed:
            while True:
                self._check()
                if state.num_taken < (self._loaders[0].num_taken if loader else len(self._digests)):
                    state.num_taken += 1
                    self._changed.notify_all()
                    return self._waiting[state.num_taken - 1]
                if not self._wait_once():
                    self._error = TransferTimeoutError(
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
        if self._error is not None:
            raise copy_error(self._error)

    def _wait_once(self) -> bool:
        """Whether the deadline has not passed; blocks till a change, or for a moment."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._changed.wait(min(left, SPEAK_SECONDS))
        return True


def copy_error(error: WeftError) -> WeftError:
    """Without its traceback, whose frames would keep buckets alive; to be raised on several
    threads."""
    return error_from_reason(error.reason, error.message, error.metadata)


def synchronize() -> None:
    """Block until what the calling thread's current stream was given is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
