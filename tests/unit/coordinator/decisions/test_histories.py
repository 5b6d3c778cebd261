"""Random histories of leases, pushes, deaths and restarts; what always holds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.coordinator.decisions.machine import LOAD_FAILED, Machine
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolSettings, PoolState
from weft_rl.coordinator.decisions.state.values import Phase, VersionState
from weft_rl.coordinator.runtime.catalog.database import Catalog

_POLICIES = st.sampled_from(["math", "code", "base"])
_TRAINERS = st.sampled_from(["t1", "t2"])


class Histories(RuleBasedStateMachine):
    """Steps the machine and keeps a real catalog in step, with crashes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "catalog.db"
        self.catalog = Catalog.open(self.path)
        self.m = Machine(retain_versions=2).pool("r0", "r1")
        self.seen = 0
        self.told_tokens: dict[str, int] = {}
        self.told_versions: dict[str, int] = {}
        self.committed: set[str] = set()
        self.write()

    def teardown(self) -> None:
        self.catalog.close()
        self.directory.cleanup()

    def write(self) -> None:
        """As the driver: saves first, then what callers were told."""
        new, self.seen = self.m.all[self.seen :], len(self.m.all)
        self.catalog.apply([e for e in new if isinstance(e, effects.Save) and e.durable])
        for effect in new:
            if not isinstance(effect, effects.Reply):
                continue
            answer = effect.answer
            if isinstance(answer, effects.LeaseAnswer):
                old = self.told_tokens.get(answer.policy, 0)
                assert answer.lease.fencing_token >= old
                self.told_tokens[answer.policy] = answer.lease.fencing_token
            elif isinstance(answer, effects.BeginAnswer):
                old = self.told_versions.get(answer.version.policy, 0)
                assert answer.version.version > old
                self.told_versions[answer.version.policy] = answer.version.version

    @rule(policy=_POLICIES, trainer=_TRAINERS)
    def acquire(self, policy: str, trainer: str) -> None:
        self.m.acquire(policy, trainer)
        self.write()

    @rule(policy=_POLICIES)
    def release(self, policy: str) -> None:
        self.m.do(events.ReleasePolicy(0, policy, self.m.tokens.get(policy, 0)))
        self.write()

    @rule(policy=_POLICIES)
    def begin(self, policy: str) -> None:
        self.m.begin(policy)
        self.write()

    def _active(self) -> list[int]:
        return [
            int(t.transfer_id[1:])
            for t in self.m.state.transfers.values()
            if t.phase is not Phase.WAITING
        ]

    @precondition(lambda self: self._active())
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self._active()))
        phase = self.m.transfer(ticket).phase
        if phase is Phase.FORMING:
            self.m.attend_all(ticket)
            self.m.prepare_all(ticket)
        elif phase is Phase.STAGING:
            self.m.stage_all(ticket)
        else:
            fails = data.draw(st.sets(st.sampled_from(["r0", "r1"])))
            self.m.answer_commits(ticket, **dict.fromkeys(fails, LOAD_FAILED))
        self.write()

    @precondition(lambda self: self.m.look_ups())
    @rule()
    def look_up(self) -> None:
        """A replica lacks something that another holds, or held when it was asked."""
        self.m.answer_look_ups()
        self.write()

    @rule(replica_id=st.sampled_from(["r1", "r2"]), spills=st.booleans())
    def join_late(self, replica_id: str, spills: bool) -> None:
        """A new process without weights, in place of an old one if there was; what was
        served may lie on its disk."""
        old = self.m.state.replicas.get(replica_id)
        if old:
            self.m.do(events.Leave(0, replica_id, old.incarnation))
        spilled = [
            f"{policy.name}@{version}"
            for policy in self.m.state.policies.values()
            for version in policy.versions
            if spills
        ]
        self.m.register(replica_id, f"i{next(self.m.ids)}", spilled=spilled)
        self.write()

    @precondition(lambda self: self._active())
    @rule(data=st.data(), rank=st.integers(0, 2))
    def break_stream(self, data: st.DataObject, rank: int) -> None:
        ticket = data.draw(st.sampled_from(self._active()))
        group_id = self.m.transfer(ticket).group_id
        self.m.do(events.RankGone(group_id, rank, "broke"))
        self.write()

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0]), renews=st.booleans())
    def wait(self, seconds: float, renews: bool) -> None:
        self.m.pass_time(seconds, renews=renews)
        self.write()

    @rule()
    def crash(self) -> None:
        """The coordinator is killed: what was not saved is gone; replicas come back."""
        served = self._all_served()
        self.catalog.close()
        self.catalog = Catalog.open(self.path)
        known = self.catalog.snapshot()
        replicas = list(self.m.state.replicas.values())
        self.m.answered_lookups = len(self.m.ever(effects.LookUp))
        self.m.state = PoolState(
            settings=PoolSettings(retain_versions=2),
            generation=known.generation,
            fingerprint=known.fingerprint,
            architecture=known.architecture,
            epoch_counter=known.epoch,
            token_floor=known.token_floor,
            policies={p.name: p for p in known.policies},
        )
        for replica in replicas:
            self.m.register(
                replica.replica_id,
                replica.incarnation,
                vector=replica.vector,
                retained=replica.retained,
                spilled=map(str, replica.spilled),
            )
        self.m.do(events.ReferenceKnown("f" * 64))
        assert self._all_served() == served
        self.write()

    def _all_served(self) -> dict[str, int]:
        """Of the policies that serve something; of others nothing need be kept."""
        return {name: self._served(name) for name in self.m.state.policies if self._served(name)}

    def _served(self, name: str) -> int:
        return self.m.state.policies[name].served_version

    @invariant()
    def the_catalog_knows_what_was_told(self) -> None:
        known = {p.name: p for p in self.catalog.snapshot().policies}
        for policy, token in self.told_tokens.items():
            assert known[policy].fencing_token >= token
        for policy, version in self.told_versions.items():
            assert known[policy].last_version >= version

    @invariant()
    def what_is_served_is_committed(self) -> None:
        for policy in self.m.state.policies.values():
            if policy.served_version:
                (record,) = self.catalog.list_versions(policy.name, policy.served_version + 1, 1)
                assert record.version.version == policy.served_version
                assert record.state is VersionState.COMMITTED

    @invariant()
    def only_a_ready_replica_has_no_reason(self) -> None:
        for replica_id in self.m.state.replicas:
            self.m.standing(replica_id)

    @invariant()
    def no_replica_is_held_twice(self) -> None:
        held = [r for t in self.m.state.transfers.values() for r in t.occupied]
        assert len(held) == len(set(held))

    @invariant()
    def groups_are_bounded(self) -> None:
        clones = [t for t in self.m.state.transfers.values() if isinstance(t.purpose, Clone)]
        groups = [g for g in self.m.state.groups.values() if not g.is_probe]  # one a suspect
        assert len(groups) <= 2 + len(clones)

    @invariant()
    def clones_are_of_what_is_committed(self) -> None:
        for transfer in self.m.state.transfers.values():
            if isinstance(transfer.purpose, Clone) and transfer.phase is Phase.FORMING:
                record = self.catalog.find_version(transfer.policy_version)
                assert record is not None
                assert record.content_digest == transfer.content_digest
                assert transfer.source != transfer.replica_id


Histories.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestHistories = Histories.TestCase
