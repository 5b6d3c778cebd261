"""Pushes that are a delta to some replicas and all elements to the others: who is sent what, and
who is lost for which failure."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tests.unit.coordinator.decisions.machine import (
    CAPABILITIES,
    DIGEST,
    LAYOUT,
    OTHER_LAYOUT,
    Machine,
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
from weft_rl.coordinator.decisions.state.replica_state import base_targets
from weft_rl.coordinator.decisions.state.values import ContentDigest, Phase, VersionLayout
from weft_rl.coordinator.decisions.transfers import preflight
from weft_rl.coordinator.messages.wire import transfer_to_proto

NUM_BYTES = 256
OTHER = ContentDigest(WSUM64, b"\7" * 8, LAYOUT.total_bytes)


def _plan(
    delta_from: bytes = DIGEST.value, num_senders: int = 1, whole_bytes: int = LAYOUT.total_bytes
) -> SendPlan:
    changes = [WireBucket(sender, 0, NUM_BYTES, 1) for sender in range(num_senders)]
    whole = [WireBucket(sender, 0, whole_bytes // num_senders, 1) for sender in range(num_senders)]
    return make_send_plan(num_senders, [*changes, *whole], delta_from, len(whole))


def _pool(**others: dict[str, Any]) -> Machine:
    """Replica r0, which serves base@1 and holds it, and others, which serve it."""
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    for replica_id, settings in others.items():
        m.register(replica_id, **{"vector": VersionVector(1)} | settings)
    return m


def _mixed(m: Machine, **changes: Any) -> int:
    return m.begin("base", **{"send_plan": _plan()} | changes)


def _staging(m: Machine, **changes: Any) -> tuple[int, int]:
    ticket = m.run_to(Phase.STAGING, "base", **{"send_plan": _plan()} | changes)
    return ticket, m.await_end(ticket)


def _refusal(m: Machine, **changes: Any) -> str:
    error = m.error(_mixed(m, **changes))
    assert error.reason == "DELTA_REFUSED"
    assert not m.state.transfers
    return error.message.removesuffix(": push the same weights whole")


def _takers(m: Machine) -> set[str]:
    return preflight.takers_of_delta(m.state, base_targets(m.state))


# -- who is sent what -----------------------------------------------------------------


@pytest.mark.parametrize("num_senders", [1, 2])
def test_replicas_that_cannot_take_the_delta_are_sent_all_elements(num_senders: int) -> None:
    metas = [TensorMeta("w", CAPABILITIES.base_dtype, (16, 32))]
    layout = VersionLayout.of(plan_buckets(metas))
    m = Machine().pool("r0")
    m.acquire("base")
    m.digest = ContentDigest(WSUM64, DIGEST.value, layout.total_bytes)
    m.run_to(Phase.COMMITTED, "base", layout=layout)
    m.register("r1", vector=VersionVector(1))
    m.register("r2", vector=VersionVector(1), loads_in_place=True)
    ticket = _mixed(m, layout=layout, send_plan=_plan(num_senders=num_senders, whole_bytes=1024))
    transfer = m.transfer(ticket)
    assert transfer.targets == ("r0", "r1", "r2")
    assert transfer.sent_whole == ("r1", "r2")
    assert transfer.layout.num_buckets == 2 * num_senders
    m.attend_all(ticket)
    (prepare,) = m.found(effects.SendPrepare)
    assert prepare.transfer.whole_for == {"r1", "r2"}
    begun = [e for e in m.ever(effects.Announce) if e.kind == "transfer_begun"][-1]
    sent = NUM_BYTES * num_senders
    assert begun.message.endswith(
        f"a delta of {sent} bytes, to 2 of them {layout.total_bytes} bytes"
    )
    m.prepare_all(ticket)
    m.stage_all(ticket)
    m.answer_commits(ticket)
    shown = transfer_to_proto(m.transfer(ticket), m.state, m.now, 0)
    assert (shown.delta_from, shown.sent_bytes) == (DIGEST.value, sent)
    assert shown.whole_replica_ids == ["r1", "r2"]
    assert shown.serving_replica_ids == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    "kinds",
    list(itertools.product(["holds", "lacks", "in_place", "in_place_lacks", "joining"], repeat=3)),
)
def test_each_takes_what_it_can_and_with_no_taker_all_is_refused(kinds: tuple[str, ...]) -> None:
    m = _pool()
    for i, kind in enumerate(kinds):
        serves = VersionVector(0 if kind == "joining" else 1)
        retained = (1,) if kind in ("holds", "in_place") else ()
        m.register(f"r{i + 1}", vector=serves, retained=retained, loads_in_place="in_pl" in kind)
    m.do(events.Leave(96, "r0", "i1"))
    takers = {f"r{i + 1}" for i, kind in enumerate(kinds) if kind in ("holds", "in_place")}
    assert _takers(m) == takers
    if not takers:
        assert _refusal(m, min_replicas=1)
        return
    transfer = m.transfer(_mixed(m, min_replicas=1))
    assert transfer.targets == ("r1", "r2", "r3")
    assert {*transfer.sent_whole} == {*transfer.targets} - takers


def test_a_joining_replica_is_not_passed_over() -> None:
    m = _pool(r1={}, r2={"vector": VersionVector(0)})
    assert m.standing("r2")[0].name != "READY"
    transfer = m.transfer(_mixed(m))
    assert transfer.targets == ("r0", "r1", "r2")
    assert m.state.replicas["r2"].num_passed_over == 0


def test_another_content_than_the_pools_is_refused() -> None:
    why = "the pool serves base@1 of another content than the delta is from"
    assert _refusal(_pool(r1={}), send_plan=_plan(b"\2" * 8)) == why
    assert _refusal(_pool(r1={}), layout=OTHER_LAYOUT) == why


def test_of_base_0_or_a_content_that_is_not_known_there_is_no_taker() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    assert not _takers(m)
    assert _refusal(m) == "the pool serves base@0, which was not pushed"
    m = _pool()
    m.state = dataclasses.replace(m.state, base_contents={})
    assert not _takers(m)
    assert _refusal(m) == "the content of base@1 is not known"


def test_a_push_of_which_all_can_take_the_delta_by_its_turn_sends_nobody_all() -> None:
    m = _pool(r1={"retained": (1,)})
    assert m.transfer(_mixed(m)).sent_whole == ()


# -- who is lost for what -------------------------------------------------------------


@pytest.mark.parametrize("reason", ["DELTA_REFUSED", "DIGEST_MISMATCH", "STAGING_FULL"])
def test_a_taker_that_cannot_apply_the_delta_ends_it_and_nobody_is_lost(reason: str) -> None:
    m = _pool(r1={})
    ticket, waiter = _staging(m)
    m.do(events.RankFailed(m.transfer(ticket).group_id, f"t{ticket}", 1, reason, "it is not it"))
    error = m.error(waiter)
    assert (error.reason, error.metadata) == ("DELTA_REFUSED", {"member": "r0", "cause": reason})
    assert m.transfer(m.begin("base")).targets == ("r0", "r1")


@pytest.mark.parametrize("reason", ["DIGEST_MISMATCH", "STAGING_FULL", "INTERNAL"])
def test_one_that_is_sent_all_elements_fails_as_in_any_push(reason: str) -> None:
    m = _pool(r1={})
    ticket, _ = _staging(m, min_replicas=1)
    m.do(events.RankFailed(m.transfer(ticket).group_id, f"t{ticket}", 2, reason, "it is not it"))
    transfer = m.transfer(ticket)
    assert (transfer.phase, transfer.targets, transfer.lost) == (Phase.FORMING, ("r0",), ("r1",))
    assert transfer.sent_whole == ()


def test_once_one_loads_in_place_a_taker_that_cannot_apply_the_delta_is_lost() -> None:
    """The push goes on: without it the weights there would stay mixed."""
    m = _pool(r1={"loads_in_place": True})
    ticket, _ = _staging(m)
    group_id = m.transfer(ticket).group_id
    m.do(events.RankLoadDue(group_id, f"t{ticket}", 2))
    assert m.transfer(ticket).loading == {"r1"}
    m.do(events.RankFailed(group_id, f"t{ticket}", 1, "DIGEST_MISMATCH", "it is not it"))
    transfer = m.transfer(ticket)
    assert (transfer.phase, transfer.targets, transfer.lost) == (Phase.FORMING, ("r1",), ("r0",))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("wrong", [1, 2])
def test_both_ways_must_make_the_content_that_the_sender_says(
    order: tuple[int, ...], wrong: int
) -> None:
    m = _pool(r1={})
    ticket, waiter = _staging(m, min_replicas=1)
    for rank in order:
        m.stage(ticket, rank, OTHER if rank == wrong else DIGEST)
    assert m.transfer(ticket).content_digest is None
    if wrong == 1:  # the delta's
        assert m.error(waiter).metadata == {"member": "r0", "cause": "DIGEST_MISMATCH"}
    else:
        assert m.transfer(ticket).lost == ("r1",)
