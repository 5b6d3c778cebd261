"""Transfers of which a worker has received a part, to resume in another side group."""

from __future__ import annotations

from dataclasses import replace

from rollout_side.memory.placement import Memory
from rollout_side.memory.segment import SLICE_BYTES
from rollout_side.memory.versions import PartialTransfer
from weft.contract.names import is_replica_sender
from weft.transport.speaking import Speak


class PartialTransfers:
    """What was verified of interrupted transfers; ``WorkerStore``'s lock guards it.

    A push resumes within moments or is discarded. A clone waits as long as pushes go
    before it: of those there is at most one, and it gives way where a push needs its room.
    """

    def __init__(self) -> None:
        self._partial: dict[str, PartialTransfer] = {}

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """The transfers of which something is kept."""
        return tuple(self._partial)

    def put(self, partial: PartialTransfer) -> list[str]:
        """Keep one; returns the transfers that were dropped for it."""
        dropped = self.drop_clones() if is_replica_sender(partial.trainer_id) else []
        self._partial[partial.transfer_id] = partial
        return [name for name in dropped if name != partial.transfer_id]

    def settle(self, trainer_id: str) -> None:
        """Note that operations of a sender's former group have ended for good."""
        for partial in list(self._partial.values()):
            if partial.trainer_id == trainer_id:
                self._partial[partial.transfer_id] = replace(partial, settled=True)

    def pop(self, transfer_id: str) -> PartialTransfer | None:
        """Take one out; None if it is not here."""
        return self._partial.pop(transfer_id, None)

    def drop_others(self, transfer_id: str, trainer_id: str) -> list[str]:
        """Drop a sender's transfers but one, since it carries out one at a time; returns
        which."""
        return self._drop(
            [
                partial.transfer_id
                for partial in self._partial.values()
                if partial.trainer_id == trainer_id and partial.transfer_id != transfer_id
            ]
        )

    def drop_clones(self) -> list[str]:
        """Drop what came from replicas; returns which transfers."""
        return self._drop(
            [p.transfer_id for p in self._partial.values() if is_replica_sender(p.trainer_id)]
        )

    def _drop(self, names: list[str]) -> list[str]:
        for name in names:
            del self._partial[name]
        return names


def moved(partial: PartialTransfer, memory: Memory, speak: Speak) -> PartialTransfer:
    """A transfer with what was verified of it copied to memory that nothing else can write to;
    blocks for that.

    Raises:
        CapacityError: The accelerator has no room.
    """
    was_host = partial.segment.data.device.type == "cpu"
    num_bytes = partial.segment.num_bytes
    fresh = memory.allocate(num_bytes, adapter=was_host, speak=speak)
    end = sum(b.wire_bytes for b in partial.manifest.buckets[: len(partial.digests)])
    for start in range(0, end, SLICE_BYTES):
        part = slice(start, min(end, start + SLICE_BYTES))
        fresh.data[part].copy_(partial.segment.data[part])
        speak(num_bytes, num_bytes)
    return replace(partial, segment=fresh)
