"""What survives a crash of the coordinator: a model of ``coordinator.runtime.catalog``."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.lease_checks import fail
from weft_rl.containers import replace
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.replica_report import OutOfService
from weft_rl.coordinator.decisions.replicas import sleeps
from weft_rl.coordinator.decisions.state.effects import (
    Save,
    SaveAsStarted,
    SaveCheckpoint,
    SaveCommitted,
    SaveEpoch,
    SaveGeneration,
    SaveLeaseEnded,
    SaveNumberFloor,
    SaveOutOfService,
    SavePin,
    SavePolicy,
    SavePolicyDropped,
    SavePool,
    SavePoolId,
    SaveRetired,
    SaveSleep,
    SaveVersion,
)
from weft_rl.coordinator.decisions.state.pool import (
    Policy,
    PoolSettings,
    PoolState,
    with_whole_lease,
)
from weft_rl.coordinator.decisions.state.replica import StandingSleepOrder
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    Failure,
    VersionRecord,
    VersionState,
    base_content,
)

_RESTARTED = Failure("TRANSFER_ABORTED", "the coordinator restarted")


class CatalogModel:
    """Durable rows; a save that was not applied is gone with its coordinator."""

    def __init__(self) -> None:
        self.generation = self.epoch = 0
        self.pool_id = ""
        self.fingerprint = self.architecture = ""
        self.checkpoint: BoundCheckpoint | None = None
        self.as_started: frozenset[bytes] = frozenset()
        self.policies: dict[str, Policy] = {}
        self.versions: dict[PolicyVersion, VersionRecord] = {}
        self.pins: set[PolicyVersion] = set()
        self.out_of_service: dict[str, OutOfService] = {}
        self.sleeps: dict[str, StandingSleepOrder] = {}
        self.number_floor = self.token_floor = 0
        self._requests: dict[tuple[str, str], PolicyVersion] = {}
        self._transfers: dict[str, PolicyVersion] = {}

    def copy(self) -> CatalogModel:
        """An older copy of it, later."""
        made = CatalogModel()
        for name, value in vars(self).items():
            setattr(made, name, value.copy() if isinstance(value, dict | set) else value)
        return made

    def open(self, settings: PoolSettings, coordinator_id: str, now: float) -> PoolState:
        """What a coordinator starts from; counts a generation."""
        self.generation += 1
        base = self.policies.get(BASE_POLICY)
        for version, record in self.versions.items():
            if record.state is VersionState.STAGING:
                self.versions[version] = replace(
                    record, state=VersionState.ABORTED, failure=_RESTARTED
                )
            elif (
                record.state is VersionState.COMMITTED
                and version.policy == BASE_POLICY
                and base
                and version.version != base.served_version
            ):
                self.versions[version] = replace(record, state=VersionState.RETIRED)
        held: dict[str, list[int]] = {}
        for version, record in sorted(self.versions.items()):
            if record.state is VersionState.COMMITTED:
                held.setdefault(version.policy, []).append(version.version)
        policies = {
            name: replace(
                with_whole_lease(policy, settings, now),
                versions=tuple(held.get(name, ())),
                pinned=tuple(sorted(pin.version for pin in self.pins if pin.policy == name)),
            )
            for name, policy in self.policies.items()
        }
        return PoolState(
            settings=settings,
            generation=self.generation,
            fingerprint=self.fingerprint,
            architecture=self.architecture,
            checkpoint=self.checkpoint,
            as_started=self.as_started,
            base_contents={
                version.version: base_content(record.layout_digest, record.content_digest)
                for version, record in sorted(self.versions.items())
                if version.policy == BASE_POLICY
                and record.content_digest
                and record.state in (VersionState.COMMITTED, VersionState.RETIRED)
            },
            epoch_counter=self.epoch,
            restart_over_at=now + (self.generation > 1) * settings.lost_after_seconds,
            opened_generation=self.generation,
            opened_epoch_counter=self.epoch,
            number_floor=self.number_floor,
            token_floor=self.token_floor,
            coordinator_id=coordinator_id,
            secret=f"secret of {coordinator_id}",
            pool_id=self.pool_id,
            fresh_pool_id=f"pool of {coordinator_id}",
            started_at=now,
            policies={name: p for name, p in policies.items() if not p.is_over},
            forgotten={name: p for name, p in policies.items() if p.is_over},
            out_of_service=dict(self.out_of_service),
            sleeps={
                name: sleeps.restored(order, now, settings.lease_seconds)
                for name, order in self.sleeps.items()
            },
        )

    def apply(self, saves: Sequence[Save]) -> None:
        """Write one transaction."""
        for save in saves:
            match save:
                case SavePool():
                    self.fingerprint, self.architecture = save.fingerprint, save.architecture
                    self.checkpoint, self.as_started = None, frozenset()
                case SavePoolId(pool_id=pool_id):
                    self.pool_id = pool_id
                case SaveCheckpoint(checkpoint=bound):
                    self.checkpoint = bound
                case SaveAsStarted(content=content):
                    self.as_started |= {content}
                case SaveGeneration():
                    self.generation = save.generation
                case SaveNumberFloor():
                    self.number_floor = save.number_floor
                case SaveEpoch():
                    self.epoch = save.epoch
                case SavePolicy(policy=policy):
                    self.policies[policy.name] = policy
                case SavePolicyDropped(name=name, token_floor=floor):
                    self.policies.pop(name, None)
                    self.token_floor = floor
                case SaveLeaseEnded(name=name):
                    if name in self.policies:
                        self.policies[name] = replace(self.policies[name], lease=None)
                case SaveSleep(replica_id=name, order=None):
                    self.sleeps.pop(name, None)
                case SaveSleep(replica_id=name, order=StandingSleepOrder() as sleep):
                    self.sleeps[name] = sleep
                case SaveVersion(record=record):
                    self._check_own(record)
                    self.versions[record.version] = record
                    self._requests[record.trainer_id, record.request_id] = record.version
                    self._transfers[record.transfer_id] = record.version
                case SaveRetired(version=version):
                    self._set_state(version, VersionState.RETIRED)
                case SaveCommitted(version=version):
                    self._set_state(version, VersionState.COMMITTED)
                case SavePin(version=version, pinned=True):
                    self.pins.add(version)
                case SavePin(version=version):
                    self.pins.discard(version)
                case SaveOutOfService(replica_id=name, order=order):
                    self.out_of_service.pop(name, None)
                    if order is not None:
                        self.out_of_service[name] = order

    def _check_own(self, record: VersionRecord) -> None:
        """As in the real one, no save overwrites another version's row."""
        for known in (
            self.versions.get(record.version),
            self.find_request(record.trainer_id, record.request_id),
            self.find_transfer(record.transfer_id),
        ):
            if known and _identity(known) != _identity(record):
                fail(f"{record.version} would overwrite the row of {known.version}")

    def _set_state(self, version: PolicyVersion, state: VersionState) -> None:
        if version in self.versions:
            self.versions[version] = replace(self.versions[version], state=state)

    def find_request(self, trainer_id: str, request_id: str) -> VersionRecord | None:
        """The version that a trainer's request made, if any."""
        version = self._requests.get((trainer_id, request_id))
        return self.versions[version] if version else None

    def find_transfer(self, transfer_id: str) -> VersionRecord | None:
        """The version that a transfer brought, if any."""
        version = self._transfers.get(transfer_id)
        return self.versions[version] if version else None

    def find_version(self, version: PolicyVersion) -> VersionRecord | None:
        """A version's record."""
        return self.versions.get(version)


def _identity(record: VersionRecord) -> tuple[PolicyVersion, str, str, str]:
    return record.version, record.trainer_id, record.request_id, record.transfer_id
