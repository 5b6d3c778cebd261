"""Calls to the workers of a vLLM engine, each with a deadline and checked results.

``call`` calls a method of ``worker.extension.WeftWorker`` on all ranks. Each method that changes
weights has a wrapper here, which decides whether a failure leaves the engine dirty.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollout_side.vllm_engine.worker.rank_results import FROM_FILES, RECEIVER_RANK, check_results
from rollout_side.waits import UnansweredCalls
from weft_rl.contract.errors import (
    LoadFailedError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.names import PolicyVersion

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Bounds of the engine's own work; see ``WorkerCalls.bounded`` for late work."""

    load_seconds: float = 600.0
    """Seconds for loading an adapter or a base in the workers, and for each step of a switch."""
    restore_seconds: float = 3600.0
    """Seconds for reading a version from the spill directory."""
    call_seconds: float = 120.0
    """Seconds for any other call to the workers, which waits for the engine's step."""
    quiet_seconds: float = 60.0
    """Seconds without progress while an engine moves all its weights in one call of vLLM's: to
    sleep, to wake or to learn a copy plan. Loads report progress."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOutcome:
    """State of the weights after the end of an in-place load."""

    changed: bool
    """True if the weights are not what they were."""
    kept: bool
    """True if they are whole, and can still be committed."""


class WorkerCalls:
    """Caller of worker methods on all ranks of one engine; used on its event loop.

    Every method raises the WeftError of the first rank that failed. It raises TransferTimeoutError
    if the engine is too slow, or LoadFailedError (dirty) if the call changes weights. An engine
    that is gone is a LoadFailedError (dirty), too.
    """

    def __init__(
        self,
        engine: Any,
        deadlines: Deadlines,
        *,
        num_ranks: int,
        progress_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._engine = engine
        self._deadlines = deadlines
        self._num_ranks = num_ranks
        #: Calls that are not answered yet, even if their callers have gone.
        self.owed = UnansweredCalls(progress_at)

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_seconds: float | None = None,
        changes_weights: bool = False,
        mixed_is_dirty: bool = False,
        is_quiet: bool = False,
    ) -> list[dict[str, Any]]:
        """Call a worker method on all ranks; return the values of all. ``changes_weights`` and
        ``is_quiet`` are explained at ``bounded``, ``mixed_is_dirty`` at ``check_results``."""
        # Never pass vLLM's own timeout: when it expires, replies stay queued.
        answers = await self.bounded(
            self._engine.collective_rpc(method, args=args),
            method,
            timeout_seconds=timeout_seconds,
            changes_weights=changes_weights,
            is_quiet=is_quiet,
        )
        return check_results(answers, mixed_is_dirty=mixed_is_dirty)

    async def bounded(
        self,
        work: Awaitable[T],
        what: str,
        *,
        timeout_seconds: float | None = None,
        changes_weights: bool = True,
        is_quiet: bool = False,
    ) -> T:
        """Await the engine's work until a deadline. It is never cancelled: the engine would finish
        it anyhow.

        Args:
            work: Awaitable of the work.
            what: Description of the work, for error messages.
            timeout_seconds: By default ``Deadlines.call_seconds``.
            changes_weights: Whether the weights are unknown until the work has ended. Workers that
                were only stopped or swapped out finish it later, and nothing needs repair.
            is_quiet: Whether the work may take ``Deadlines.quiet_seconds`` without progress.

        Raises:
            TransferTimeoutError: The deadline passed (the work continues unattended).
            LoadFailedError: Metadata ``dirty`` is "true": the deadline passed at work that changes
                weights, or the engine is gone.
        """
        timeout_seconds = timeout_seconds or self._deadlines.call_seconds
        task = asyncio.ensure_future(work)
        self.owed.begin(task, what, self._deadlines.quiet_seconds if is_quiet else 0.0)
        task.add_done_callback(self._finished)
        done, _ = await asyncio.wait({task}, timeout=timeout_seconds)
        if not done:
            late = f"the engine did not finish {what} within {timeout_seconds:g} s"
            if not changes_weights:
                raise TransferTimeoutError(late)
            raise LoadFailedError(late, metadata={"dirty": "true"})
        try:
            return task.result()
        except LoadFailedError:
            raise
        except Exception as error:
            raise LoadFailedError(
                f"the engine failed at {what}: {type(error).__name__}: {error}",
                metadata={"dirty": "true"},
            ) from error

    def _finished(self, task: asyncio.Future[Any]) -> None:
        self.owed.end(task)
        if not task.cancelled():
            task.exception()  # retrieved: an overrun was reported already

    # -- calls that change weights, or share them ---------------------------------

    async def end_load(self, transfer_id: str, *, keep_loaded: bool = False) -> LoadOutcome:
        """End an in-place load, unless it is complete and to be kept."""
        values = await self.call("weft_discard", transfer_id, keep_loaded, changes_weights=True)
        kept = [value["kept"] for value in values]
        if any(kept) and not all(kept):  # one rank had finished before the others
            values += await self.call("weft_discard", transfer_id, False, changes_weights=True)
        return LoadOutcome(changed=any(value["changed"] for value in values), kept=all(kept))

    async def share(self, transfer_id: str, content_digest: bytes) -> None:
        """Let every rank map the version that the receiving rank staged. With one rank there is
        nothing to share: the load itself checks the staging."""
        if self._num_ranks == 1 or transfer_id == FROM_FILES:
            return
        values = await self.call("weft_handle", transfer_id)
        handle = next((value["handle"] for value in values if value["handle"]), b"")
        if handle:  # else each rank has its own part
            await self.call("weft_adopt", handle, content_digest)

    async def load_adapter(
        self, transfer_id: str, config_json: str, content_digest: bytes, number: int
    ) -> None:
        """Load a staged adapter as vLLM's LoRA ``number``."""
        await self.call(
            "weft_load_adapter",
            transfer_id,
            config_json,
            content_digest,
            number,
            timeout_seconds=self._deadlines.load_seconds,
            changes_weights=True,
        )

    async def drop_adapter(self, version: PolicyVersion, number: int) -> None:
        """Drop an adapter version and its memory."""
        await self.call("weft_drop_adapter", version.policy, version.version, number)

    async def apply_base(self, transfer_id: str, content_digest: bytes) -> bool:
        """Load a staged base, and return whether it brought the model that drafts tokens, too; the
        engine is dirty if only some of the ranks did, unless all are back at what they served."""
        try:
            values = await self.call(
                "weft_apply_base",
                transfer_id,
                content_digest,
                timeout_seconds=self._deadlines.load_seconds,
                changes_weights=True,
                mixed_is_dirty=True,
            )
        except WeftError as error:
            if self._num_ranks == 1 or not await self._take_back(transfer_id):
                raise
            metadata = {name: v for name, v in error.metadata.items() if name != "dirty"}
            raise error_from_reason(error.reason, error.message, metadata) from error
        return all(value["has_draft"] for value in values)

    async def _take_back(self, transfer_id: str) -> bool:
        """Have the ranks that switched go back in place, after another has failed; return whether
        all serve what they did before."""
        try:
            values = await self.call("weft_take_back", transfer_id, changes_weights=True)
        except WeftError:
            return False
        served = {(value["transfer_id"], value["content_digest"]) for value in values}
        return len(served) == 1 and ("", b"") not in served

    async def load_in_place(self, transfer_id: str, version: PolicyVersion) -> None:
        """Begin to load a base as it arrives; returns at once.

        Raises:
            NotReadyError: It was not prepared, or has ended. Nothing changed: no rank is given
                a bucket before the receiving one.
            LoadFailedError: Metadata ``dirty``: only the receiving rank has begun.
        """
        try:
            await self.call("weft_load_in_place", transfer_id, str(version), changes_weights=True)
        except WeftError as error:
            if int(error.metadata.get("rank", RECEIVER_RANK)) == RECEIVER_RANK:
                raise
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error

    async def loaded(self, transfer_id: str, content_digest: bytes) -> tuple[float, bool]:
        """Confirm an in-place load for its commit; return the seconds that it took, and whether it
        brought the model that drafts tokens, too.

        Raises:
            NotReadyError: It was not loaded whole; nothing changed.
            LoadFailedError: Metadata ``dirty``: it was loaded in part, or with other bytes.
        """
        values = await self.call(
            "weft_loaded", transfer_id, content_digest, changes_weights=True, mixed_is_dirty=True
        )
        seconds = max(float(value["load_seconds"]) for value in values)
        return seconds, all(value["has_draft"] for value in values)

    async def keep_base(self, transfer_id: str) -> None:
        """Retain the copy of a base that was loaded, and what leads back in place as far as every
        rank does."""
        values = await self.call("weft_keep_base", transfer_id, changes_weights=True)
        num_undo = [value["num_undo"] for value in values]
        if len(set(num_undo)) > 1:
            await self.call("weft_bound_undo", min(num_undo))
