"""Pushes of changes alone: who takes part, what refuses them, and that a refusal costs nobody."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tests.unit.coordinator.decisions.machine import (
    CAPABILITIES,
    DIGEST,
    DIRTY,
    LAYOUT,
    OTHER_LAYOUT,
    SPEC,
    Machine,
    saved_versions,
)
from weft_rl.contract.manifest import (
    WSUM64,
    SendPlan,
    WireBucket,
    make_send_plan,
    plan_buckets,
)
from weft_rl.contract.names import VersionVector
from weft_rl.contract.tensors import TensorMeta
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica_state import base_targets
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    Phase,
    VersionLayout,
    VersionState,
    base_content,
)
from weft_rl.coordinator.decisions.transfers import preflight
from weft_rl.coordinator.messages.wire import transfer_to_proto

NUM_BYTES = 256
TAIL = ": push the same weights whole"
LACKS = "{} holds no copy of base@1"
IN_PLACE = "{} loads bases in place, and cannot read base@1 back"


def _plan(delta_from: bytes = DIGEST.value, num_senders: int = 1) -> SendPlan:
    wires = [WireBucket(sender, 0, NUM_BYTES, 1) for sender in range(num_senders)]
    return make_send_plan(num_senders, wires, delta_from)


def _pool(*replica_ids: str, **capabilities: Any) -> Machine:
    """Replicas that serve base@1, and hold it."""
    m = Machine()
    for replica_id in replica_ids or ("r0", "r1"):
        m.register(replica_id, **capabilities)
    m.pool()
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    return m


def _delta(m: Machine, **changes: Any) -> int:
    return m.begin("base", **{"send_plan": _plan()} | changes)


def _staging(m: Machine, **changes: Any) -> tuple[int, int]:
    ticket = m.run_to(Phase.STAGING, "base", **{"send_plan": _plan()} | changes)
    return ticket, m.await_end(ticket)


def _refusal(m: Machine, **changes: Any) -> str:
    """Why a delta is refused at its begin, which costs no version and leaves nothing."""
    before, num_saves = m.state.policies["base"].last_version, len(saved_versions(m))
    error = m.error(_delta(m, **changes))
    assert error.reason == "DELTA_REFUSED"
    assert error.message.endswith(TAIL)
    assert (m.state.policies["base"].last_version, len(saved_versions(m))) == (before, num_saves)
    assert not m.state.transfers
    return error.message.removesuffix(TAIL)


def _why(state: PoolState) -> str:
    return preflight.why_no_delta(state, base_targets(state))


def _lose_copy(m: Machine, replica_id: str) -> None:
    m.now += 3.0
    m.beat(replica_id, retained_base_versions=())


# -- a delta that is taken --------------------------------------------------------


def test_a_delta_is_a_version_like_any_other() -> None:
    m = _pool()
    assert not _why(m.state)
    ticket = _delta(m)
    transfer = m.transfer(ticket)
    assert (transfer.version, transfer.targets) == (2, ("r0", "r1"))
    begun = [e for e in m.ever(effects.Announce) if e.kind == "transfer_begun"]
    assert begun[-1].message.endswith(f"a delta of {NUM_BYTES} bytes")
    assert begun[0].message.endswith(f", {LAYOUT.total_bytes} bytes")
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.digest = ContentDigest(WSUM64, b"\2" * 8, LAYOUT.total_bytes)
    m.stage_all(ticket)
    m.answer_commits(ticket)
    record = saved_versions(m)[-1]
    assert (record.state, record.content_digest) == (VersionState.COMMITTED, m.digest)
    assert m.state.served_base_digests == (LAYOUT.digest, m.digest.value)
    assert m.state.served_base_content == base_content(LAYOUT.digest, m.digest)


def test_the_next_one_is_from_what_was_committed() -> None:
    m = _pool()
    m.digest = ContentDigest(WSUM64, b"\2" * 8, LAYOUT.total_bytes)
    m.run_to(Phase.COMMITTED, "base", send_plan=_plan())
    why = "the pool serves base@2 of another content than the delta is from"
    assert _refusal(m) == why
    m.run_to(Phase.COMMITTED, "base", send_plan=_plan(m.digest.value))
    assert m.state.vector.base == 3


def test_an_older_base_of_the_same_content_will_do() -> None:
    """Content decides, not numbers: a base that the pool was rolled back to, or pushed again."""
    m = _pool()
    m.base_copies = 2
    m.digest = ContentDigest(WSUM64, b"\2" * 8, LAYOUT.total_bytes)
    m.run_to(Phase.COMMITTED, "base")
    _refusal(m)
    m.answer_commits(m.roll_back("base", 1))
    assert m.state.vector.base == 1
    assert m.transfer(_delta(m)).version == 3


@pytest.mark.parametrize("num_senders", [1, 2])
def test_what_is_seen_of_it(num_senders: int) -> None:
    metas = [TensorMeta("w", CAPABILITIES.base_dtype, (64, 64))]
    layout = VersionLayout.of(plan_buckets(metas))
    digest = ContentDigest(WSUM64, b"\1" * 8, layout.total_bytes)
    m = Machine().pool("r0")
    m.acquire("base")
    m.digest = digest
    dense = m.run_to(Phase.COMMITTED, "base", layout=layout)
    delta = m.run_to(
        Phase.COMMITTED, "base", layout=layout, send_plan=_plan(num_senders=num_senders)
    )
    shown = [transfer_to_proto(m.transfer(t), m.state, m.now, 0) for t in (dense, delta)]
    assert [t.delta_from for t in shown] == [b"", DIGEST.value]
    assert [t.sent_bytes for t in shown] == [layout.total_bytes, NUM_BYTES * num_senders]
    assert [t.total_bytes for t in shown] == [layout.total_bytes] * 2
    assert m.transfer(delta).send_plan is None


# -- refused at its begin, where it burns nothing ------------------------------------


def test_of_an_adapter_it_makes_no_sense() -> None:
    m = _pool()
    m.acquire("math")
    error = m.error(m.begin("math", adapter=SPEC, send_plan=_plan()))
    assert error.reason == "INVALID_REQUEST"
    assert "this is an adapter" in error.message


def test_its_manifest_must_be_known() -> None:
    m = _pool()
    assert m.error(_delta(m, layout=None)).reason == "MANIFEST_UNKNOWN"


@pytest.mark.parametrize("delta_from", [b"\2" * 8, b"\0" * 8])
def test_another_content_is_refused(delta_from: bytes) -> None:
    why = "the pool serves base@1 of another content than the delta is from"
    assert _refusal(_pool(), send_plan=_plan(delta_from)) == why


def test_another_layout_is_refused() -> None:
    why = "the pool serves base@1 of another content than the delta is from"
    assert _refusal(_pool(), layout=OTHER_LAYOUT) == why


def test_of_base_0_there_is_none() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    assert _refusal(m) == _why(m.state) == "the pool serves base@0, which was not pushed"
    assert m.state.served_base_digests == (b"", b"")


def test_nor_of_a_version_of_which_no_content_is_known() -> None:
    m = _pool()
    m.state = dataclasses.replace(m.state, base_contents={})
    assert _refusal(m) == _why(m.state) == "the content of base@1 is not known"


def test_a_ready_replica_that_holds_no_copy_refuses_it() -> None:
    m = _pool("r0")
    m.register("r1", loads_in_place=True, vector=VersionVector(1))
    assert m.standing("r1")[0].name == "READY"
    assert _refusal(m) == _why(m.state) == IN_PLACE.format("r1")
    m.now += 3.0
    m.beat("r1", retained_base_versions=(1,))
    assert m.transfer(_delta(m)).targets == ("r0", "r1"), "it reads what it serves"
    m = _pool()
    _lose_copy(m, "r1")
    assert m.standing("r1")[0].name == "READY"
    assert _refusal(m) == _refusal(m, min_replicas=1) == _why(m.state) == LACKS.format("r1")
    m.now += 3.0
    m.beat("r1", retained_base_versions=(1,))
    assert not _why(m.state)
    assert m.transfer(_delta(m)).targets == ("r0", "r1")


def test_a_replica_that_holds_the_base_in_parts_takes_it_without_a_copy() -> None:
    m = _pool("r0")
    m.register("r1", loads_in_place=True, vector=VersionVector(1))
    m.now += 3.0
    m.beat("r1", takes_deltas=True)
    assert m.transfer(_delta(m)).targets == ("r0", "r1")
    m = _pool("r0")
    m.register("r1", loads_in_place=True, vector=VersionVector(0))
    m.now += 3.0
    m.beat("r1", takes_deltas=True)
    assert m.transfer(_delta(m)).targets == ("r0",), "of another base"


# -- replicas that have still to catch up --------------------------------------------


def test_a_joining_replica_without_the_base_is_passed_over_and_catches_up() -> None:
    m = _pool("r0")
    m.register("r1")
    m.register("r2", loads_in_place=True)
    assert not _why(m.state)
    ticket = _delta(m)
    assert m.transfer(ticket).targets == ("r0",)
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.stage_all(ticket)
    m.answer_commits(ticket)
    m.do(events.Tick())
    assert {look.version.version for look in m.look_ups()} == {2}
    assert {look.replica_id for look in m.look_ups()} == {"r1", "r2"}


def test_a_replica_that_many_deltas_passed_over_is_sent_the_next_version_whole() -> None:
    """Pushes may come faster than a clone: then it would never catch up."""
    m = _pool("r0")
    m.register("r1")
    for _ in range(3):
        assert not _why(m.state)
        ticket = m.run_to(Phase.COMMITTED, "base", send_plan=_plan())
        assert m.transfer(ticket).targets == ("r0",)
    why = "r1 holds no copy of base@4, and 3 deltas have passed it over"
    assert _refusal(m) == _why(m.state) == why
    assert m.transfer(m.begin("base")).targets == ("r0", "r1")
    assert m.state.replicas["r1"].num_passed_over == 0


def test_a_joining_replica_that_holds_the_base_takes_part() -> None:
    """It retains a copy, say, and its engine is broken."""
    m = _pool()
    m.answer_commits(m.run_to(Phase.COMMITTING, "base"), r1=DIRTY)
    assert m.state.replicas["r1"].retained == (1,)
    m.now += 3.0
    m.beat("r1", retained_base_versions=(2,), dirty_reason="the engine broke")
    assert m.transfer(_delta(m)).targets == ("r0", "r1")


def test_those_that_are_left_must_be_enough() -> None:
    m = _pool("r0")
    m.register("r1")
    assert m.transfer(m.begin("base", min_replicas=2)).targets == ("r0", "r1")
    m = _pool("r0")
    m.register("r1")
    why = "1 replicas can take a delta now, the push needs 2"
    assert _refusal(m, min_replicas=2) == why


def test_a_pool_of_joining_replicas_refuses_it_if_none_holds_the_base() -> None:
    m = _pool("r0")
    m.register("r1")
    m.do(events.Leave(96, "r0", "i1"))
    assert _refusal(m) == _why(m.state) == LACKS.format("r1")
    assert preflight.why_no_delta(m.state, []) == "no replica is in contact"
    m.register("r2", vector=VersionVector(1), retained=(1,))
    assert not _why(m.state)
    assert m.transfer(_delta(m)).targets == ("r2",)


@pytest.mark.parametrize(
    "kinds",
    list(itertools.product(["holds", "lacks", "in_place", "in_place_lacks", "joining"], repeat=3)),
)
def test_what_describe_target_says_is_what_a_push_finds(kinds: tuple[str, ...]) -> None:
    m = _pool("donor")
    for i, kind in enumerate(kinds):
        serves = VersionVector(0 if kind == "joining" else 1)
        retained = (1,) if kind in ("holds", "in_place") else ()
        m.register(f"r{i}", vector=serves, retained=retained, loads_in_place="in_place" in kind)
    m.do(events.Leave(96, "donor", "i1"))
    why = _why(m.state)
    takers = [f"r{i}" for i, kind in enumerate(kinds) if kind in ("holds", "in_place")]
    is_refused = bool({"lacks", "in_place_lacks"} & {*kinds}) or not takers
    assert bool(why) is is_refused
    if is_refused:
        assert _refusal(m, min_replicas=1) == why
    else:
        assert m.transfer(_delta(m, min_replicas=1)).targets == tuple(takers)


# -- it waits for its turn -----------------------------------------------------------


def test_its_turn_decides_and_then_it_is_answered_at_once() -> None:
    m = _pool()
    m.digest = ContentDigest(WSUM64, b"\2" * 8, LAYOUT.total_bytes)
    first = m.run_to(Phase.COMMITTING, "base")
    second, third = _delta(m), _delta(m, send_plan=_plan(m.digest.value))
    assert not m.answered(second)
    m.answer_commits(first)
    why = "the pool serves base@2 of another content than the delta is from"
    assert m.error(second).message == why + TAIL
    assert m.transfer(third).version == 3


def test_a_rollback_waits_for_a_delta_that_is_under_way() -> None:
    """A policy changes once at a time: what a delta is from is served up to its commit."""
    m = _pool()
    m.base_copies = 2
    m.run_to(Phase.COMMITTED, "base")
    ticket, _ = _staging(m)
    back = m.roll_back("base", 1)
    assert not m.answered(back)
    m.stage_all(ticket)
    assert m.state.vector.base == 3
    assert not m.answered(back)
    m.base_copies = 3
    m.answer_commits(ticket)
    assert m.transfer(back).phase is Phase.COMMITTING


# -- receivers that cannot apply it ----------------------------------------------------


@pytest.mark.parametrize(
    "reason",
    ["DELTA_REFUSED", "DIGEST_MISMATCH", "INVALID_MANIFEST", "STAGING_FULL", "NOT_RETAINED"],
)
@pytest.mark.parametrize("min_replicas", [0, 1])
def test_a_receiver_that_cannot_apply_it_ends_it_and_nobody_is_lost(
    reason: str, min_replicas: int
) -> None:
    m = _pool()
    ticket, waiter = _staging(m, min_replicas=min_replicas)
    m.do(events.RankFailed(m.transfer(ticket).group_id, f"t{ticket}", 2, reason, "it is not it"))
    error = m.error(waiter)
    assert (error.reason, error.metadata) == ("DELTA_REFUSED", {"member": "r1", "cause": reason})
    assert error.message == f"r1: it is not it [{reason}]{TAIL}"
    ended = m.transfer(ticket)
    assert (ended.phase, ended.lost, ended.targets) == (Phase.ABORTED, (), ("r0", "r1"))
    assert saved_versions(m)[-1].state is VersionState.ABORTED
    assert {m.standing(name)[0].name for name in ("r0", "r1")} == {"READY"}
    dense = m.begin("base", min_replicas=min_replicas)
    assert m.transfer(dense).targets == ("r0", "r1")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0)])
def test_a_receivers_other_digest_ends_it(order: tuple[int, ...]) -> None:
    m = _pool()
    ticket, waiter = _staging(m, min_replicas=1)
    other = ContentDigest(WSUM64, b"\7" * 8, LAYOUT.total_bytes)
    for rank in order:
        m.stage(ticket, rank, other if rank == 2 else DIGEST)
    error = m.error(waiter)
    assert (error.reason, error.metadata["cause"]) == ("DELTA_REFUSED", "DIGEST_MISMATCH")
    assert error.metadata["member"] == "r1"
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert not m.transfer(ticket).losses


def test_other_failures_are_as_in_any_push() -> None:
    m = _pool()
    ticket, _ = _staging(m, min_replicas=1)
    group_id = m.transfer(ticket).group_id
    m.do(events.RankFailed(group_id, f"t{ticket}", 2, "INTERNAL", "a bug"))
    transfer = m.transfer(ticket)
    assert (transfer.phase, transfer.targets, transfer.lost) == (Phase.FORMING, ("r0",), ("r1",))


@pytest.mark.parametrize("reason", ["NOT_FINITE", "DIGEST_MISMATCH", "DELTA_REFUSED"])
def test_a_senders_failure_stays_what_it_is(reason: str) -> None:
    m = _pool()
    ticket, waiter = _staging(m, min_replicas=1)
    m.do(events.RankFailed(m.transfer(ticket).group_id, f"t{ticket}", 0, reason, "a NaN"))
    error = m.error(waiter)
    assert (error.reason, error.metadata) == (reason, {"member": "t1"})


def test_a_dense_push_goes_on_without_the_replica() -> None:
    m = _pool()
    ticket = m.run_to(Phase.STAGING, "base", min_replicas=1)
    m.do(events.RankFailed(m.transfer(ticket).group_id, f"t{ticket}", 2, "STAGING_FULL", "full"))
    assert m.transfer(ticket).lost == ("r1",)
