"""Versions that an engine's workers receive, hold, send and spill, beside what is served."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from rollout_side.engine import JoinOrder, MemoryUse, SendOrder, SpillOrder, VersionFacts
from rollout_side.memory.ranks.messages import unpack_manifest
from rollout_side.spill.folder import SpillFolder
from rollout_side.vllm_engine.server.initial_checkpoint import InitialCheckpoint
from rollout_side.vllm_engine.server.worker_calls import WorkerCalls
from rollout_side.vllm_engine.worker.holdings import HoldingsPage
from rollout_side.waits import answer_within
from weft_rl.checkpoints.reader import digest_in_layout
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.errors import (
    InvalidManifestError,
    NotFoundError,
    NotReadyError,
    TransferTimeoutError,
)
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.names import STARTED_WITH, PolicyVersion

_RESTORE_LOOK_SECONDS = 0.05
# Of what a spilled version is; of the files that the engine was started with, once they are known.
_FACTS_SECONDS, _FILES_SECONDS = 10.0, 600.0
# Between two looks at what was digested: the workers of a small version have it at once.
_DIGEST_LOOK_SECONDS = (0.01, 0.25)


@dataclasses.dataclass(frozen=True)
class HeldCopy:
    """Description of a copy that the receiving rank holds."""

    transfer_id: str
    content_digest: bytes
    packed_manifest: bytes

    def manifest(self) -> Manifest:
        """Decode the manifest, only here: a switch does without it."""
        return unpack_manifest(self.packed_manifest)


class HeldVersions:
    """Methods of ``Engine`` that change nothing of what is served.

    They need no turn among the switches, and call the workers' methods directly.

    Args:
        workers: Calls to the workers, which hold the versions.
        holdings: Page on which the workers report what they hold.
        spill_folder: Folder that versions are spilled to, if they are.
        restore_seconds: Bound of reading a version from there.
        started_with: Checkpoint of base@0.
    """

    def __init__(
        self,
        workers: WorkerCalls,
        holdings: HoldingsPage,
        spill_folder: SpillFolder | None,
        restore_seconds: float,
        started_with: InitialCheckpoint,
    ) -> None:
        self._workers, self._holdings = workers, holdings
        self._started_with = started_with
        self._digesting = asyncio.Lock()
        #: Where versions are spilled to, if they are.
        self.spill_folder = spill_folder
        self._restore_seconds = restore_seconds
        self.spills = spill_folder is not None

    async def memory(self) -> MemoryUse:
        """See ``Engine``."""
        return self._holdings.read()

    async def join_group(self, order: JoinOrder) -> None:
        """See ``Engine``."""
        await self._workers.call("weft_join", *_ticket_and_rest(order))

    async def send(self, order: SendOrder) -> None:
        """See ``Engine``."""
        await self._workers.call("weft_send", *_ticket_and_rest(order))

    async def pin_bases(self, versions: Sequence[int]) -> None:
        """See ``Engine``."""
        await self._workers.call("weft_pin_bases", list(versions))

    async def manifest(self, version: PolicyVersion) -> Manifest:
        """See ``Engine``."""
        return (await self.held(version)).manifest()

    async def held(self, version: PolicyVersion) -> HeldCopy:
        """Return the receiving rank's description of the copy that it holds of a version.

        Raises:
            NotFoundError: No copy is held.
        """
        values = await self._workers.call("weft_held", version.policy, version.version)
        value = next(value for value in values if value["manifest"])
        return HeldCopy(value["transfer_id"], value["content_digest"], value["manifest"])

    async def digest_tensors(
        self, version: PolicyVersion
    ) -> AsyncGenerator[Sequence[StoredTensor], None]:
        """See ``Engine``."""
        if version == STARTED_WITH:
            yield await answer_within(_FILES_SECONDS, "the checkpoint", self._started_with.tensors)
            return
        async with self._digesting:
            await self._workers.call("weft_digest", version.policy, version.version)
            wait_seconds, longest = _DIGEST_LOOK_SECONDS
            while True:
                values = await self._workers.call("weft_digested")
                value = next(value for value in values if value["tensors"] is not None)
                if part := value["tensors"]:
                    yield [
                        StoredTensor(name, dtype, tuple(shape), digest)
                        for name, dtype, shape, digest in part
                    ]
                if value["is_all"]:
                    return
                await asyncio.sleep(wait_seconds)
                wait_seconds = min(2 * wait_seconds, longest)

    async def holds_started_with(self, version: PolicyVersion) -> bool:
        """See ``Engine``."""
        stored = self._started_with.known_tensors
        if not stored:
            return False
        held = await self.held(version)
        return digest_in_layout(held.manifest(), stored) == held.content_digest

    async def spill(self, order: SpillOrder) -> None:
        """See ``Engine``."""
        await self._workers.call(
            "weft_spill",
            [str(version) for version in order.keep],
            [str(version) for version in order.retired],
            order.served_base,
            order.serves_all,
        )

    async def spilled_facts(self, version: PolicyVersion, content_digest: bytes) -> VersionFacts:
        """See ``Engine``."""
        folder = self.spill_folder
        if folder is None:
            raise NotFoundError("this replica has no --spill-dir")
        try:
            return await answer_within(
                _FACTS_SECONDS, str(version), lambda: folder.facts(version, content_digest)
            )
        except (OSError, InvalidManifestError, TransferTimeoutError) as error:
            raise NotFoundError(f"{version} cannot be read: {error}") from error

    async def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        """See ``Engine``.

        Raises:
            TransferTimeoutError: It took too long, and was dropped.
        """
        if not self.spills:
            raise NotReadyError("this replica has no --spill-dir", reason="NOT_RETAINED")
        call = self._workers.call
        await call("weft_restore", transfer_id, str(version), content_digest, layout_digest)
        deadline = time.monotonic() + self._restore_seconds
        with self._workers.owed.elsewhere():
            while not self._holdings.has_ended(transfer_id):
                if time.monotonic() > deadline:
                    await call("weft_discard", transfer_id)
                    raise TransferTimeoutError(f"{version} was not read from the disk in time")
                await asyncio.sleep(_RESTORE_LOOK_SECONDS)
        await call("weft_restored", transfer_id)


def _ticket_and_rest(order: JoinOrder | SendOrder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split an order into its ticket and its other fields, as plain values for workers."""
    fields = dataclasses.asdict(order)
    return fields.pop("ticket"), fields
