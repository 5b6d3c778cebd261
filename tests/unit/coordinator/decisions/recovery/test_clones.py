"""Late joiners, repairs and everything that can go wrong with a clone."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.unit.coordinator.decisions.machine import (
    CAPABILITIES,
    DIGEST,
    GONE,
    LOAD_FAILED,
    Machine,
)
from tests.unit.coordinator.decisions.recovery.clones import (
    BASE_1,
    GONE_FOR_GOOD,
    next_clone,
    serving_pool,
)
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import AdapterVersions, VersionVector
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import (
    Failure,
    Phase,
    ReplicaState,
    VersionLayout,
)
from weft_rl.coordinator.decisions.transfers.preflight import check_fit


def test_a_late_joiner_gets_the_base_then_adapters_from_the_oldest_on() -> None:
    m = serving_pool()
    m.register("r1")
    brought = []
    while m.standing("r1")[0] is not ReplicaState.READY:
        ticket = next_clone(m)
        transfer = m.transfer(ticket)
        assert (transfer.purpose.name, transfer.source, transfer.targets) == (
            "clone",
            "r0",
            ("r1",),
        )
        (send,) = m.found(effects.CallSend)
        (join,) = m.found(effects.CallJoin)
        assert (send.replica_id, join.replica_id, join.first_rank) == ("r0", "r1", 1)
        assert send.nonce == transfer.ids.nonce
        brought.append(str(transfer.policy_version))
        m.finish(ticket)
        assert m.transfer(ticket).phase is Phase.COMMITTED
    assert brought == ["base@1", "code@1", "math@1", "math@2"]
    vector = m.state.replicas["r1"].vector
    assert vector == m.state.vector
    assert not m.state.groups or all(g.trainer_id == "t1" for g in m.state.groups.values())
    m.pass_time(3)
    assert not m.look_ups()


def test_a_late_joiner_that_cannot_load_a_base_is_brought_none() -> None:
    m = serving_pool()
    m.register("r1", base_refusal="its reload would leave mixed weights")
    brought = []
    for _ in range(3):
        ticket = next_clone(m)
        brought.append(str(m.transfer(ticket).policy_version))
        m.finish(ticket)
    assert brought == ["code@1", "math@1", "math@2"]
    m.pass_time(3)
    assert not m.look_ups()
    assert m.standing("r1") == (
        ReplicaState.PENDING_WEIGHTS,
        "lacks base@1, which it cannot load while it runs: its reload would leave mixed weights",
    )


def test_a_clone_has_no_version_of_its_own_and_no_lease() -> None:
    m = serving_pool()
    m.register("r1")
    saved = len(m.ever(effects.SaveVersion)), len(m.ever(effects.SavePolicy))
    ticket = next_clone(m)
    m.do(events.ReleasePolicy(0, "base", m.tokens["base"]))
    assert m.transfer(ticket).phase is Phase.FORMING, "its trainer's lease is not its own"
    m.finish(ticket)
    assert (len(m.ever(effects.SaveVersion)), len(m.ever(effects.SavePolicy))) == saved
    assert m.state.policies["base"].last_version == 1
    commit = m.ever(effects.CallCommit)[-1]
    assert (commit.replica_id, commit.version) == ("r1", BASE_1)
    assert commit.content_digest == DIGEST


def test_what_nobody_holds_is_said_and_nothing_is_tried() -> None:
    m = serving_pool()
    m.do(events.Leave(5, "r0", "i1"))
    m.register("r0", "i2")
    m.pass_time(3)
    where, why = m.standing("r0")
    assert where is ReplicaState.PENDING_WEIGHTS
    assert why == f"lacks base@1, code@1, math@2, {GONE_FOR_GOOD}"
    assert not m.look_ups()


def test_a_base_that_is_served_but_not_retained_cannot_be_cloned() -> None:
    m = Machine().pool("r0")
    m.base_copies = 0
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1")
    m.pass_time(1)
    assert m.standing("r1")[1] == f"lacks base@1, {GONE_FOR_GOOD}"
    assert not m.look_ups()


def test_standing_says_what_comes_from_whom() -> None:
    m = serving_pool()
    m.register("r1")
    next_clone(m)
    assert m.standing("r1")[1] == "lacks base@1, which comes from r0; lacks code@1, math@2"


def test_a_source_that_is_not_ready_will_do_if_it_holds_the_bytes() -> None:
    m = serving_pool()
    vector = VersionVector(0, {"math": AdapterVersions((1, 2), 2)})
    m.register("r1", vector=vector)
    m.register("r2", vector=vector)
    m.do(events.Leave(5, "r0", "i1"))
    m.register("r3")
    m.do(events.Tick())
    assert {(e.replica_id, str(e.version)) for e in m.look_ups()} == {("r3", "math@1")}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_broken_stream_puts_it_off_and_disturbs_nothing_else(rank: int) -> None:
    m = serving_pool()
    m.register("r1")
    ticket = next_clone(m)
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.do(events.RankGone(f"g{ticket}", rank, "its stream broke"))
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert [c.replica_id for c in m.found(effects.CallDiscard)] == ["r1"]
    assert not m.ever(effects.SaveRetired)
    assert m.standing("r0")[0] is ReplicaState.READY
    if rank:  # its process may be dead
        assert m.standing("r1")[0] is ReplicaState.LOST
        m.do(events.Tick())
        assert not m.look_ups()
        m.beat("r1", ticket=7, version_vector=VersionVector())
    where, why = m.standing("r1")
    assert where is ReplicaState.PENDING_WEIGHTS
    assert "could not be brought yet" in why
    assert "its stream broke" in why
    m.do(events.Tick())
    assert [str(e.version) for e in m.look_ups()] == ["code@1"], "the base waits, others need not"


def test_each_failure_doubles_the_wait_up_to_a_minute() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1")
    waits = []
    for _ in range(9):
        began = m.now
        while not m.look_ups():
            m.pass_time(0.25)
        waits.append(round(m.now - began))
        (ticket,) = m.answer_look_ups()
        m.do(events.JoinAnswered(f"t{ticket}", "r0", GONE))
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_another_source_is_tried_after_a_failure() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r2")
    seen = []
    for _ in range(3):
        m.pass_time(5)
        (look_up,) = m.look_ups()
        seen.append(look_up.source_id)
        (ticket,) = m.answer_look_ups()
        m.do(events.JoinAnswered(f"t{ticket}", look_up.source_id, GONE))
    assert seen == ["r0", "r1", "r0"]


def test_a_copy_that_is_not_what_was_committed_is_not_served() -> None:
    m = serving_pool()
    m.register("r1")
    ticket = next_clone(m)
    m.attend_all(ticket)
    m.prepare_all(ticket)
    commits = len(m.ever(effects.CallCommit))
    other = replace(DIGEST, value=b"\2" * 8)
    for rank in (0, 1):
        m.stage(ticket, rank, other)
    failure = m.transfer(ticket).failure
    assert failure is not None
    assert (failure.reason, failure.metadata["member"]) == ("DIGEST_MISMATCH", "r0")
    assert len(m.ever(effects.CallCommit)) == commits
    assert "not what was committed" in m.standing("r1")[1]


def test_a_clone_that_the_engine_refuses_is_tried_again() -> None:
    m = serving_pool()
    m.register("r1")
    ticket = next_clone(m)
    m.finish(ticket, r1=LOAD_FAILED)
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert m.state.policies["base"].served_version == 1
    assert m.standing("r0")[0] is ReplicaState.READY
    assert "the engine said no" in m.standing("r1")[1]
    assert f"g{ticket}" not in m.state.groups


def test_a_replica_does_one_thing_at_a_time() -> None:
    m = serving_pool()
    m.register("r1")
    m.do(events.Tick())
    pushed = m.run_to(Phase.STAGING)
    (clone,) = m.answer_look_ups()
    assert m.transfer(clone).phase is Phase.WAITING, "its source was taken meanwhile"
    later = m.begin("code")
    assert m.transfer(later).phase is Phase.WAITING
    m.stage_all(pushed)
    m.answer_commits(pushed)
    assert m.transfer(clone).phase is Phase.WAITING, "a push would end it"
    assert m.transfer(later).phase is Phase.FORMING
    assert m.transfer(later).targets == ("r0", "r1")
    m.attend_all(later)
    m.prepare_all(later)
    m.stage_all(later)
    m.answer_commits(later)
    assert m.transfer(clone).phase is Phase.FORMING


def test_a_thousand_late_joiners_are_planned_in_reasonable_time() -> None:
    m = serving_pool()
    for i in range(1, 1000):
        m.register(f"r{i:04}")
    begin = time.process_time()
    for _ in range(20):
        m.do(events.Tick())
        for ticket in m.answer_look_ups():
            m.finish(ticket)
    assert time.process_time() - begin < 10
    assert sum(r.vector.base == 1 for r in m.state.replicas.values()) > 16


def test_clones_of_different_pairs_go_on_at_once() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r2")
    m.register("r3")
    m.do(events.Tick())
    first, second = m.answer_look_ups()
    pairs = {(m.transfer(t).source, m.transfer(t).replica_id) for t in (first, second)}
    assert pairs == {("r0", "r2"), ("r1", "r3")}
    assert {m.transfer(t).phase for t in (first, second)} == {Phase.FORMING}


def test_a_clone_that_is_superseded_while_it_waits_is_dropped() -> None:
    m = serving_pool()
    m.register("r1")
    m.do(events.Tick())
    pushed = m.run_to(Phase.STAGING, "base", min_replicas=1)
    (clone,) = m.answer_look_ups()
    m.stage_all(pushed)
    m.answer_commits(pushed)
    assert f"t{clone}" not in m.state.transfers
    assert str(m.transfer(next_clone(m)).policy_version) == "code@1"


@pytest.mark.parametrize("who", ["r0", "r1"])
def test_who_leaves_ends_the_clone(who: str) -> None:
    m = serving_pool()
    m.register("r1")
    ticket = next_clone(m)
    m.do(events.Leave(5, who, "i1"))
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert not [t for t in m.state.transfers.values() if isinstance(t.purpose, Clone)]


def test_who_leaves_while_it_waits_or_is_looked_up() -> None:
    m = serving_pool()
    m.register("r1")
    m.register("r2")
    first = next_clone(m)
    waiting = m.transfer(first)
    m.do(events.Leave(5, waiting.replica_id, "i1"))
    assert f"t{first}" not in m.state.transfers
    m.do(events.Tick())
    (look_up,) = m.look_ups()
    m.do(events.Leave(6, look_up.replica_id, "i1"))
    assert m.answer_look_ups() == []


def test_nothing_is_cloned_to_or_from_who_was_just_lost() -> None:
    """A push that continues without a replica has found that its process is dead, long before it
    is missed."""
    m = Machine().pool("r0", "r1")
    m.acquire("base")
    ticket = m.run_to(Phase.STAGING, "base", min_replicas=1)
    m.do(events.RankGone(f"g{ticket}", 2, "its stream broke"))
    assert m.standing("r1")[0] is ReplicaState.LOST
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.stage_all(ticket)
    m.answer_commits(ticket)
    assert m.transfer(ticket).phase is Phase.COMMITTED
    m.register("r2")
    m.do(events.Tick())
    assert [look_up.replica_id for look_up in m.look_ups()] == ["r2"]
    m.pass_time(4, beats=False)
    assert [look_up.replica_id for look_up in m.look_ups()] == ["r2"]


def test_a_clone_is_not_begun_to_who_was_lost_while_it_was_looked_up() -> None:
    m = serving_pool()
    m.register("r1")
    m.do(events.Tick())
    for _ in range(8):
        m.now += 1
        m.beat("r0", ticket=8, retained_base_versions=(1,))
        m.do(events.Tick())
    assert m.state.replicas["r1"].lost
    assert m.answer_look_ups() == []
    assert not m.ever(effects.CallSend)


def test_a_lookup_that_fails_is_put_off() -> None:
    m = serving_pool()
    m.register("r1")
    m.do(events.Tick())
    assert m.answer_look_ups(Failure("PEER_GONE", "no answer")) == []
    assert "no answer" in m.standing("r1")[1]
    m.pass_time(1.5)
    assert m.answer_look_ups(record=None) == []


ALL = ("one-sided", "nccl", "stream", "gloo")


@pytest.mark.parametrize(
    ("ours", "theirs", "uuids", "networks", "used"),
    [
        (("one-sided", "gloo"), ("one-sided", "gloo"), ("", ""), ("", ""), "gloo"),
        (("one-sided",), ("one-sided", "gloo"), ("", ""), ("", ""), "one-sided"),
        (("nccl", "gloo"), ("nccl", "gloo"), ("GPU-1", "GPU-2"), ("", ""), "nccl"),
        (("nccl", "gloo"), ("nccl", "gloo"), ("GPU-1", "GPU-1"), ("", ""), "gloo"),
        (ALL, ALL, ("GPU-1", "GPU-2"), ("RoCE", "RoCE"), "nccl"),
        (ALL, ALL, ("GPU-1", "GPU-2"), ("sockets of host a", "RoCE"), "stream"),
    ],
)
def test_a_clone_takes_what_two_replicas_are_sure_to_share(
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    uuids: tuple[str, str],
    networks: tuple[str, str],
    used: str,
) -> None:
    m = serving_pool()
    m.register("r1")
    replicas = dict(m.state.replicas)
    each = zip(("r0", "r1"), (ours, theirs), uuids, networks, strict=True)
    for name, backends, uuid, network in each:
        changed = replace(
            CAPABILITIES,
            backends=backends,
            gpu_uuids=(uuid,) if uuid else (),
            nccl_network=network,
        )
        replicas[name] = replace(replicas[name], capabilities=changed)
    m.state = replace(m.state, replicas=replicas)
    m.do(events.Tick())
    m.answer_look_ups()
    (clone,) = m.state.transfers.values()
    assert clone.backend == used


def test_backends_must_meet() -> None:
    m = serving_pool()
    m.register("r1")
    capabilities = replace(CAPABILITIES, backends=("nccl",))
    m.state = replace(
        m.state,
        replicas={
            **m.state.replicas,
            "r1": replace(m.state.replicas["r1"], capabilities=capabilities),
        },
    )
    m.do(events.Tick())
    assert m.answer_look_ups() == []
    assert "BACKEND_MISMATCH" in m.standing("r1")[1]


def test_versions_that_are_about_to_be_retired_are_not_cloned() -> None:
    m = serving_pool(retain_versions=1)
    m.register("r1")
    brought = []
    while m.standing("r1")[0] is not ReplicaState.READY:
        ticket = next_clone(m)
        brought.append(str(m.transfer(ticket).policy_version))
        m.finish(ticket)
    assert brought == ["base@1", "code@1", "math@2"]


def test_a_replica_without_lora_is_not_sent_adapters() -> None:
    m = serving_pool()
    m.register("r1", lora_enabled=False)
    ticket = next_clone(m)
    m.finish(ticket)
    m.do(events.Tick())
    assert not m.look_ups()


W = TensorMeta("w", DataType.BFLOAT16, (8, 8))
WITH_DRAFT = VersionLayout.of(plan_buckets([W, replace(W, name="mtp.fc")]))


@pytest.mark.parametrize("fits", [False, True])
def test_a_base_with_a_draft_is_sent_to_who_takes_it(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not joins when there is nothing to begin any more."""
    m = serving_pool()
    m.register("r1", max_lora_rank=9)
    if fits:  # what was checked for the push is known
        m.state = replace(m.state, fits={})
    m.do(events.Tick())
    sent = len(m.ever(effects.CallSend))
    monkeypatch.setattr(m, "check_fits", lambda: None)
    tickets = m.answer_look_ups(layout=WITH_DRAFT)
    (asked,) = m.found(effects.CheckFit)
    assert len(m.ever(effects.CallSend)) == sent
    own = W if fits else replace(W, shape=(4, 8))
    fit = check_fit(asked.manifest, asked.adapter, Reference("Tiny", (own,)), asked.key)
    m.do(events.FitChecked(asked.key, fit))
    if fits:
        assert [call.replica_id for call in m.found(effects.CallSend)] == ["r0"]
        m.finish(tickets[0])
        assert m.state.replicas["r1"].vector.base == 1
        return
    assert not m.state.transfers
    assert len(m.ever(effects.CallSend)) == sent
    assert [e.kind for e in m.found(effects.Announce)] == [effects.EventKind.CLONE_FAILED]
    why = m.standing("r1")[1]
    assert why.startswith(
        "lacks base@1, which could not be brought yet, it is tried again: 'w' has shape (8,8), "
        "the served model has (4,8)"
    )
    m.do(events.Tick())
    assert [str(e.version) for e in m.look_ups()] == ["code@1"], "adapters are brought meanwhile"


def test_a_clone_waits_until_its_replicas_tensors_are_known() -> None:
    m = serving_pool()
    m.register("r1", draft_fingerprint="d" * 64)
    ticket = next_clone(m)
    assert m.transfer(ticket).phase is Phase.WAITING
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint, "d" * 64))
    m.check_fits()
    assert m.transfer(ticket).phase is Phase.FORMING


def test_a_clone_that_takes_too_long_is_given_up() -> None:
    m = serving_pool(clone_seconds=5)
    m.register("r1")
    ticket = next_clone(m)
    m.pass_time(6)
    failure = m.transfer(ticket).failure
    assert failure is not None
    assert failure.reason == "DEADLINE"
    assert "replica:r0, r1 did not join" in failure.message


def test_who_waits_for_a_clone_is_answered_as_it_ends() -> None:
    m = serving_pool()
    m.register("r1")
    ticket = next_clone(m)
    waiting = m.await_end(ticket)
    m.finish(ticket)
    assert m.answer(waiting) == m.transfer(ticket)
    ticket = next_clone(m)
    waiting = m.await_end(ticket)
    m.finish(ticket, r1=LOAD_FAILED)
    assert m.error(waiting).reason == "LOAD_FAILED"
