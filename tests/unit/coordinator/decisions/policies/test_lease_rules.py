"""Leases and the catalog, held against a model of a few lines; with restarts from disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.coordinator.decisions.machine import LOAD_FAILED, Machine
from weft_rl.contract.errors import LeaseFencedError, PolicyOwnedError, WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolSettings, PoolState
from weft_rl.coordinator.decisions.state.values import VersionState
from weft_rl.coordinator.runtime.catalog.database import Catalog

LEASE_SECONDS = 5.0
_POLICIES = st.sampled_from(["base", "math"])
_HOLDERS = st.tuples(st.sampled_from(["t1", "t2"]), st.sampled_from(["s1", "s2"]))


@dataclass
class Known:
    """What one policy should be."""

    token: int = 0
    holder: tuple[str, str] | None = None
    expires_at: float = 0.0
    last_version: int = 0
    served: int = 0
    versions: dict[int, VersionState] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)

    def held_at(self, now: float) -> bool:
        return self.holder is not None and now < self.expires_at


class LeasesAndVersions(RuleBasedStateMachine):
    """One replica; each push ends in the rule that begins it, or is cut off by a restart.

    Writes are as the driver's: durable ones at once, others with the next tick.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "catalog.db"
        self.catalog = Catalog.open(self.path)
        self.settings = PoolSettings(lease_seconds=LEASE_SECONDS, retain_versions=100)
        self.m = Machine()
        self.m.state = replace(self.m.state, settings=self.settings)
        self.m.pool("r0")
        self.seen, self.lazy = 0, list[effects.Save]()
        self.model = {name: Known() for name in ("base", "math")}
        self.generation = 1
        self.write()

    def teardown(self) -> None:
        self.catalog.close()
        self.directory.cleanup()

    def write(self, *, ticked: bool = False) -> None:
        new, self.seen = self.m.all[self.seen :], len(self.m.all)
        self.lazy += [effect for effect in new if isinstance(effect, effects.Save)]
        if ticked or any(save.durable for save in self.lazy):
            self.catalog.apply(self.lazy)
            self.lazy = []

    def outcome(self, ticket: int) -> effects.CallAnswer | WeftError:
        replies = [e.answer for e in self.m.ever(effects.Reply) if e.ticket == ticket]
        return replies[-1] if replies else self.m.error(ticket)

    def ticket(self) -> int:
        return next(self.m.ids)

    # -- leases ----------------------------------------------------------------

    @rule(policy=_POLICIES, holder=_HOLDERS)
    def acquire(self, policy: str, holder: tuple[str, str]) -> None:
        known = self.model[policy]
        ticket = self.m.acquire(policy, *holder)
        self.write()
        answer = self.outcome(ticket)
        if known.held_at(self.m.now) and known.holder != holder:
            assert isinstance(answer, PolicyOwnedError)
            return
        assert isinstance(answer, effects.LeaseAnswer)
        if not known.held_at(self.m.now):
            # A new hold, a new token, also for the same trainer; above that of any policy that
            # was dropped.
            assert answer.lease.fencing_token > known.token
            known.token = answer.lease.fencing_token
        known.holder, known.expires_at = holder, self.m.now + LEASE_SECONDS
        assert (answer.lease.trainer_id, answer.lease.session_id) == holder
        assert answer.lease.fencing_token == known.token
        assert answer.last_version == known.last_version

    @rule(policy=_POLICIES, age=st.integers(-1, 2))
    def renew(self, policy: str, age: int) -> None:
        known, ticket = self.model[policy], self.ticket()
        self.m.do(events.RenewLease(ticket, policy, known.token - age))
        self.write()
        answer = self.outcome(ticket)
        if age or not known.held_at(self.m.now):
            assert isinstance(answer, LeaseFencedError)
        else:
            assert isinstance(answer, effects.LeaseAnswer)
            known.expires_at = self.m.now + LEASE_SECONDS

    @rule(policy=_POLICIES, age=st.integers(-1, 2))
    def release(self, policy: str, age: int) -> None:
        known, ticket = self.model[policy], self.ticket()
        self.m.do(events.ReleasePolicy(ticket, policy, known.token - age))
        self.write()
        assert isinstance(self.outcome(ticket), effects.EmptyAnswer)
        if not age:
            known.holder = None

    @rule(seconds=st.sampled_from([0.5, LEASE_SECONDS - 0.25, LEASE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.m.pass_time(seconds, renews=False)
        self.write(ticked=True)

    @rule(policy=_POLICIES)
    def renew_just_too_late(self, policy: str) -> None:
        """A lease has run out before a tick has noticed."""
        known = self.model[policy]
        if known.held_at(self.m.now):
            self.m.pass_time(known.expires_at - self.m.now - 0.25, renews=False)
            self.m.now += 0.5
            self.renew(policy, 0)
            self.m.do(events.Tick())
            self.write(ticked=True)

    # -- versions ----------------------------------------------------------------

    @rule(
        policy=_POLICIES,
        holder=st.none() | _HOLDERS,
        age=st.sampled_from([0, 0, 0, 1, -1]),
        end=st.sampled_from(["committed", "aborted", "withdrawn", "restarted", "restarted late"]),
    )
    def push(self, policy: str, holder: tuple[str, str] | None, age: int, end: str) -> None:
        """By whoever has the lease; ``holder`` tries to take it first."""
        known = self.model[policy]
        if holder:
            self.acquire(policy, holder)
        ticket = self.m.begin(policy, fencing_token=known.token - age)
        self.write()
        answer = self.outcome(ticket)
        if age or not known.held_at(self.m.now):
            assert isinstance(answer, LeaseFencedError)
            return
        assert isinstance(answer, effects.BeginAnswer)
        known.last_version += 1
        assert answer.version == PolicyVersion(policy, known.last_version)
        known.requests[f"q{ticket}"] = known.last_version
        known.versions[known.last_version] = VersionState.STAGING
        if end == "aborted":
            self.m.do(events.AbortTransfer(0, answer.transfer_id, policy, known.token, ""))
            known.versions[known.last_version] = VersionState.ABORTED
        elif end == "restarted":
            self.restart()
        else:
            self.m.attend_all(ticket)
            self.m.prepare_all(ticket)
            self.m.stage_all(ticket)
            self.write()
            if end == "restarted late":
                self._commit(policy, known)
                self.restart()
                return
            self.m.answer_commits(ticket, **({"r0": LOAD_FAILED} if end == "withdrawn" else {}))
            if end == "withdrawn":
                known.versions[known.last_version] = VersionState.FAILED
            else:
                self._commit(policy, known)
        self.write()

    @rule(policy=_POLICIES, holder=_HOLDERS, end=st.sampled_from(["committed", "restarted late"]))
    def push_well(self, policy: str, holder: tuple[str, str], end: str) -> None:
        """What has many consequences should happen often."""
        self.push(policy, holder, 0, end)

    def _commit(self, policy: str, known: Known) -> None:
        known.versions[known.last_version] = VersionState.COMMITTED
        if policy == BASE_POLICY and known.served:
            known.versions[known.served] = VersionState.RETIRED
        known.served = known.last_version

    @precondition(lambda self: any(known.requests for known in self.model.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A request id that was used never burns a version again, whoever remembers it."""
        policy = data.draw(st.sampled_from([p for p, k in self.model.items() if k.requests]))
        known = self.model[policy]
        if not known.held_at(self.m.now):
            return
        request_id = data.draw(st.sampled_from(sorted(known.requests)))
        assert known.holder is not None
        recorded = self.catalog.find_request(known.holder[0], request_id)
        if recorded is None:
            return  # another trainer's: to this one the id is new
        ticket = self.m.begin(
            policy, request_id=request_id, fencing_token=known.token, recorded=recorded
        )
        self.write()
        answer = self.outcome(ticket)
        assert isinstance(answer, effects.BeginAnswer)
        assert answer.version.version == known.requests[request_id]

    # -- restarts ----------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        """The coordinator is killed: what was not written is gone, and so are leases."""
        replica = self.m.state.replicas["r0"]
        self.catalog.close()
        self.catalog = Catalog.open(self.path)
        self.lazy = []
        snapshot = self.catalog.snapshot()
        self.generation += 1
        self.m.state = PoolState(
            settings=self.settings,
            generation=snapshot.generation,
            fingerprint=snapshot.fingerprint,
            architecture=snapshot.architecture,
            epoch_counter=snapshot.epoch,
            token_floor=snapshot.token_floor,
            policies={policy.name: replace(policy, lease=None) for policy in snapshot.policies},
        )
        self.m.register("r0", replica.incarnation, vector=replica.vector, retained=replica.retained)
        self.m.do(events.ReferenceKnown("f" * 64))
        for known in self.model.values():
            known.holder = None
            for number, state in known.versions.items():
                if state is VersionState.STAGING:
                    known.versions[number] = VersionState.ABORTED
        self.write()

    # -- the model and the disk agree ----------------------------------------------

    @invariant()
    def the_disk_says_what_the_model_says(self) -> None:
        snapshot = self.catalog.snapshot()
        assert snapshot.generation == self.generation
        policies = {policy.name: policy for policy in snapshot.policies}
        for name, known in self.model.items():
            if name not in policies:  # never taken, or dropped without a version
                assert not known.last_version
                assert snapshot.token_floor >= known.token
                continue
            policy = policies[name]
            assert (policy.fencing_token, policy.last_version, policy.served_version) == (
                known.token,
                known.last_version,
                known.served,
            )
            late = {s.name for s in self.lazy if isinstance(s, effects.SavePolicyDropped)}
            assert (name in self.m.state.policies) != (name in late)

    @invariant()
    def every_version_is_what_became_of_it(self) -> None:
        # What a restart finds out by itself may be written late.
        late = {save.record.version: save.record.state for save in self._late_records()}
        late |= {
            save.version: VersionState.RETIRED
            for save in self.lazy
            if isinstance(save, effects.SaveRetired)
        }
        for name, known in self.model.items():
            found = {
                record.version.version: late.get(record.version, record.state)
                for record in self.catalog.list_versions(name, 1 << 40, 1 << 20)
            }
            assert found == known.versions
            for version, state in known.versions.items():
                record = self.catalog.find_version(PolicyVersion(name, version))
                assert record is not None
                has_digest = record.content_digest is not None
                assert has_digest or state in (VersionState.STAGING, VersionState.ABORTED)

    def _late_records(self) -> list[effects.SaveVersion]:
        return [save for save in self.lazy if isinstance(save, effects.SaveVersion)]


LeasesAndVersions.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeasesAndVersions = LeasesAndVersions.TestCase
