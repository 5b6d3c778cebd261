"""What is wrong with a pool, in the sentences that the page and ``weft status`` show."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.coordinator.decisions.machine import DIRTY, LOAD_FAILED, SPEC, Machine
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.problems import MAX_PROBLEMS, Problem, Severity, problems
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.replica import (
    StandingSleepOrder,
    Suspect,
)
from weft_rl.coordinator.decisions.state.replica_state import version_differences
from weft_rl.coordinator.decisions.state.values import Phase, StateReason


def _pool(*replicas: str) -> Machine:
    m = Machine().pool(*replicas)
    for policy in ("math", "base"):
        m.acquire(policy)
    return m


def _found(m: Machine) -> list[Problem]:
    return [*problems(m.state, m.now).shown]


def _take_out(
    m: Machine, replica_id: str, reason: str = "new disk", *, no_pushes: bool = False
) -> None:
    m.do(events.Cordon(900, replica_id, reason, no_pushes))


def test_a_pool_that_serves_and_one_that_is_new_have_no_problem() -> None:
    assert not _found(Machine())
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    assert not _found(m)


def test_a_lost_replica_is_an_error_and_says_what_to_do() -> None:
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    for _ in range(8):  # r1 is silent
        m.pass_time(1.0, beats=False)
        m.do(events.Heartbeat(0, "r0", "i1", m.state.replicas["r0"].believed_report(m.now)))
    (problem,) = _found(m)
    assert problem == Problem(
        Severity.ERROR,
        "r1 is lost: no heartbeat. Look at its log; it comes back as soon as it registers again",
        replica_id="r1",
    )


def test_one_that_could_not_switch_says_what_it_lacks_and_how_far_it_is_behind() -> None:
    m = _pool("r0", "r1")
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    m.answer_commits(m.run_to(Phase.COMMITTING), r1=LOAD_FAILED)
    (problem,) = _found(m)
    assert (problem.severity, problem.replica_id) == (Severity.ERROR, "r1")
    assert problem.message.startswith("r1 is pending weights: lacks math@3")
    assert "(the engine said no)" in problem.message
    assert problem.message.endswith(". It serves math@2, 1 behind")


def test_one_with_mixed_weights_is_an_error_and_one_by_order_a_warning() -> None:
    m = _pool("r0", "r1", "r2")
    m.answer_commits(m.run_to(Phase.COMMITTING, "base"), r1=DIRTY)
    _take_out(m, "r2", no_pushes=True)
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED)
    error, warning = _found(m)
    assert (error.severity, error.replica_id) == (Severity.ERROR, "r1")
    assert error.message.startswith(
        "r1 is quarantined, for its weights may be mixed: the engine broke"
    )
    assert error.message.endswith(
        ". It answers no request before it has loaded base@1: restart it if that fails"
    ), "what it served before says nothing about mixed weights"
    (mixed,) = [
        d for d in version_differences(m.state, m.state.replicas["r1"]) if d.policy == "base"
    ]
    assert (mixed.version, mixed.num_behind) == (-1, 0), "mixed weights are no version's"
    assert (warning.severity, warning.replica_id) == (Severity.WARNING, "r2")
    assert warning.message.startswith("r2 is out of service: by an operator: new disk")
    assert not warning.message.endswith("behind"), "it serves no version of math"


@pytest.mark.parametrize(
    ("refusal", "is_kept_out", "what"),
    [
        ("", False, "restart it, or push a base"),
        ("no loader", False, "Restart it: it loads no base while it runs"),
        ("", True, "Restart it, or put it back, to be brought a base: weft uncordon r1"),
    ],
)
def test_mixed_weights_say_what_makes_them_whole(
    refusal: str, is_kept_out: bool, what: str
) -> None:
    m = _pool("r0")
    m.register("r1", dirty_reason="a load failed", base_refusal=refusal)
    if is_kept_out:
        _take_out(m, "r1", no_pushes=True)
    (problem,) = _found(m)
    assert problem.severity is Severity.ERROR
    assert problem.message.endswith(what)
    assert "behind" not in problem.message


def test_one_that_lacks_very_many_names_some_and_says_how_many_more() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    for number in range(40):
        m.acquire(f"a{number:02}")
        m.run_to(Phase.COMMITTED, f"a{number:02}")
    m.register("r1")
    (problem,) = _found(m)
    assert problem.message.count("@") == 16
    assert "a15@1; and 24 more" in problem.message


def test_a_replica_that_lags_names_the_versions() -> None:
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED, "base")
    _take_out(m, "r1", no_pushes=True)
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED, "base")
    (warning,) = _found(m)
    assert warning.message.endswith(". It serves base@1, 1 behind; math@1, 2 behind")
    found = version_differences(m.state, m.state.replicas["r1"])
    assert [(d.policy, d.version, d.pool_version, d.num_behind) for d in found] == [
        ("base", 1, 2, 1),
        ("math", 1, 3, 2),
    ]
    assert version_differences(m.state, m.state.replicas["r0"]) == []


@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        (VersionVector(), [("math", 0, 2, 0)]),  # it has none: "behind" would say that it has
        (VersionVector(base=-1, adapters={"math": AdapterVersions((2,), 2)}), [("base", -1, 0, 0)]),
        (VersionVector(adapters={"math": AdapterVersions((3,), 3)}), [("math", 3, 2, 0)]),
    ],
)
def test_what_is_none_or_later_is_not_behind(
    vector: VersionVector, expected: list[tuple[str, int, int, int]]
) -> None:
    m = _pool("r0", "r1")
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    replica = dataclasses.replace(m.state.replicas["r1"], vector=vector)
    found = version_differences(m.state, replica)
    assert [(d.policy, d.version, d.pool_version, d.num_behind) for d in found] == expected


def test_numbers_that_were_never_served_do_not_count_and_retired_ones_may() -> None:
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED, "base")
    for policy in ("math", "base"):
        m.state = dataclasses.replace(
            m.state,
            policies={
                **m.state.policies,
                policy: dataclasses.replace(m.state.policies[policy], last_version=8),
            },
        )
    _take_out(m, "r1", no_pushes=True)
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED, "base")
    (warning,) = _found(m)
    assert warning.message.endswith(". It serves base@1, 1 behind; math@1, 1 behind")
    for _ in range(5):
        m.run_to(Phase.COMMITTED)
    (_, math) = version_differences(m.state, m.state.replicas["r1"])
    assert str(math) == "math@1, at least 6 behind", "of those that were retired nothing is known"


def test_while_it_switches_a_replica_is_behind_and_no_problem() -> None:
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commit(ticket, "r0")
    assert not _found(m)
    (one,) = version_differences(m.state, m.state.replicas["r1"])
    assert (one.version, one.pool_version, one.num_behind) == (1, 2, 1)


def test_who_sleeps_drains_or_is_out_of_service_is_so_by_order() -> None:
    m = _pool("r0", "r1", "r2")
    m.run_to(Phase.COMMITTED)
    _take_out(m, "r0")
    m.do(events.Drain(901, "r1", 30.0, "maintenance"))
    found = _found(m)
    assert [p.message for p in found] == [
        "r0 is out of service: by an operator: new disk",
        "r1 is draining: by an operator: maintenance",
    ]
    assert {p.severity for p in found} == {Severity.WARNING}


def test_orders_for_replicas_that_are_not_in_the_pool_are_warnings() -> None:
    m = _pool("r0", "r1", "r2", "r3")
    for name, why in (("r1", "new disk"), ("r2", "new disk"), ("r3", "")):
        _take_out(m, name, why)
        m.do(events.Leave(0, name, "i1"))
    assert [(p.severity, p.replica_id, p.message) for p in _found(m)] == [
        (
            Severity.WARNING,
            "",
            "r1, r2 are not in the pool, and out of service by an operator: new disk",
        ),
        (Severity.WARNING, "r3", "r3 is not in the pool, and out of service by an operator"),
    ]


def test_many_out_of_service_by_one_order_are_one_warning() -> None:
    m = _pool(*(f"r{i:02}" for i in range(65)))
    m.run_to(Phase.COMMITTED)
    sleep = StandingSleepOrder(trainer_id="t1", fencing_token=1)
    m.state = dataclasses.replace(m.state, sleeps={f"r{i:02}": sleep for i in range(60)})
    m.pass_time(0.5)
    for i in range(60, 64):
        _take_out(m, f"r{i}")
    cordoned, asleep = _found(m)
    assert asleep == Problem(
        Severity.WARNING,
        "60 replicas are asleep: for trainer t1, once its requests have ended. They are r00, r01, "
        "r02 and 57 more",
    )
    assert cordoned.message == (
        "4 replicas are out of service: by an operator: new disk. They are r60, r61, r62 and 1 more"
    )


def test_nobody_answers_where_every_replica_is_out_of_service_by_order() -> None:
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    for name in ("r0", "r1"):
        _take_out(m, name)
    nobody, *others = _found(m)
    assert nobody.severity is Severity.ERROR
    assert nobody.message.startswith("nobody answers requests to the pool: every replica is out")
    assert {p.severity for p in others} == {Severity.WARNING}
    m.do(events.Uncordon(902, "r0"))
    m.state = dataclasses.replace(
        m.state, sleeps={"r0": StandingSleepOrder(trainer_id="t1", fencing_token=1)}
    )
    m.pass_time(0.5)
    assert {p.severity for p in _found(m)} == {Severity.WARNING}, "it will be woken"
    assert _found(m)[0].message == "nobody answers requests to the pool until a replica is awake"


def test_a_suspect_that_is_still_routed_to_is_no_error_and_the_pool_answers() -> None:
    m = _pool("r0")
    m.run_to(Phase.COMMITTED)
    for routed in (True, False):
        replica = dataclasses.replace(
            m.state.replicas["r0"],
            suspect=Suspect("it owes a step", m.now, is_told=True),
            announced=StateReason.STALLED,
            routed=routed,
        )
        m.state = dataclasses.replace(m.state, replicas={"r0": replica})
        *nobody, problem = _found(m)
        assert bool(nobody) is not routed
        assert problem.severity is (Severity.WARNING if routed else Severity.ERROR)
        assert problem.message.startswith("r0 is suspect: it owes a step")


def test_no_replica_that_is_ready_is_said_of_the_pool() -> None:
    m = _pool("r0")
    m.run_to(Phase.COMMITTED)
    m.pass_time(8.0, beats=False)
    pool, replica = _found(m)
    assert pool == Problem(
        Severity.ERROR, "no replica takes requests: nobody answers requests to the pool"
    )
    assert replica.replica_id == "r0"
    m.do(events.Leave(1, "r0", "i1"))
    (gone,) = [p for p in _found(m) if not p.policy]
    assert gone.message.startswith("no replica is in the pool")


def test_after_a_restart_replicas_are_waited_for_first() -> None:
    m = Machine()
    m.state = dataclasses.replace(m.state, fingerprint="f", restart_over_at=m.now + 10.0)
    (waits,) = _found(m)
    assert waits.severity is Severity.WARNING
    assert "has restarted and waits for its replicas" in waits.message
    m.now += 11.0
    assert [p.severity for p in _found(m)] == [Severity.ERROR]


def test_a_lost_policy_says_what_ends_that() -> None:
    m = _pool("r0")
    m.run_to(Phase.COMMITTED)
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2")
    m.pass_time(6.0)
    asked = next(p for p in _found(m) if p.policy == "math")
    assert asked.message == (
        "math@1 is held by no replica in contact: its owner t1 is asked to publish it again"
    )
    m.tokens.clear()
    m.pass_time(20.0, renews=False)
    lost = next(p for p in _found(m) if p.policy == "math")
    assert lost.severity is Severity.ERROR
    assert lost.message == (
        "math@1 is lost: no replica in contact holds it; nobody owns it now, push it again, or "
        "end it: weft forget math"
    )


def test_adapters_over_another_base_are_one_error() -> None:
    m = _pool("r0")
    for name in ("code", "law", "chess"):
        m.acquire(name)
    trained = dataclasses.replace(SPEC, trained_on_base_version=0)
    for name in ("math", "code", "law", "chess"):
        m.run_to(Phase.COMMITTED, name, adapter=trained)
    assert not _found(m)
    m.run_to(Phase.COMMITTED, "base")
    (problem,) = _found(m)
    assert problem.severity is Severity.ERROR
    assert problem.message.startswith("math@1 was trained on base@0, served over base@1; code@1")
    assert "; and 1 more: their answers are not those of what was trained" in problem.message


def test_other_bytes_under_one_number_are_named_with_their_holders() -> None:
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    contents = {b"\x01": ("r0",), b"\x02": ("r1",)}
    m.state = dataclasses.replace(m.state, conflicts={PolicyVersion("math", 2): contents})
    (problem,) = _found(m)
    assert problem.message == (
        "math@2 is not served, for replicas hold other bytes under that number: 01 at r0; 02 at "
        "r1. Push math again"
    )
    many = {bytes([n] * 32): tuple(f"replica-{i}" for i in range(64)) for n in range(5)}
    m.state = dataclasses.replace(m.state, conflicts={PolicyVersion("math", 2): many})
    (problem,) = _found(m)
    assert f"{'00' * 32} at replica-0, replica-1, replica-2 and 61 more; " in problem.message
    assert problem.message.endswith(" and 2 more. Push math again")


def test_a_replica_and_a_policy_of_one_name_are_told_apart() -> None:
    m = Machine().pool("r0", "math")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    _take_out(m, "math")
    contents = {b"\x01": ("r0",), b"\x02": ("math",)}
    m.state = dataclasses.replace(m.state, conflicts={PolicyVersion("math", 2): contents})
    assert [(p.policy, p.replica_id) for p in _found(m)] == [("math", ""), ("", "math")]


def test_a_message_has_a_bound_and_a_long_reason_does_not_hide_what_to_do() -> None:
    m = _pool("r0", "r1")
    m.run_to(Phase.COMMITTED)
    lost = dataclasses.replace(m.state.replicas["r1"], unheard_reason="x" * 9000, announced=None)
    m.state = dataclasses.replace(m.state, replicas={**m.state.replicas, "r1": lost})
    (problem,) = _found(m)
    assert len(problem.message) < 800
    assert problem.message.endswith("as soon as it registers again")
    assert "xx…. Look at its log" in problem.message
    (cut, *_) = problems(m.state, m.now, ["y" * 9000]).shown
    assert (len(cut.message), cut.message[-1]) == (1200, "…")


def test_files_that_are_not_used_are_told() -> None:
    (problem,) = problems(Machine().state, 0.0, ["access.toml: no role"]).shown
    assert problem.severity is Severity.ERROR
    assert "does not use this file" in problem.message
    assert problem.message.endswith("access.toml: no role")


def test_events_that_cannot_be_written_are_told() -> None:
    (problem,) = problems(Machine().state, 0.0, (), "the disk is full").shown
    assert problem.severity is Severity.ERROR
    assert "tried again: the disk is full. Make room on its disk" in problem.message


def test_of_many_the_errors_come_first_and_the_number_of_others_is_told() -> None:
    m = _pool(*(f"r{i:02}" for i in range(MAX_PROBLEMS + 9)))
    m.run_to(Phase.COMMITTED)
    for i in range(MAX_PROBLEMS + 3):
        _take_out(m, f"r{i:02}", f"disk {i}")
    m.do(events.Leave(0, "r58", "i1"))
    m.register("r58", "i2")
    found = problems(m.state, m.now)
    assert (found.shown[0].replica_id, found.shown[0].severity) == ("r58", Severity.ERROR)
    assert len(found.shown) == MAX_PROBLEMS
    assert (found.num_more, found.num_errors) == (4, 1)
