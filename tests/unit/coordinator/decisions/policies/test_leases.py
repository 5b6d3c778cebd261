"""One owner a policy; a stale token does nothing."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import CAPABILITIES, Machine
from weft_rl.containers import replace
from weft_rl.contract.errors import WeftError
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import TrainerProcess
from weft_rl.coordinator.decisions.state.values import Phase, PolicyKind


def _lease(machine: Machine, ticket: int) -> effects.LeaseAnswer:
    answer = machine.answer(ticket)
    assert isinstance(answer, effects.LeaseAnswer)
    return answer


def test_same_session_gets_its_own_lease_again_renewed() -> None:
    m = Machine()
    first = _lease(m, m.acquire("math"))
    m.now += 5
    again = _lease(m, m.acquire("math"))
    assert again.lease.fencing_token == first.lease.fencing_token
    assert again.lease.expires_at == first.lease.expires_at + 5


@pytest.mark.parametrize(("trainer", "session"), [("t2", "s1"), ("t1", "s2")])
def test_another_trainer_or_session_must_wait(trainer: str, session: str) -> None:
    m = Machine()
    m.acquire("math")
    error = m.error(m.acquire("math", trainer, session))
    assert error.reason == "POLICY_OWNED"
    assert error.metadata["holder"] == "t1"
    assert float(error.metadata["expires_in_seconds"]) == 10.0


def test_token_is_durable_before_it_is_told_and_grows_with_every_holder() -> None:
    m = Machine()
    tokens = []
    for i in range(3):
        ticket = m.acquire("math", f"t{i}")
        tokens.append(_lease(m, ticket).lease.fencing_token)
        (save,) = m.found(effects.SavePolicy)
        assert save.durable
        assert save.policy.fencing_token == tokens[-1]
        m.pass_time(11, renews=False)
    assert tokens == [1, 2, 3]


def test_expired_lease_cannot_be_renewed_even_before_the_tick() -> None:
    m = Machine()
    m.acquire("math")
    m.now += 10.0
    m.do(events.RenewLease(77, "math", 1))
    assert m.error(77).reason == "LEASE_FENCED"


def test_a_refusal_names_the_process_that_holds_it_and_its_signs_of_life() -> None:
    m = Machine()
    m.acquire("math", process=TrainerProcess("gpu-1", "boot:7", 41, 1.7e9))
    first = m.error(m.acquire("math", session="s2"))
    assert "process 41 on gpu-1, started 2023-11-14 22:13:20 UTC" in first.message
    named = {k: first.metadata[k] for k in ("host", "host_key", "pid", "start_time")}
    assert named == {
        "host": "gpu-1", "host_key": "boot:7", "pid": "41", "start_time": "1700000000.000"
    }  # fmt: skip
    m.do(events.RenewLease(0, "math", 1))
    again = m.error(m.acquire("math", session="s2"))
    counts = [int(error.metadata["num_renewals"]) for error in (first, again)]
    assert counts[1] == counts[0] + 1
    assert again.metadata["fencing_token"] == "1"


def test_the_same_trainer_takes_its_lease_over_and_its_former_pushes_end() -> None:
    m = Machine()
    m.pool("r0")
    m.acquire("math")
    begun = m.answer(m.begin())
    assert isinstance(begun, effects.BeginAnswer)
    waiting = next(m.ids)
    m.do(events.AwaitTransfer(waiting, begun.transfer_id))
    process = TrainerProcess("gpu-2", "boot:8", 42, 1.7e9)
    ticket = m.acquire("math", session="s2", process=process, displaced_token=1)
    assert _lease(m, ticket).lease.fencing_token == 2
    ended = m.error(waiting)
    assert ended.reason == "LEASE_FENCED"
    assert "process 42 on gpu-2" in ended.message
    m.do(events.RenewLease(78, "math", 1))
    fenced = m.error(78)
    assert (fenced.reason, fenced.metadata["holder"]) == ("LEASE_FENCED", "t1")
    assert "process 42 on gpu-2" in fenced.message


@pytest.mark.parametrize(("trainer", "token"), [("t2", 1), ("t1", 2), ("t1", 0)])
def test_only_the_same_trainer_displaces_and_only_the_lease_it_saw(
    trainer: str, token: int
) -> None:
    m = Machine()
    m.acquire("math")
    error = m.error(m.acquire("math", trainer, "s2", displaced_token=token))
    assert error.reason == "POLICY_OWNED"
    assert m.state.policies["math"].fencing_token == 1


def test_renewing_keeps_it() -> None:
    m = Machine()
    m.acquire("math")
    m.pass_time(30)
    assert m.error(m.acquire("math", "t2")).reason == "POLICY_OWNED"


def test_release_is_idempotent_and_frees_the_policy() -> None:
    m = Machine()
    m.acquire("math")
    m.do(events.ReleasePolicy(70, "math", 1))
    m.do(events.ReleasePolicy(71, "math", 1))
    m.do(events.ReleasePolicy(72, "never", 9))
    assert all(isinstance(m.answer(t), effects.EmptyAnswer) for t in (70, 71, 72))
    assert _lease(m, m.acquire("math", "t2")).lease.fencing_token == 2
    m.do(events.ReleasePolicy(73, "math", 1))  # the former owner, late
    assert m.state.policies["math"].lease is not None


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.STAGING])
def test_expiry_aborts_what_is_pushed_under_it(phase: Phase) -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.run_to(phase)
    waiter = m.await_end(ticket)
    m.pass_time(11, renews=False)
    assert m.error(waiter).reason == "LEASE_FENCED"
    assert m.transfer(ticket).phase is Phase.ABORTED


def test_expiry_between_ticks_stops_the_commit() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.run_to(Phase.STAGING)
    m.now += 10.0
    m.stage_all(ticket)
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert not m.ever(effects.CallCommit)


def test_expiry_after_the_commit_point_rolls_forward() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.run_to(Phase.COMMITTING)
    m.pass_time(11, renews=False)
    m.answer_commits(ticket)
    assert m.transfer(ticket).phase is Phase.COMMITTED


def test_stale_token_cannot_begin_or_abort() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.pass_time(11, renews=False)
    m.acquire("math", "t2")
    ticket = m.run_to(Phase.STAGING)
    assert m.error(m.begin(fencing_token=1)).reason == "LEASE_FENCED"
    m.do(events.AbortTransfer(80, f"t{ticket}", "math", 1, "zombie"))
    assert m.error(80).reason == "LEASE_FENCED"
    assert m.transfer(ticket).phase is Phase.STAGING


@pytest.mark.parametrize(
    ("trainer", "policy", "kind", "reason"),
    [
        ("t 1", "math", PolicyKind.ADAPTER, "INVALID_NAME"),
        ("t1", "../x", PolicyKind.ADAPTER, "INVALID_NAME"),
        ("t1", "base", PolicyKind.ADAPTER, "INVALID_NAME"),
        ("t1", "math", PolicyKind.BASE, "INVALID_NAME"),
    ],
)
def test_names(trainer: str, policy: str, kind: PolicyKind, reason: str) -> None:
    m = Machine()
    m.do(events.AcquirePolicy(5, trainer, "s", policy, kind))
    error: WeftError = m.error(5)
    assert error.reason == reason
    assert not m.state.policies


def test_no_version_is_assigned_after_the_lease_ran_out_even_before_the_tick() -> None:
    m = Machine().pool()
    m.acquire("math")
    ticket = m.begin()
    m.now += m.state.settings.lease_seconds
    m.register("r0")
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    m.check_fits()
    assert m.error(ticket).reason == "LEASE_FENCED"
    assert not m.ever(effects.SaveVersion)


# -- policies that never had a version -----------------------------------------------------------


@pytest.mark.parametrize("end", ["expires", "is given back"])
def test_a_policy_without_a_version_is_gone_with_its_lease_and_its_tokens_are_not_given_again(
    end: str,
) -> None:
    m = Machine()
    tokens = []
    for session in ("s1", "s2", "s3"):
        lease = _lease(m, m.acquire("exp-7", session=session)).lease
        tokens.append(lease.fencing_token)
        if end == "expires":
            m.pass_time(11, renews=False)
        else:
            m.do(events.ReleasePolicy(99, "exp-7", lease.fencing_token, session))
        assert "exp-7" not in m.state.policies
        save = m.ever(effects.SavePolicyDropped)[-1]
        assert (save.name, save.token_floor) == ("exp-7", lease.fencing_token)
    assert tokens == sorted(set(tokens)), "each above those before it"
    m.do(events.RenewLease(77, "exp-7", tokens[-1]))
    assert m.error(77).reason == "LEASE_FENCED"
    other = _lease(m, m.acquire("exp-8"))
    assert other.lease.fencing_token > tokens[-1]
    assert other.last_version == 0, "its numbers begin at 1 all the same"


def test_a_policy_with_a_number_that_was_used_stays() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.begin("math")
    assert m.state.policies["math"].last_version == 1
    m.pass_time(11, renews=False)  # the push is aborted with the lease
    assert m.state.policies["math"].last_version == 1
    m.acquire("said", last_version=5)  # of a catalog that was lost
    m.pass_time(11, renews=False)
    assert m.state.policies["said"].last_version > 5


def test_what_a_restart_finds_unused_is_dropped() -> None:
    m = Machine()
    for number in range(3):
        m.acquire(f"exp-{number}")
    token = max(policy.fencing_token for policy in m.state.policies.values())
    left = {name: replace(p, lease=None) for name, p in m.state.policies.items()}
    m.state = replace(m.state, policies=left)
    m.pass_time(1, renews=False)
    assert not m.state.policies
    assert _lease(m, m.acquire("exp-0")).lease.fencing_token > token


def test_a_trainer_has_only_so_many_policies() -> None:
    m = Machine()
    m.state = replace(m.state, settings=replace(m.state.settings, max_policies_per_trainer=3))
    for number in range(3):
        m.acquire(f"exp-{number}", f"t{number}", identity="greedy")
    error = m.error(m.acquire("exp-3", "t4", identity="greedy"))
    assert (error.reason, error.metadata["limit"]) == ("TOO_MANY_POLICIES", "3")
    assert "weft forget" in error.message
    _lease(m, m.acquire("exp-2", "t2", identity="greedy"))  # its own again
    _lease(m, m.acquire("exp-3", "t4", identity="another"))
    m.pass_time(11, renews=False)
    _lease(m, m.acquire("exp-4", "t4", identity="greedy"))


def test_where_nobody_is_asked_who_he_is_the_name_of_the_trainer_counts() -> None:
    m = Machine()
    m.state = replace(m.state, settings=replace(m.state.settings, max_policies_per_trainer=1))
    m.acquire("a", "t1")
    assert m.error(m.acquire("b", "t1")).reason == "TOO_MANY_POLICIES"
    _lease(m, m.acquire("b", "t2"))


@pytest.mark.parametrize(("length", "is_taken"), [(0, False), (1, True), (128, True), (129, False)])
def test_a_session_has_a_name_of_bounded_length(length: int, is_taken: bool) -> None:
    m = Machine()
    ticket = m.acquire("math", session="s" * length)
    if is_taken:
        assert _lease(m, ticket).lease.session_id == "s" * length
    else:
        assert m.error(ticket).reason == "INVALID_REQUEST"


def test_renewals_of_a_lease_are_counted() -> None:
    m = Machine()
    counts = [_lease(m, m.acquire("math")).lease.num_renewals for _ in range(3)]
    assert counts == [counts[0], counts[0] + 1, counts[0] + 2]


def test_policies_of_others_do_not_count_against_a_trainer() -> None:
    m = Machine(max_policies_per_trainer=2)
    for number in range(2):
        m.acquire(f"theirs-{number}", "t2")
        assert _lease(m, m.acquire(f"own-{number}", "t1")).policy == f"own-{number}"
    assert m.error(m.acquire("own-2", "t1")).reason == "TOO_MANY_POLICIES"


def test_a_trainer_gives_up_its_own_push_by_its_request_id() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.acquire("code", "t2")
    theirs = m.begin("code", request_id="same", min_replicas=2, answer_by=m.now + 60)
    own = m.begin("math", request_id="same", min_replicas=2, answer_by=m.now + 60)
    m.do(events.AbortTransfer(80, "", "math", m.tokens["math"], "enough", request_id="same"))
    assert f"t{own}" not in m.state.transfers
    assert f"t{theirs}" in m.state.transfers
    m.do(events.AbortTransfer(81, "", "math", m.tokens["math"], "enough", request_id="none"))
    assert m.error(81).reason == "TRANSFER_UNKNOWN"
