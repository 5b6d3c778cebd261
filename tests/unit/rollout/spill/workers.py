"""A store with a spiller, as on the receiving rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_side.engine import SpillOrder
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import StagedVersion
from rollout_side.spill.folder import SpillFolder, SpillSettings
from rollout_side.spill.spiller import Spiller
from tests.unit.rollout.spill.held_versions import BASE, CONFIG, FINGERPRINT, held
from tests.waits import until
from weft_rl.contract.names import PolicyVersion


def parsed(*versions: str) -> tuple[PolicyVersion, ...]:
    return tuple(map(PolicyVersion.parse, versions))


def listed(spiller: Spiller) -> tuple[PolicyVersion, ...]:
    """Versions whose copies it knows of, in order."""
    return tuple(dict.fromkeys(copy.version for copy in spiller.copies))


class Worker:
    """A store with a spiller, as on the receiving rank."""

    def __init__(
        self, directory: Path, owner: str, retain: int = 2, capacity_bytes: int = 2**26
    ) -> None:
        self.store = WorkerStore(2**26, 2**26, retain)
        spill = SpillSettings(directory=str(directory), owner=owner, capacity_bytes=capacity_bytes)
        self.folder = SpillFolder(spill, FINGERPRINT)
        self.folder.open()
        self.spiller = Spiller(self.store, self.folder, retain)

    def hold(self, version: str | StagedVersion) -> StagedVersion:
        copy = held(version, BASE) if isinstance(version, str) else version
        self.store.reserve(copy.transfer_id, copy.manifest.wire_bytes, adapter=False)
        self.store.put_staged(copy)
        if copy.version.policy == "base":
            self.store.keep_base(copy.transfer_id)
        else:
            self.store.keep_adapter(copy.transfer_id, CONFIG)
        return copy

    def follow(self, *keep: str, **fields: Any) -> None:
        self.spiller.follow(SpillOrder(keep=parsed(*keep), **fields))

    def look(self) -> None:
        """List the copies that are in the directory now."""
        self.spiller._list()

    def lists(self, *versions: str) -> None:
        until(lambda: set(listed(self.spiller)) == set(parsed(*versions)))

    def restore(self, copy: StagedVersion, transfer_id: str = "t-back") -> None:
        self.spiller.restore(
            transfer_id, copy.version, copy.content_digest, copy.manifest.layout_digest
        )
        until(lambda: self.spiller.restored(transfer_id))

    @property
    def names(self) -> set[str]:
        return {path.name.rpartition(".")[0] or path.name for path in self.folder.path.iterdir()}
