"""Replicas that hold what the catalog does not know: it was lost, or is an older copy.

One file: each case is one pool that comes back, and what is adopted from whom.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.coordinator.decisions.machine import DIGEST, GONE, LAYOUT, SPEC, Machine
from weft_rl.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import HeldVersion, OutOfService
from weft_rl.coordinator.decisions.policies.numbering import LEAP
from weft_rl.coordinator.decisions.policies.republishing import publish_again_version
from weft_rl.coordinator.decisions.recovery.adoption import ADOPTED
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState
from weft_rl.coordinator.decisions.state.replica_state import (
    explain_state,
    undecided_versions,
    with_counted_versions,
)
from weft_rl.coordinator.decisions.state.values import (
    Failure,
    HeldVersionRecord,
    Phase,
    PolicyKind,
    ReplicaState,
    VersionState,
)

A, B, C = b"a" * 8, b"b" * 8, b"c" * 8
SERVING = VersionVector(3, {"math": AdapterVersions((6, 7), 7)})
HELD = {"base@3": A, "base@2": B, "math@6": B, "math@7": C}
BASE_3, MATH_6, MATH_7 = map(PolicyVersion.parse, ("base@3", "math@6", "math@7"))


def serving(machine: Machine, replica_id: str, **changes: Any) -> int:
    """A replica registers that serves what another catalog had."""
    fields: dict[str, Any] = {"vector": SERVING, "retained": (3, 2), "held": HELD}
    return machine.register(replica_id, **fields | changes)


def pool_of(*replica_ids: str, **changes: Any) -> Machine:
    machine = Machine()
    for replica_id in replica_ids:
        serving(machine, replica_id, **changes)
    machine.do(events.ReferenceKnown("f" * 64))
    return machine


def wait_for_adoption(machine: Machine, seconds: float = 6.0) -> list[PolicyVersion]:
    """Time passes, and holders say what they are asked."""
    asked = []
    for _ in range(int(seconds * 4)):
        machine.pass_time(0.25)
        asked += machine.describe_held()
    return asked


def ready(machine: Machine) -> list[str]:
    state = machine.state
    return [
        r.replica_id
        for r in state.replicas.values()
        if explain_state(state, r)[0] is ReplicaState.READY
    ]


def test_a_replica_of_a_lost_catalog_is_taken_and_its_versions_are_served() -> None:
    machine = Machine()
    ticket = serving(machine, "r0", last_generation=4, last_epoch=9)
    assert machine.answer(ticket) == effects.RegisterAnswer(2.0, True, 5, epoch=9 + LEAP)
    assert (machine.state.generation, machine.state.epoch_counter) == (5, 9 + LEAP)
    machine.do(events.ReferenceKnown("f" * 64))
    machine.pass_time(4.5)
    assert not machine.ever(effects.DescribeVersion), "others may come"
    assert not machine.ever(effects.CallRetire), "nothing is dropped before it is clear"
    assert not ready(machine)
    asked = wait_for_adoption(machine)
    assert asked[:2] == [BASE_3, MATH_7], "the highest first"
    assert ready(machine) == ["r0"]
    assert machine.state.vector == SERVING
    record = machine.record(MATH_7)
    assert record is not None
    assert (record.state, record.trainer_id) == (VersionState.COMMITTED, ADOPTED)
    assert (record.layout_digest, record.adapter) == (LAYOUT.digest, SPEC)
    assert record.content_digest is not None
    assert record.content_digest.value == C
    former = machine.record(PolicyVersion("base", 2))
    assert former is not None
    assert former.state is VersionState.RETIRED, "retained: the pool can go back to it"
    machine.pass_time(10)
    assert not machine.ever(effects.CallRetire)
    assert not machine.state.unrecorded_since


def test_a_version_that_newer_ones_push_out_is_recorded_where_these_are_withdrawn() -> None:
    """Its replica was never told of them: a bare name goes on standing for it there."""
    m = Machine(retain_versions=1).pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    held = HeldVersion(MATH_6, A)
    vector = VersionVector(0, {"math": AdapterVersions((6,), 6)})
    replica = dataclasses.replace(m.state.replicas["r0"], vector=vector)
    replica = with_counted_versions(
        m.state, replica, [HeldVersionRecord(held, None)], complete=True
    )

    def found_beside(*versions: int) -> frozenset[HeldVersion]:
        policy = dataclasses.replace(m.state.policies["math"], versions=versions)
        state = dataclasses.replace(m.state, policies={"math": policy})
        return undecided_versions(state, with_counted_versions(state, replica))

    assert found_beside(9) == frozenset()
    assert found_beside() == frozenset({held})


def test_what_was_adopted_is_cloned_rolled_back_and_replaced() -> None:
    machine = pool_of("r0", "r1")
    wait_for_adoption(machine)
    machine.register("r2")
    machine.pass_time(0.5)
    assert [effect.version for effect in machine.look_ups()] == [BASE_3]
    (clone,) = machine.answer_look_ups()
    assert machine.transfer(clone).content_digest is not None
    machine.do(events.Leave(0, "r2", "i1"))
    machine.roll_back("base", 2)
    assert machine.state.vector.base == 2
    for switch in machine.found(effects.CallSwitch):
        vector = SERVING.with_base(2)
        name = switch.replica_id, switch.incarnation
        machine.do(events.CommitAnswered(switch.transfer_id, *name, vector, 0, None, (2, 3)))
    assert ready(machine) == ["r0", "r1"]
    machine.acquire("math")
    pushed = machine.run_to(Phase.COMMITTED)
    assert machine.transfer(pushed).version == 7 + LEAP + 1
    assert machine.state.policies["math"].versions == (6, 7, 1008)


def test_an_older_copy_of_the_catalog_goes_on_above_what_replicas_hold() -> None:
    machine = Machine().pool("r0")
    machine.acquire("math")
    machine.run_to(Phase.COMMITTED)
    token = machine.state.policies["math"].fencing_token
    serving(machine, "r1", last_generation=3)
    wait_for_adoption(machine)
    math = machine.state.policies["math"]
    assert (math.served_version, math.versions) == (7, (1, 6, 7))
    assert math.last_version == 1 + LEAP, "7 is below"
    assert math.fencing_token > token
    assert ready(machine) == ["r1"]
    machine.answer_look_ups()
    assert machine.state.transfers, "what it brought is cloned"


def test_what_another_holds_in_other_bytes_is_in_conflict() -> None:
    machine = pool_of("r0")
    serving(machine, "r1", held=HELD | {"math@7": A})
    machine.acquire("math")
    wait_for_adoption(machine)
    assert machine.state.vector.adapters["math"].alias == 6, "of this all hold the same"
    assert machine.state.conflicts[MATH_7] == {A: ("r1",), C: ("r0",)}
    assert publish_again_version(machine.state, "math") == 7
    assert not ready(machine)
    machine.pass_time(1)
    dropped = {
        order.replica_id: order.mistaken_versions for order in machine.ever(effects.CallRetire)
    }
    assert dropped == {"r0": (HeldVersion(MATH_7, C),), "r1": (HeldVersion(MATH_7, A),)}
    for name in ("r0", "r1"):
        left = VersionVector(3, {"math": AdapterVersions((6,), 0)})
        machine.says[name] = left, (3, 2), frozenset(), {"math@6": B}
        machine.do(events.RetireAnswered(name, "i1", left))
    machine.pass_time(1)
    machine.answer_look_ups()
    for switch in machine.ever(effects.CallSwitch):
        vector = VersionVector(3, {"math": AdapterVersions((6,), 6)})
        machine.says.clear()
        name = switch.replica_id, switch.incarnation
        machine.do(events.CommitAnswered(switch.transfer_id, *name, vector, 0, None))
    assert ready(machine) == ["r0", "r1"]
    machine.register("r2", vector=SERVING, retained=(3,), held=HELD)
    assert machine.state.replicas["r2"].mistaken, "it stays so, whoever comes"
    machine.do(events.Leave(0, "r2", "i1"))
    machine.run_to(Phase.COMMITTED)
    assert publish_again_version(machine.state, "math") == 0


def test_later_holders_of_other_bytes_drop_them() -> None:
    machine = pool_of("r0")
    wait_for_adoption(machine)
    serving(machine, "r1", held=HELD | {"math@7": A, "base@3": B})
    replica = machine.state.replicas["r1"]
    assert replica.vector == VersionVector(-1, {"math": AdapterVersions((6,), 0)})
    assert replica.retained == (2,)
    where, why = explain_state(machine.state, replica)
    assert where is ReplicaState.PENDING_WEIGHTS
    assert "it has other bytes under that number, and drops them" in why
    machine.pass_time(1.5)
    (order,) = machine.ever(effects.CallRetire)
    assert [str(held.version) for held in order.mistaken_versions] == ["math@7"]
    assert order.versions == ()
    machine.answer_look_ups()
    assert [t.policy_version for t in machine.state.transfers.values()] == [BASE_3]


def test_a_heartbeat_brings_what_is_new_and_is_asked_for_all_in_doubt() -> None:
    machine = Machine().pool("r0")

    def beat(vector: VersionVector, held: dict[str, bytes], *, complete: bool) -> bool:
        heard = machine.heard(held)
        machine.beat("r0", ticket=9, version_vector=vector, held=heard, complete=complete)
        (reply,) = machine.found(effects.Reply)
        assert isinstance(reply.answer, effects.HeartbeatAnswer)
        return reply.answer.held_versions_wanted

    math = VersionVector(0, {"math": AdapterVersions((7,), 7)})
    assert beat(math, {"math@7": A}, complete=False), "an order of a former coordinator"
    assert beat(math, {}, complete=False), "what it said stands"
    assert not beat(VersionVector(), {}, complete=True)
    assert machine.state.policies["math"].last_version == 7 + LEAP


def test_a_trainer_is_not_given_what_it_had_before() -> None:
    machine = Machine().pool("r0")
    machine.acquire("math", last_version=7, last_fencing_token=12)
    assert machine.tokens["math"] == 12 + LEAP
    pushed = machine.run_to(Phase.COMMITTED)
    assert machine.transfer(pushed).version == 7 + LEAP + 1
    machine.acquire("math", last_version=1008, last_fencing_token=1012)
    assert machine.tokens["math"] == 12 + LEAP, "its lease goes on"


def test_a_call_that_comes_late_does_not_take_back_a_token() -> None:
    """The catalog is lost between two calls of one session; the first is repeated after it."""
    machine = Machine().pool("r0")
    machine.acquire("math", last_version=0, last_fencing_token=1)
    late = machine.tokens["math"]
    machine.acquire("math", last_version=1002, last_fencing_token=2001)
    assert late < 2001 < machine.tokens["math"]


def test_policies_that_nobody_spoke_of_leap_too() -> None:
    machine = Machine()
    machine.register("r0", last_generation=4)
    machine.do(events.ReferenceKnown("f" * 64))
    assert [s.number_floor for s in machine.ever(effects.SaveNumberFloor)] == [LEAP]
    machine.acquire("code")
    pushed = machine.run_to(Phase.COMMITTED, "code")
    assert machine.transfer(pushed).version == LEAP + 1
    held = {"code@9": A}
    vector = VersionVector(0, {"code": AdapterVersions((9,), 9)})
    machine.register("r1", vector=vector, held=held, last_generation=4)
    wait_for_adoption(machine)
    assert machine.state.policies["code"].served_version == LEAP + 1, "it was pushed later"
    assert machine.state.policies["code"].versions == (9, LEAP + 1)


def test_a_coordinator_that_a_replica_knows_does_not_leap() -> None:
    machine = Machine().pool("r0")
    machine.register("r0", last_generation=1)
    assert machine.state.generation == 1
    assert not machine.ever(effects.SaveGeneration)
    machine.register("r1", last_generation=1, last_coordinator_id="another")
    assert machine.state.generation == 2, "another had the same: its orders are refused"
    assert machine.state.number_floor == LEAP


def test_a_token_that_was_given_again_is_its_new_holders() -> None:
    machine = Machine().pool("r0")
    machine.acquire("math", session="new")
    token = machine.tokens["math"]
    machine.do(events.RenewLease(50, "math", token, "old"))
    assert machine.error(50).reason == "LEASE_FENCED"
    machine.do(events.ReleasePolicy(51, "math", token, "old"))
    assert machine.state.policies["math"].lease is not None
    begun = machine.begin("math", session_id="old")
    assert machine.error(begun).reason == "LEASE_FENCED"
    machine.do(events.RenewLease(52, "math", token, "new"))
    assert machine.answered(52)


def test_what_no_holder_can_describe_is_not_adopted() -> None:
    machine = pool_of("r0", "r1")
    machine.pass_time(5.25)
    (asked,) = {e.replica_id for e in machine.ever(effects.DescribeVersion)}
    machine.describe_held(Failure("PEER_GONE", "no answer"))
    machine.pass_time(1.5)
    others = [e for e in machine.ever(effects.DescribeVersion) if e.replica_id != asked]
    assert {e.version for e in others} == {BASE_3, MATH_7}, "another one is asked"
    dropped = Failure("VERSION_UNKNOWN", "it was dropped")
    for name in ("r0", "r1"):
        machine.describe_held(dropped)
        held = {"base@2": B, "math@6": B}
        vector = VersionVector(3, {"math": AdapterVersions((6, 7), 7)})
        machine.says[name] = vector, (2,), frozenset(), held
        machine.pass_time(1.5)
    wait_for_adoption(machine, 2)
    assert machine.state.policies["base"].served_version == 2, "the highest that is there"
    assert machine.state.policies["math"].versions == (6,)


def test_what_a_spill_directory_holds_is_adopted_and_read() -> None:
    machine = Machine()
    machine.register("r0", spilled=("base@3", "math@7"), held={"base@3+": A, "math@7+": C})
    machine.do(events.ReferenceKnown("f" * 64))
    wait_for_adoption(machine)
    assert machine.state.vector == VersionVector(3, {"math": AdapterVersions((7,), 7)})
    machine.answer_look_ups()
    (order,) = machine.ever(effects.CallRestore)
    assert (order.version, order.content_digest.value) == (BASE_3, A)


def test_versions_beyond_what_is_kept_are_not_recorded() -> None:
    machine = Machine(retain_versions=2)
    versions = tuple(range(1, 8))
    vector = VersionVector(0, {"math": AdapterVersions(versions, 7)})
    held = {f"math@{n}": bytes([n]) * 8 for n in versions}
    machine.register("r0", vector=vector, held=held)
    wait_for_adoption(machine)
    assert machine.state.policies["math"].versions == (6, 7)
    machine.pass_time(1)
    (order,) = machine.ever(effects.CallRetire)[:1]
    assert [v.version for v in order.versions] == [1, 2, 3, 4, 5]


def test_a_push_that_an_older_copy_of_the_catalog_aborted_is_adopted() -> None:
    machine = Machine().pool("r0")
    machine.acquire("math")
    begun = machine.run_to(Phase.STAGING)
    machine.do(events.ReleasePolicy(0, "math", machine.tokens["math"]))
    vector = VersionVector(0, {"math": AdapterVersions((1,), 1)})
    machine.register("r1", vector=vector, held={"math@1": A})
    wait_for_adoption(machine)
    record = machine.record(PolicyVersion("math", 1))
    assert record is not None
    assert (record.state, record.request_id) == (VersionState.COMMITTED, f"q{begun}")
    assert record.failure is None


def test_what_the_catalog_has_committed_stands() -> None:
    machine = Machine().pool("r0")
    machine.acquire("math")
    machine.run_to(Phase.COMMITTED)
    vector = VersionVector(0, {"math": AdapterVersions((1,), 1)})
    machine.register("r1", vector=vector, held={"math@1": DIGEST.value})
    assert not machine.state.replicas["r1"].mistaken
    machine.register("r2", vector=vector, held={"math@1": A})
    assert machine.state.replicas["r2"].vector == VersionVector()
    assert ready(machine) == ["r0", "r1"]


# -- what an operator had ordered since ------------------------------------------------


def _rolled_back(alias: int = 7, **changes: Any) -> VersionVector:
    """What every replica says once math went back."""
    return VersionVector(3, {"math": AdapterVersions((7, 8, 9), alias)})


_ALL_HELD = {"base@3": A, "math@7": A, "math@8": B, "math@9": C}


def test_a_rollback_that_the_lost_catalog_knew_stands() -> None:
    machine = pool_of("r0", "r1", vector=_rolled_back(), held=_ALL_HELD, retained=(3,))
    wait_for_adoption(machine)
    assert machine.state.vector == _rolled_back()
    assert machine.state.policies["math"].last_version >= 9
    assert ready(machine) == ["r0", "r1"]
    assert not machine.ever(effects.CallSwitch)
    machine.acquire("math")
    push = machine.run_to(Phase.COMMITTED)
    assert machine.transfer(push).version > 9
    assert machine.state.vector.adapters["math"].alias == machine.transfer(push).version


def test_of_names_that_stand_for_several_the_highest_counts() -> None:
    """A commit was on its way: who was told of it must find it."""
    machine = pool_of("r0", vector=_rolled_back(), held=_ALL_HELD, retained=(3,))
    serving(machine, "r1", vector=_rolled_back(9), held=_ALL_HELD, retained=(3,))
    wait_for_adoption(machine)
    assert machine.state.vector.adapters["math"].alias == 9


def test_a_base_that_the_pool_went_back_from_stays_left() -> None:
    for version in (2, 0):
        vector, held = VersionVector(version), {"base@3": A, "base@2": B}
        machine = pool_of("r0", "r1", vector=vector, held=held, retained=(3, 2))
        wait_for_adoption(machine)
        assert machine.state.vector.base == version
        assert ready(machine) == ["r0", "r1"]
        assert not machine.ever(effects.CallSwitch)


def test_one_that_was_just_started_does_not_say_that_the_pool_went_back() -> None:
    machine = pool_of("r0", vector=VersionVector(), held={"base@3+": A}, spilled=["base@3"],
                      retained=())  # fmt: skip
    wait_for_adoption(machine)
    assert machine.state.vector.base == 3


def _older_copy(served: int = 9) -> Machine:
    """A pool whose catalog was replaced by a copy from before an operator's orders."""
    m = Machine()
    m.state = dataclasses.replace(m.state, coordinator_id="first")
    m.pool("r0", "r1")
    m.acquire("math")
    for _ in range(3):
        m.run_to(Phase.COMMITTED)
    m.tokens.clear()
    known = m.state
    policy = dataclasses.replace(known.policies["math"], lease=None, served_version=3)
    m.state = PoolState(
        settings=known.settings,
        generation=known.generation + 1,
        opened_generation=known.generation + 1,
        epoch_counter=known.epoch_counter,
        opened_epoch_counter=known.epoch_counter,
        fingerprint=known.fingerprint,
        coordinator_id="second",
        policies={"math": policy},
        references_known=frozenset({""}),
    )
    return m


def _comes_back(m: Machine, replica_id: str, alias: int, epoch: int, **changes: Any) -> int:
    vector = VersionVector(0, {"math": AdapterVersions((1, 2, 3), alias)})
    held = dict.fromkeys(("math@1", "math@2", "math@3"), DIGEST.value)
    return m.register(replica_id, vector=vector, held=held, last_generation=1, last_epoch=epoch,
                      last_coordinator_id="first", **changes)  # fmt: skip


def test_a_rollback_that_an_older_copy_does_not_know_stands() -> None:
    m = _older_copy()
    for replica_id in ("r0", "r1"):
        _comes_back(m, replica_id, 1, m.state.opened_epoch_counter + 1)
    m.pass_time(4.5)
    assert ready(m) == ["r0", "r1"], "they go on with what they have"
    assert not m.ever(effects.LookUp)
    m.pass_time(1.5)
    assert m.state.vector.adapters["math"].alias == 1
    assert ready(m) == ["r0", "r1"]
    assert m.ever(effects.SavePolicy)[-1].policy.served_version == 1
    assert [e.subject for e in m.ever(effects.Announce) if e.kind == "rolled_back"] == ["math@1"]


def test_a_base_that_an_older_copy_never_knew_is_not_gone_back_to() -> None:
    """A replica that must be repaired has nothing of what it serves: nothing can be recorded."""
    m = _older_copy()
    base = Policy(BASE_POLICY, PolicyKind.BASE, last_version=2, served_version=2, versions=(2,))
    policies = {**m.state.policies, BASE_POLICY: base}
    m.state = dataclasses.replace(m.state, policies=policies, base_contents={1: A, 2: B})
    m.register("r0", vector=VersionVector(5), dirty_reason="its weights were discarded",
               last_generation=1, last_epoch=m.state.opened_epoch_counter + 1,
               last_coordinator_id="first")  # fmt: skip
    assert BASE_POLICY in m.state.uncertain_aliases
    m.pass_time(6.0)
    assert BASE_POLICY not in m.state.uncertain_aliases
    assert m.state.vector.base == 2


def test_where_a_name_stands_for_what_the_copy_says_that_is_served_and_said() -> None:
    m = _older_copy()
    _comes_back(m, "r0", 3, m.state.opened_epoch_counter + 1)
    _comes_back(m, "r1", 1, m.state.opened_epoch_counter + 1)
    m.pass_time(6.0)
    assert m.state.vector.adapters["math"].alias == 3
    said = [e for e in m.ever(effects.Announce) if e.kind == "catalog_behind"]
    assert "if it was rolled back since, do so again" in said[-1].message


def test_a_restart_with_its_own_catalog_questions_nothing() -> None:
    m = _older_copy()
    _comes_back(m, "r0", 1, m.state.opened_epoch_counter)
    m.pass_time(0.5)
    assert not m.state.uncertain_aliases
    assert m.look_ups(), "it is brought to what was committed"
    assert not [e for e in m.ever(effects.Announce) if e.kind == "catalog_behind"]


def test_a_push_that_comes_first_is_what_counts() -> None:
    m = _older_copy()
    for replica_id in ("r0", "r1"):
        _comes_back(m, replica_id, 1, m.state.opened_epoch_counter + 1)
    m.acquire("math")
    push = m.run_to(Phase.COMMITTED)
    m.pass_time(8.0)
    assert m.state.vector.adapters["math"].alias == m.transfer(push).version


_ORDERS = [
    OutOfService("new disk"),
    OutOfService("nonsense", no_pushes=True),
]


@pytest.mark.parametrize("order", _ORDERS)
def test_an_order_that_the_catalog_does_not_know_is_taken_from_who_obeys_it(
    order: OutOfService,
) -> None:
    m = _older_copy()
    ticket = _comes_back(m, "r0", 3, m.state.opened_epoch_counter + 1, out_of_service=order)
    answer = m.answer(ticket)
    assert answer.out_of_service == order
    assert m.standing("r0")[0] is ReplicaState.OUT_OF_SERVICE
    assert m.ever(effects.SaveOutOfService) == [effects.SaveOutOfService("r0", order)]
    lost = Machine()
    lost.state = dataclasses.replace(lost.state, coordinator_id="second")
    _comes_back(lost, "r0", 3, 4, out_of_service=order)
    assert lost.state.out_of_service == {"r0": order}


@pytest.mark.parametrize("order", _ORDERS)
def test_one_that_was_put_back_while_it_was_away_stays_so(order: OutOfService) -> None:
    m = _older_copy()
    _comes_back(m, "r0", 3, m.state.opened_epoch_counter, out_of_service=order)
    assert not m.state.out_of_service


def test_an_order_that_was_ended_since_stands_and_is_said() -> None:
    m = _older_copy()
    m.state = dataclasses.replace(m.state, out_of_service={"r0": _ORDERS[0]})
    _comes_back(m, "r0", 3, m.state.opened_epoch_counter + 1)
    assert m.state.out_of_service == {"r0": _ORDERS[0]}
    said = [e for e in m.ever(effects.Announce) if e.kind == "catalog_behind"]
    assert "weft uncordon r0" in said[-1].message


def test_orders_are_told_with_the_epoch_that_tells_older_copies_apart() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    for event in (
        lambda: m.roll_back("math", 1),
        lambda: m.do(events.Cordon(0, "r0", "new disk")),
        lambda: m.do(events.Uncordon(0, "r0")),
        lambda: m.do(events.ForgetPolicy(0, "math", True)),
    ):
        before = m.state.epoch_counter
        rollback = event()
        if isinstance(rollback, int):
            m.answer_commits(rollback)
        assert m.state.epoch_counter > before
        assert m.ever(effects.SaveEpoch)[-1].epoch == m.state.epoch_counter
    answer = m.beat("r0")
    assert answer.epoch == m.state.epoch_counter


def test_what_is_adopted_while_a_commit_is_undecided_is_gone_back_to() -> None:
    machine = Machine().pool("r0")
    machine.acquire("math")
    math = dataclasses.replace(machine.state.policies["math"], last_version=1001)
    policies = {**machine.state.policies, "math": math}
    machine.state = dataclasses.replace(machine.state, policies=policies)
    ticket = machine.run_to(Phase.COMMITTING)
    machine.answer_commit(ticket, "r0", GONE)
    vector = VersionVector(adapters={"math": AdapterVersions((1,), 1)})
    machine.register("r1", vector=vector, held={"math@1": A})
    assert wait_for_adoption(machine) == [PolicyVersion("math", 1)]
    assert machine.state.policies["math"].served_version == 1002
    machine.answer_discard(ticket, "r0")
    assert machine.state.policies["math"].served_version == 1
    assert machine.state.policies["math"].versions == (1,)


def test_what_is_adopted_is_announced_with_its_holders_and_known_by_content() -> None:
    machine = pool_of("r0", "r1")
    lost = dataclasses.replace(machine.state.replicas["r0"], replica_id="r9", lost=True)
    machine.state = dataclasses.replace(
        machine.state, replicas={**machine.state.replicas, "r9": lost}
    )
    wait_for_adoption(machine)
    said = [e.message for e in machine.ever(effects.Announce) if e.subject == "math@7"]
    assert said[0].startswith("held by r0, r1 and not known to the catalog")
    assert sorted(machine.state.base_contents) == [2, 3]


def test_an_order_without_pushes_is_not_loosened_by_what_a_replica_says() -> None:
    loose, strict = _ORDERS
    for known, told in ((strict, loose), (loose, strict)):
        m = _older_copy()
        m.state = dataclasses.replace(m.state, out_of_service={"r0": known})
        _comes_back(m, "r0", 3, m.state.opened_epoch_counter + 1, out_of_service=told)
        assert m.state.out_of_service == {"r0": strict}
