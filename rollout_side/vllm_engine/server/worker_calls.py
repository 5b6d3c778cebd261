"""Calls to the workers of a vLLM engine: each bounded, its answers checked.

The methods of ``worker.WeftWorker``, as the replica's process calls them on all ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from rollout_side.engine import JoinOrder, SendOrder, SpillOrder
from rollout_side.vllm_engine.worker.answers import check_answers
from rollout_side.vllm_engine.worker.holdings_page import HoldingsPage
from weft.contract.errors import LoadFailedError, TransferTimeoutError
from weft.contract.manifest import Manifest
from weft.contract.names import PolicyVersion

T = TypeVar("T")

_RESTORE_LOOK_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Bounds of the engine's own work; see ``WorkerCalls.bounded`` for what is later."""

    load_seconds: float = 600.0
    """Loading an adapter or a base in the workers, and each step of a switch."""
    restore_seconds: float = 3600.0
    """Reading a version from the spill directory."""
    call_seconds: float = 120.0
    """Any other call to the workers: it waits for the engine's step."""


@dataclasses.dataclass(frozen=True)
class HeldCopy:
    """What the receiving rank tells of a copy that it holds."""

    transfer_id: str
    content_digest: bytes
    pickled_manifest: bytes

    def manifest(self) -> Manifest:
        """Not unpickled before it is asked for: a switch does without it."""
        manifest: Manifest = pickle.loads(self.pickled_manifest)
        return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadEnd:
    """What the end of a load in place leaves."""

    changed: bool
    """Whether the weights are not what they were."""
    kept: bool
    """Whether they are whole, and can still be committed."""


class WorkerCalls:
    """Calls worker methods on all ranks of one engine, on its event loop.

    Every method raises the WeftError of the first rank that failed; TransferTimeoutError if
    the engine is too slow; LoadFailedError, dirty, if it is gone, or too slow at what changes
    weights.

    Args:
        engine: vLLM's ``AsyncLLM``.
        deadlines: How long the calls may take.
        num_ranks: Of the engine.
        holdings: What they say that they hold.
    """

    def __init__(
        self, engine: Any, deadlines: Deadlines, *, num_ranks: int, holdings: HoldingsPage
    ) -> None:
        self._engine = engine
        self._deadlines = deadlines
        self._num_ranks = num_ranks
        self._holdings = holdings
        self._unfinished: set[asyncio.Future[Any]] = set()

    async def close(self, timeout_seconds: float) -> None:
        """Let the workers end what they do for Weft."""
        await self._call("weft_close", timeout_seconds=timeout_seconds)

    # -- what is held ------------------------------------------------------------

    async def join(self, order: JoinOrder) -> None:
        """Have the receivers join a side group; returns before they have."""
        await self._call("weft_join", *_ticket_and_rest(order))

    async def send(self, order: SendOrder) -> None:
        """Have the receiving rank send a held copy; returns at once."""
        await self._call("weft_send", *_ticket_and_rest(order))

    async def discard(self, transfer_id: str) -> None:
        """Drop what was staged."""
        await self._call("weft_discard", transfer_id)

    async def end_load(self, transfer_id: str, *, keep_loaded: bool = False) -> LoadEnd:
        """End what is loaded in place, unless it is loaded whole and to be kept."""
        values = await self._call("weft_discard", transfer_id, keep_loaded, changes_weights=True)
        return LoadEnd(
            changed=any(value["changed"] for value in values),
            kept=any(value["kept"] for value in values),
        )

    async def held(self, version: PolicyVersion) -> HeldCopy:
        """What the receiving rank tells of a held copy.

        Raises:
            NotFoundError: None is held.
        """
        values = await self._call("weft_held", version.policy, version.version)
        value = next(value for value in values if value["manifest"])
        return HeldCopy(value["transfer_id"], value["content_digest"], value["manifest"])

    async def pin_bases(self, versions: Sequence[int]) -> None:
        """Keep the copies of these versions of the base."""
        await self._call("weft_pin_bases", list(versions))

    async def spill(self, order: SpillOrder) -> None:
        """Say what the spill directory is to hold; returns at once."""
        await self._call(
            "weft_spill",
            [str(version) for version in order.keep],
            [str(version) for version in order.retired],
            order.served_base,
            order.settled,
        )

    async def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        """Stage a version from the spill directory; returns when it is.

        Raises:
            TransferTimeoutError: It took too long, and was dropped.
        """
        await self._call("weft_restore", transfer_id, str(version), content_digest, layout_digest)
        deadline = time.monotonic() + self._deadlines.restore_seconds
        while not self._holdings.has_ended(transfer_id):
            if time.monotonic() > deadline:
                await self.discard(transfer_id)
                raise TransferTimeoutError(f"{version} was not read from the disk in time")
            await asyncio.sleep(_RESTORE_LOOK_SECONDS)
        await self._call("weft_restored", transfer_id)

    # -- what is loaded ----------------------------------------------------------

    async def share(self, transfer_id: str, content_digest: bytes) -> None:
        """Let every rank map what the receiving rank staged.

        With one rank there is nothing to share: the load itself checks the staging.

        Raises:
            NotReadyError, DigestMismatchError: As ``Engine`` says; nothing changed.
        """
        if self._num_ranks == 1:
            return
        values = await self._call("weft_handle", transfer_id)
        handle = next(value["handle"] for value in values if value["handle"])
        await self._call("weft_adopt", handle, content_digest)

    async def load_adapter(
        self, transfer_id: str, config_json: str, content_digest: bytes, number: int
    ) -> None:
        """Load a staged adapter as vLLM's LoRA ``number``."""
        await self._call(
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
        await self._call("weft_drop_adapter", version.policy, version.version, number)

    async def apply_base(self, transfer_id: str, content_digest: bytes) -> None:
        """Load a staged base; ranks that did beside ranks that did not are dirty."""
        await self._call(
            "weft_apply_base",
            transfer_id,
            content_digest,
            timeout_seconds=self._deadlines.load_seconds,
            changes_weights=True,
            mixed_is_dirty=True,
        )

    async def load_arriving(self, transfer_id: str) -> None:
        """Begin to load a base as it arrives; returns at once.

        Raises:
            NotReadyError: It was not prepared, or has ended.
        """
        await self._call(
            "weft_load_arriving", transfer_id, changes_weights=True, mixed_is_dirty=True
        )

    async def loaded(self, transfer_id: str, content_digest: bytes) -> float:
        """For the commit of a base that was loaded in place; returns how long that took.

        Raises:
            NotReadyError: It was not loaded whole; nothing changed.
            LoadFailedError: Not whole, or other bytes: dirty.
        """
        values = await self._call(
            "weft_loaded", transfer_id, content_digest, changes_weights=True, mixed_is_dirty=True
        )
        return max(float(value["load_seconds"]) for value in values)

    async def keep_base(self, transfer_id: str) -> None:
        """Retain the copy of a base that was loaded."""
        await self._call("weft_keep_base", transfer_id, changes_weights=True)

    # -- how ----------------------------------------------------------------------

    async def _call(
        self,
        method: str,
        *args: Any,
        timeout_seconds: float | None = None,
        changes_weights: bool = False,
        mixed_is_dirty: bool = False,
    ) -> list[dict[str, Any]]:
        """Call a worker method on all ranks; see ``bounded`` for ``changes_weights``.

        Raises:
            WeftError: Of the first rank that failed, or as ``bounded``.
        """
        # Never pass vLLM's own timeout: its expiry would leave replies queued.
        answers = await self.bounded(
            self._engine.collective_rpc(method, args=args),
            method,
            timeout_seconds=timeout_seconds,
            changes_weights=changes_weights,
        )
        return check_answers(answers, mixed_is_dirty=mixed_is_dirty)

    async def bounded(
        self,
        work: Awaitable[T],
        what: str,
        *,
        timeout_seconds: float | None = None,
        changes_weights: bool = True,
    ) -> T:
        """Await without ever cancelling: the engine would go on with it anyhow.

        Args:
            work: What the engine is to do.
            what: In words.
            timeout_seconds: By default ``Deadlines.call_seconds``.
            changes_weights: Whether they are unknown while it has not ended. Workers that
                were only away for a while (stopped, swapped out) do the rest when they
                are back, and nothing needs repair.

        Raises:
            TransferTimeoutError: The deadline passed (the work goes on unattended).
            LoadFailedError: Metadata ``dirty`` "true"; the same where it changes weights,
                or the engine is gone.
        """
        timeout_seconds = timeout_seconds or self._deadlines.call_seconds
        task = asyncio.ensure_future(work)
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        done, _ = await asyncio.wait({task}, timeout=timeout_seconds)
        if not done:
            late = f"the engine did not finish {what} within {timeout_seconds:g} s"
            if not changes_weights:
                raise TransferTimeoutError(late)
            raise LoadFailedError(late, metadata={"dirty": "true"})
        try:
            return task.result()
        except Exception as error:
            raise LoadFailedError(
                f"the engine failed at {what}: {type(error).__name__}: {error}",
                metadata={"dirty": "true"},
            ) from error

    def _finished(self, task: asyncio.Future[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # seen: an unattended one has been reported as an overrun


def _ticket_and_rest(order: JoinOrder | SendOrder) -> tuple[dict[str, Any], dict[str, Any]]:
    """An order as plain values, which is what travels to workers."""
    fields = dataclasses.asdict(order)
    return fields.pop("ticket"), fields
