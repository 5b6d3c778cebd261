"""Begin: idempotency, waiting, fairness, preflight, groups."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import (
    CAPABILITIES,
    LAYOUT,
    OTHER_LAYOUT,
    SPEC,
    Machine,
    saved_versions,
)
from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import (
    Failure,
    Phase,
    VersionRecord,
    VersionState,
)


def _begun(m: Machine, ticket: int) -> effects.BeginAnswer:
    answer = m.answer(ticket)
    assert isinstance(answer, effects.BeginAnswer)
    return answer


def test_version_is_durable_before_the_trainer_knows_it() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.begin()
    (save,) = m.found(effects.SaveVersion)
    assert save.durable
    assert (save.record.version, save.record.state) == (
        PolicyVersion("math", 1),
        VersionState.STAGING,
    )
    assert _begun(m, ticket).version == PolicyVersion("math", 1)


def test_versions_only_grow_and_an_aborted_one_is_not_used_again() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    first = m.begin()
    m.do(events.AbortTransfer(60, f"t{first}", "math", 1, ""))
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED)
    assert [r.version.version for r in saved_versions(m) if r.state is VersionState.STAGING] == [
        1,
        2,
        3,
    ]
    assert m.state.vector.adapters["math"].versions == (2, 3)


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.STAGING, Phase.COMMITTED])
def test_a_repeated_request_burns_no_version(phase: Phase) -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.run_to(phase, request_id="once")
    again = _begun(m, m.begin(request_id="once"))
    assert (again.transfer_id, again.version.version) == (f"t{ticket}", 1)
    assert (again.group is None) == (phase is Phase.COMMITTED)
    assert m.state.policies["math"].last_version == 1


def test_repeated_while_waiting_both_callers_are_answered() -> None:
    m = Machine()
    m.acquire("math")
    tickets = [m.begin(request_id="once") for _ in range(2)]
    m.pool("r0")
    m.check_fits()
    assert len({_begun(m, t).transfer_id for t in tickets}) == 1


def test_a_request_known_to_the_catalog_alone_is_answered_too() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    record = VersionRecord(
        PolicyVersion("math", 7), VersionState.ABORTED, "t1", "old", "told", LAYOUT.digest, 0.0
    )
    again = _begun(m, m.begin(request_id="old", recorded=record))
    assert (again.transfer_id, again.version.version, again.group) == ("told", 7, None)
    error = m.error(m.begin(request_id="old", recorded=record, layout=OTHER_LAYOUT))
    assert error.reason == "REQUEST_CONFLICT"


def test_a_request_id_of_another_trainer_is_not_answered_with_its_push() -> None:
    m = Machine().pool("r0")
    m.acquire("math", "t2")
    record = VersionRecord(
        PolicyVersion("math", 7), VersionState.ABORTED, "t1", "old", "told", LAYOUT.digest, 0.0
    )
    begun = _begun(m, m.begin(request_id="old", recorded=record))
    assert begun.transfer_id != "told"
    assert begun.version.version == 1


def test_a_request_id_for_other_content_conflicts() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED, request_id="once")
    assert m.error(m.begin(request_id="once", layout=OTHER_LAYOUT)).reason == "REQUEST_CONFLICT"


@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        ("math", {"layout": None}, "MANIFEST_UNKNOWN"),
        ("math", {"adapter": None}, "INVALID_ADAPTER"),
        ("base", {"adapter": SPEC}, "INVALID_ADAPTER"),
        ("math", {"adapter": AdapterSpec("{")}, "INVALID_ADAPTER"),
        ("math", {"adapter": AdapterSpec(SPEC.config_json, "0" * 64)}, "BASE_MISMATCH"),
        ("math", {"backend": "nccl"}, "BACKEND_MISMATCH"),
        ("math", {"request_id": ""}, "INVALID_REQUEST"),
        ("math", {"request_id": "q" * 129}, "INVALID_REQUEST"),
        ("math", {"fencing_token": 9}, "LEASE_FENCED"),
    ],
)
def test_refused_at_once(policy: str, changes: dict[str, object], reason: str) -> None:
    m = Machine().pool("r0")
    m.acquire(policy)
    assert m.error(m.begin(policy, **changes)).reason == reason
    assert not m.state.transfers
    assert not m.ever(effects.SaveVersion)


def test_a_replica_that_nobody_has_tried_is_read_from_by_none() -> None:
    m = Machine()
    for name in ("r0", "r1"):
        m.register(name, backends=("one-sided", "gloo"), trial_name=f"trial-{name}")
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    m.acquire("math")
    one_sided = {"backend": "one-sided", "backend_reason": "tried"}
    error = m.error(m.begin(**one_sided, trial_names=frozenset({"trial-r0"})))
    assert (error.reason, error.metadata["replica"]) == ("BACKEND_MISMATCH", "r1")
    m.begin(**one_sided, trial_names=frozenset({"trial-r0", "trial-r1", "trial-gone"}))
    (transfer,) = m.state.transfers.values()
    assert (transfer.backend, transfer.backend_reason) == ("one-sided", "tried")


MIXES = "vLLM's reload of DeepseekV2ForCausalLM would leave mixed weights"


def test_no_base_goes_to_a_pool_where_one_replica_cannot_load_it() -> None:
    m = Machine().pool("r0")
    m.register("r1", base_refusal=MIXES)
    for policy in ("base", "math"):
        m.acquire(policy)
    error = m.error(m.begin("base", min_replicas=1))
    assert (error.reason, error.metadata["replica"]) == ("UNSUPPORTED", "r1")
    assert MIXES in error.message
    assert not m.ever(effects.SaveVersion)
    assert set(m.transfer(m.run_to(Phase.COMMITTED, "math")).targets) == {"r0", "r1"}


def test_a_replica_that_cannot_load_a_base_ends_those_that_wait() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    ticket = m.begin("base", min_replicas=2)
    assert not m.answered(ticket)
    m.register("r1", base_refusal=MIXES)
    assert m.error(ticket).reason == "UNSUPPORTED"


def test_a_replica_that_has_gone_is_not_asked_whether_it_can_load_a_base() -> None:
    m = Machine().pool("r0")
    m.register("r1", base_refusal=MIXES)
    m.do(events.Leave(5, "r1", "i1"))
    m.acquire("base")
    assert _begun(m, m.begin("base")).version == PolicyVersion("base", 1)


def test_room_names_the_replica() -> None:
    m = Machine().pool("r0")
    m.register("r1", adapter_capacity_bytes=100)
    m.acquire("math")
    error = m.error(m.begin())
    assert (error.reason, error.metadata["replica"]) == ("STAGING_FULL", "r1")


def test_what_is_used_already_counts() -> None:
    m = Machine().pool("r0")
    m.beat("r0", adapter_used_bytes=(1 << 20) - 10)
    m.acquire("math")
    assert m.error(m.begin()).reason == "STAGING_FULL"


def test_preflight_is_asked_once_for_a_layout_and_a_kind_of_replica() -> None:
    m = Machine().pool("r0", "r1")
    m.register("r2", max_lora_rank=8)
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    assert len(m.ever(effects.CheckFit)) == 2
    m.run_to(Phase.COMMITTED)
    assert len(m.ever(effects.CheckFit)) == 2


def test_preflight_of_any_replica_refuses_the_push() -> None:
    m = Machine().pool("r0")
    m.register("r1", max_lora_rank=1)
    m.acquire("math")
    m.refused_rank, m.refusal = 1, Failure("INVALID_ADAPTER", "rank 4 is above 1")
    ticket = m.begin()
    assert m.error(ticket).reason == "INVALID_ADAPTER"
    assert not m.state.transfers


def test_a_preflight_that_could_not_be_made_is_not_remembered() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.refused_rank, m.refusal = 16, Failure("INTERNAL", "it broke")
    assert m.error(m.begin()).reason == "INTERNAL"
    m.refusal = None
    assert _begun(m, m.begin()).version.version == 1


def test_a_push_into_an_empty_pool_waits() -> None:
    m = Machine()
    m.acquire("math")
    ticket = m.begin(timeout=30)
    m.pass_time(5)
    assert not m.answered(ticket)
    m.pool("r0")
    m.check_fits()
    assert _begun(m, ticket).replica_ids == ("r0",)


def test_a_push_waits_for_as_many_replicas_as_it_requires() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.begin(min_replicas=2, timeout=3)
    other = m.begin(timeout=3)  # holds back nobody
    assert m.answered(other)
    m.pass_time(4)
    error = m.error(ticket)
    assert error.reason == "POOL_EMPTY"


def test_a_caller_that_hangs_up_leaves_the_queue() -> None:
    m = Machine()
    m.acquire("math")
    ticket = m.begin()
    m.do(events.CallerGone(ticket))
    m.pool("r0")
    assert not m.state.transfers


def test_trainers_take_turns_in_the_order_of_begin() -> None:
    m = Machine().pool("r0")
    for policy, trainer in (("a", "t1"), ("b", "t2"), ("c", "t3")):
        m.acquire(policy, trainer)
    first, second, third = m.begin("a"), m.begin("b"), m.begin("c")
    fourth = m.begin("a")
    order = []
    for _ in range(4):
        (now,) = [t for t in m.state.transfers.values() if t.phase is not Phase.WAITING]
        order.append(now.transfer_id)
        ticket = int(now.transfer_id[1:])
        m.attend_all(ticket)
        m.prepare_all(ticket)
        m.stage_all(ticket)
        m.answer_commits(ticket)
    assert order == [f"t{t}" for t in (first, second, third, fourth)]


@pytest.mark.parametrize("policy", ["math", "base"])
def test_a_policy_changes_once_at_a_time_whichever_replicas_are_concerned(policy: str) -> None:
    m = Machine().pool("r0")
    m.base_copies = 3
    m.acquire(policy)
    m.run_to(Phase.COMMITTED, policy)
    m.run_to(Phase.COMMITTED, policy)
    r0 = m.state.replicas["r0"]
    first = m.run_to(Phase.STAGING, policy)
    m.do(events.Drain(0, "r0", 60.0, ""))
    m.register("r1", vector=r0.vector, retained=r0.retained)
    second = m.begin(policy)
    back = m.roll_back(policy, 1)
    phases = [m.transfer(t).phase for t in (second, back)]
    assert phases == [Phase.WAITING, Phase.WAITING]
    m.stage_all(first)
    assert m.transfer(second).phase is Phase.WAITING
    m.answer_commits(first)
    assert m.transfer(second).targets == ("r1",)
    assert m.transfer(back).phase is Phase.WAITING
    m.finish(second)
    assert m.transfer(back).targets == ("r1",)
    third = m.begin(policy)
    assert m.transfer(third).phase is Phase.WAITING
    m.answer_commits(back)
    assert m.transfer(third).version == 5


def test_a_turn_that_does_not_come_is_a_deadline() -> None:
    m = Machine().pool("r0")
    m.acquire("a", "t1")
    m.acquire("b", "t2")
    m.begin("a")
    ticket = m.begin("b", timeout=2)
    m.pass_time(3)
    assert m.error(ticket).reason == "DEADLINE"


def test_the_next_one_starts_when_one_is_aborted() -> None:
    m = Machine().pool("r0")
    m.acquire("a", "t1")
    m.acquire("b", "t2")
    first = m.begin("a")
    second = m.begin("b")
    assert not m.answered(second)
    m.do(events.AbortTransfer(60, f"t{first}", "a", m.tokens["a"], "enough"))
    assert m.answered(second)


def test_a_kept_group_is_used_again_without_joining() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    first = m.run_to(Phase.COMMITTED)
    group_id = m.transfer(first).group_id
    before = len(m.ever(effects.CallJoin))
    ticket = m.begin(group_id=group_id)
    assert m.transfer(ticket).group_id == group_id
    assert len(m.ever(effects.CallJoin)) == before == 2
    assert m.ever(effects.SendPrepare)[-1].transfer.transfer_id == f"t{ticket}"


@pytest.mark.parametrize(
    "change", ["rank gone", "new replica", "new process", "new session", "no id"]
)
def test_a_group_that_does_not_fit_is_replaced(change: str) -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    old = m.transfer(m.run_to(Phase.COMMITTED)).group_id
    if change == "rank gone":
        m.do(events.RankGone(old, 1, "broke"))
    elif change == "new replica":
        m.register("r2")
    elif change == "new process":
        m.now += 4.5
        m.beat("r0")
        m.register("r1", "i2")
    elif change == "new session":
        m.do(events.ReleasePolicy(6, "math", 1))
        m.acquire("math", "t1", "s2")
    ticket = m.begin(group_id="" if change == "no id" else old)
    transfer = m.transfer(ticket)
    assert transfer.group_id != old
    assert transfer.epoch == 2
    assert [d.group_id for d in m.ever(effects.DropGroup)] == [old]
    assert set(m.state.groups) == {transfer.group_id}
    assert m.ever(effects.SaveEpoch)[-1].epoch == 2


def test_ranks_follow_the_receivers_of_each_replica() -> None:
    m = Machine()
    m.register("r1", num_receivers=2)
    m.register("r0", num_receivers=3)
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("math")
    m.begin()
    assert [(c.replica_id, c.first_rank, c.group.size) for c in m.ever(effects.CallJoin)] == [
        ("r0", 1, 6),
        ("r1", 4, 6),
    ]
    group = m.ever(effects.CallJoin)[0].group
    assert [group.member_name(rank) for rank in (0, 3, 4)] == ["t1", "r0", "r1"]


def test_too_many_pushes_of_one_policy() -> None:
    m = Machine()
    m.acquire("math")
    for _ in range(16):
        m.begin()
    assert m.error(m.begin()).reason == "STAGING_FULL"
