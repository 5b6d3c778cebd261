"""The hand-off queue from the thread that receives a base to the one that loads it.

Where a base is loaded in place there is no copy that waits for a commit: each bucket is
loaded from the memory it was received in, which is then received into again. Nothing
here knows where buckets come from, or what a loader does with them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from weft.contract.errors import (
    DigestMismatchError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft.contract.layout.manifest import Manifest
from weft.contract.names import PolicyVersion
from weft.transport.buckets import in_manifest_order
from weft.transport.digest import content_digest
from weft.transport.group import SPEAK_SECONDS


class HandoffQueue:
    """One transfer's buckets, in order, each put once and taken once.

    It outlives a side group: what was put stays, and the receiver of the next group resumes
    there. Memory is bounded by the receiver, which puts no more buckets than it
    has buffers.

    Args:
        transfer_id: Whose buckets.
        version: What they are of.
        manifest: Of that version.
        deadline: ``time.monotonic()`` at which both sides give up.
    """

    def __init__(
        self, transfer_id: str, version: PolicyVersion, manifest: Manifest, deadline: float
    ) -> None:
        self.transfer_id, self.version, self.manifest = transfer_id, version, manifest
        self._changed = threading.Condition()
        self._deadline = deadline
        self._digests: list[Sequence[int]] = []
        self._waiting: deque[torch.Tensor] = deque()
        self._num_taken = self._num_loaded = 0
        self._complete = False
        self._error: WeftError | None = None
        self._speak: Callable[[int], None] = lambda bucket: None

    # -- either side, any thread ---------------------------------------------------

    @property
    def digests(self) -> list[Sequence[int]]:
        """Digests of the tensors of each bucket that was put; a copy."""
        with self._changed:
            return list(self._digests)

    @property
    def content_digest(self) -> bytes:
        """Of the version, once all was put."""
        return content_digest(in_manifest_order(self.manifest, self.digests))

    @property
    def error(self) -> WeftError | None:
        """Why it has ended without being loaded whole; None if it has not."""
        return self._error

    @property
    def is_begun(self) -> bool:
        """Whether the loader was given a bucket."""
        return self._num_taken > 0

    @property
    def is_complete(self) -> bool:
        """Whether the loader has loaded all and is done."""
        return self._complete

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
        """End it: every wait, now and later, raises ``error``. The first error stays, and
        what was loaded whole is not undone."""
        with self._changed:
            if self._error is None and not self._complete:
                self._error = _copy(error)
            self._waiting.clear()
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a wait of the receiver ask its ``check`` now."""
        with self._changed:
            self._changed.notify_all()

    # -- the receiver's thread -----------------------------------------------------

    def put(self, index: int, wire: torch.Tensor, digests: Sequence[int]) -> None:
        """Hand over a verified bucket; one that was put before came again, and is dropped.

        Args:
            wire: uint8, the bucket's payload and trailer. The loader reads it until
                ``is_loaded(index)``.
            digests: Of its tensors.

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
            self._waiting.append(wire)
            self._changed.notify_all()

    def is_loaded(self, index: int) -> bool:
        """Whether the loader has done with a bucket: its memory may be written."""
        with self._changed:
            self._check()
            return index < self._num_loaded

    def wait_loaded(self, index: int, check: Callable[[], None]) -> None:
        """Block until ``is_loaded(index)``.

        Args:
            check: Called before each wait, and after ``wake``; raises to end it.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: It has ended, or what ``check`` raised.
        """
        self._wait(lambda: index < self._num_loaded, f"load bucket {index}", check)

    def wait_complete(self, check: Callable[[], None]) -> None:
        """Block until the loader is done with all; raises as ``wait_loaded`` does.

        Once it was given the last bucket it is inside the engine, which finishes its layers
        and cannot speak: that it still works is said from here.
        """

        def finishing() -> None:
            if self._num_taken == len(self.manifest.buckets):
                self.speak()

        self._wait(lambda: self._complete, "load the last bucket", check, finishing)

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

    # -- the loader's thread -------------------------------------------------------

    @property
    def bucket_digests(self) -> list[Sequence[int]]:
        """Digests of the tensors of each bucket that the loader was given; a copy."""
        with self._changed:
            return self._digests[: self._num_taken]

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every bucket with its index, in order; blocks for each. Once only.

        A bucket's memory may be written again when the next one is asked for, or the
        iterator is closed. On an accelerator that waits until all has been done that
        was given to the calling thread's current stream.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: The transfer has ended: why.
        """
        for index in range(len(self.manifest.buckets)):
            wire = self._take()
            self.speak()
            try:
                yield index, wire
            finally:
                del wire
                _synchronize()
                with self._changed:
                    self._num_loaded = index + 1
                    self._changed.notify_all()

    def speak(self) -> None:
        """Say, in the loader's thread, that it works; as often as one likes."""
        self._speak(max(0, self._num_taken - 1))

    def complete(self) -> None:
        """Say that the loader has done with all; both sides are free of each other.

        Raises:
            WeftError: It has ended before: why.
        """
        with self._changed:
            self._check()
            assert self._num_taken == len(self.manifest.buckets), "the loader left buckets out"
            self._num_loaded = self._num_taken
            self._complete = True
            self._changed.notify_all()

    def _take(self) -> torch.Tensor:
        with self._changed:
            while True:
                self._check()
                if self._waiting:
                    self._num_taken += 1
                    return self._waiting.popleft()
                if not self._wait_once():
                    self._error = TransferTimeoutError(
                        f"bucket {self._num_taken} of {self.version} did not arrive before the "
                        "deadline"
                    )
                    self._changed.notify_all()

    # -- how, with the lock held ---------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise _copy(self._error)

    def _wait_once(self) -> bool:
        """Whether the deadline has not passed; blocks till a change, or for a moment."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._changed.wait(min(left, SPEAK_SECONDS))
        return True


class HandoffSlot:
    """The hand-off queue of a worker, of which there is at most one; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handoff: HandoffQueue | None = None

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """The transfer that is loaded in place, or was and waits for its commit."""
        handoff = self._handoff
        return (handoff.transfer_id,) if handoff is not None else ()

    def put(self, handoff: HandoffQueue) -> None:
        """Begin another one; what is there ends."""
        with self._lock:
            former, self._handoff = self._handoff, handoff
        if former is not None:
            former.fail(TransferAbortedError(f"{handoff.version} is loaded in place instead"))

    def of(self, transfer_id: str) -> HandoffQueue | None:
        """What a transfer brings; None if that is not, or no longer, loaded in place."""
        handoff = self._handoff
        return handoff if handoff is not None and handoff.transfer_id == transfer_id else None

    def forget(self, transfer_id: str) -> HandoffQueue | None:
        """What ``of`` tells, which is committed: it is no longer held here."""
        with self._lock:
            handoff = self.of(transfer_id)
            if handoff is not None:
                self._handoff = None
            return handoff

    def discard(self, transfer_id: str) -> None:
        """Forget it, and end it."""
        if (handoff := self.forget(transfer_id)) is not None:
            handoff.fail(TransferAbortedError(f"{transfer_id} was discarded"))


def _copy(error: WeftError) -> WeftError:
    """Without its traceback, whose frames would keep buckets alive; to be raised on several
    threads."""
    return error_from_reason(error.reason, error.message, error.metadata)


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
