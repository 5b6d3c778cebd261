"""What must be true though a catalog was lost, or replaced by an older copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.sim.lease_checks import fail
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica_state import would_be_kept
from weft_rl.coordinator.decisions.state.transfer import Group
from weft_rl.coordinator.decisions.state.values import ContentDigest, VersionRecord

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica
    from tests.sim.world import World


class LossChecks:
    """Remembers what was ever committed, in whichever catalog."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: How often a catalog was lost.
        self.num_losses = 0
        self._committed: dict[PolicyVersion, set[bytes]] = {}
        self._lost_transfers: set[str] = set()
        self._generation = 0

    def catalog_lost(self, transfer_ids: set[str]) -> None:
        """These transfers are in no catalog any more."""
        self.num_losses += 1
        self._lost_transfers |= transfer_ids

    def of_another_pool(self, name: str) -> None:
        """A coordinator that decided without it takes it for one of another pool."""
        if not self.num_losses:
            fail(f"{name} is of another pool, and there is one")

    def is_lost(self, transfer_id: str) -> bool:
        """Whether a transfer was of a catalog that was lost."""
        return transfer_id in self._lost_transfers

    def committed(self, version: PolicyVersion, digest: ContentDigest) -> None:
        """A push reached its commit point."""
        self._committed.setdefault(version, set()).add(digest.value)

    def was_committed(self, version: PolicyVersion, digest: ContentDigest) -> bool:
        """Whether these bytes were ever committed under this number."""
        return digest.value in self._committed.get(version, ())

    def adopting(self, record: VersionRecord) -> None:
        """A version is about to be recorded because replicas hold it."""
        digest = record.content_digest
        if digest is None or not self.was_committed(record.version, digest):
            fail(f"{record.version} is adopted and such bytes were never committed")

    def assigned(self, state: PoolState, version: PolicyVersion) -> None:
        """A push gets a number: nobody who registered has other bytes under it."""
        for name in state.replicas:
            replica = self._world.replicas[name]
            known = state.replicas[name]
            is_there = replica.alive and known.incarnation == replica.incarnation
            if is_there and any(held.version == version for held in replica.held()):
                fail(f"{version} was assigned and {name} holds it")

    def group_opened(self, state: PoolState, group: Group) -> None:
        """Its members take orders for it."""
        for member in group.members:
            replica = self._world.replicas[member.replica_id]
            if replica.incarnation == member.incarnation and group.epoch <= replica.last_epoch:
                fail(f"epoch {group.epoch} after {replica.last_epoch} at {replica.name}")

    def serving(self, replica: SimReplica, version: PolicyVersion, digest: ContentDigest) -> None:
        """A replica is about to serve a version: never two contents of one adapter's."""
        before = replica.served.get(version)
        if version.policy != BASE_POLICY and before is not None and before != digest:
            fail(f"{replica.name} serves {version} with other bytes than before")

    def registered(self, replica: SimReplica, generation: int) -> None:
        """A replica was told whose orders it takes."""
        if generation < replica.generation:
            fail(f"{replica.name} was told generation {generation} after {replica.generation}")


def _is_stuck_with(state: PoolState, replica_id: str, version: PolicyVersion) -> bool:
    """Whether a replica cannot drop a version: its alias stands there, its engine is broken,
    and the pool has no base to repair it by. It was not to be kept when that was decided,
    and more that are kept later do not bring it back."""
    replica = state.replicas.get(replica_id)
    entry = replica.vector.adapters.get(version.policy) if replica else None
    is_alias = entry is not None and entry.alias == version.version
    return is_alias and bool(replica and replica.dirty_reason) and not state.vector.base


def unrecorded(world: World) -> Iterator[str]:
    """What replicas hold in the end that is neither recorded nor found to be in conflict."""
    state = world.coordinator.state
    for name, since in state.unrecorded_since.items():
        yield f"versions of {name} are not recorded since {world.clock.now - since:.1f} s"
    for name, replica in world.replicas.items():
        for held in replica.held():
            record = world.catalog.find_version(held.version)
            known = record is not None and record.content_digest is not None
            is_wanted = would_be_kept(state, held.version) and held.version not in state.conflicts
            if not known and is_wanted and not _is_stuck_with(state, name, held.version):
                yield f"{name} holds {held.version}, which the catalog does not know"
    for replica_id, known in state.replicas.items():
        adapters = [h.version for h in known.mistaken if h.version.policy != BASE_POLICY]
        if adapters and not known.lost:
            yield f"{replica_id} has not dropped {adapters}"
