"""Staged bytes that nobody will commit are dropped, however badly it is heard."""

from __future__ import annotations

from tests.unit.coordinator.decisions.machine import GONE, LOAD_FAILED, Machine
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Phase
from weft_rl.coordinator.decisions.transfers.abort import MAX_DISCARDS, REPEAT_SECONDS


def _begun(phase: Phase) -> tuple[Machine, int]:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    return m, m.run_to(phase)


def _abort(m: Machine, ticket: int) -> None:
    m.do(events.AbortTransfer(0, f"t{ticket}", "math", m.tokens["math"], "no more"))


def _discards(found: list[effects.CallDiscard]) -> set[tuple[str, str]]:
    return {(call.replica_id, call.transfer_id) for call in found}


def test_replicas_that_did_not_switch_drop_what_they_staged() -> None:
    m, ticket = _begun(Phase.COMMITTING)
    m.answer_commits(ticket, r1=GONE)
    assert _discards(m.ever(effects.CallDiscard)) == {("r1", f"t{ticket}")}


def test_so_do_all_of_a_commit_that_is_undone() -> None:
    m, ticket = _begun(Phase.COMMITTING)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    assert _discards(m.ever(effects.CallDiscard)) == {
        ("r0", f"t{ticket}"),
        ("r1", f"t{ticket}"),
    }


def test_an_order_is_repeated_until_it_is_answered() -> None:
    m, ticket = _begun(Phase.STAGING)
    _abort(m, ticket)
    m.answer_discard(ticket, "r0")
    m.all.clear()
    m.pass_time(20)
    calls = m.ever(effects.CallDiscard)
    assert _discards(calls) == {("r1", f"t{ticket}")}
    assert 3 <= len(calls) <= 4
    m.answer_discard(ticket, "r1")
    m.answer_discard(ticket, "r1")
    m.all.clear()
    m.pass_time(20)
    assert not m.ever(effects.CallDiscard)
    assert not m.state.discards


def test_an_order_is_not_repeated_before_its_call_has_had_its_time() -> None:
    m, ticket = _begun(Phase.STAGING)
    _abort(m, ticket)
    m.all.clear()
    m.pass_time(REPEAT_SECONDS - 0.25)
    assert not m.ever(effects.CallDiscard)
    m.pass_time(0.75)
    assert len(m.ever(effects.CallDiscard)) == 2


def test_nor_is_one_that_comes_while_older_ones_wait() -> None:
    m, ticket = _begun(Phase.STAGING)
    _abort(m, ticket)
    m.pass_time(REPEAT_SECONDS - 2)
    later = m.run_to(Phase.STAGING)
    _abort(m, later)
    m.all.clear()
    m.pass_time(3)
    assert {t for _, t in _discards(m.ever(effects.CallDiscard))} == {f"t{ticket}"}
    m.pass_time(REPEAT_SECONDS)
    assert {t for _, t in _discards(m.ever(effects.CallDiscard))} == {f"t{ticket}", f"t{later}"}


def test_nor_is_one_that_was_given_at_a_registration() -> None:
    m, ticket = _begun(Phase.STAGING)
    m.pass_time(8 + 2 * REPEAT_SECONDS, beats=False)
    m.register("r0")
    assert _discards(m.found(effects.CallDiscard)) == {("r0", f"t{ticket}")}
    m.all.clear()
    m.pass_time(REPEAT_SECONDS - 0.25)
    assert not m.ever(effects.CallDiscard)
    m.pass_time(0.75)
    assert ("r0", f"t{ticket}") in _discards(m.ever(effects.CallDiscard))


def test_a_replica_that_was_lost_is_told_when_it_is_back() -> None:
    m, ticket = _begun(Phase.STAGING)
    m.pass_time(8, beats=False)
    assert m.state.replicas["r0"].lost
    m.all.clear()
    m.pass_time(10, beats=False)
    assert not m.ever(effects.CallDiscard)
    m.register("r0")
    assert _discards(m.found(effects.CallDiscard)) == {("r0", f"t{ticket}")}


def test_orders_outlive_a_process_that_seems_to_be_replaced() -> None:
    m, ticket = _begun(Phase.STAGING)
    m.pass_time(8, beats=False)
    m.register("r0", "i2")
    assert _discards(m.found(effects.CallDiscard)) == {("r0", f"t{ticket}")}


def test_orders_to_a_replica_that_left_are_forgotten() -> None:
    m, _ = _begun(Phase.STAGING)
    m.do(events.Leave(0, "r0", "i1"))
    m.pass_time(8)
    assert "r0" not in m.state.discards


def test_orders_are_bounded() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    for _ in range(MAX_DISCARDS + 5):
        _abort(m, m.run_to(Phase.STAGING))
    kept = m.state.discards["r0"]
    assert len(kept) == MAX_DISCARDS
    assert kept[-1] == next(reversed(m.state.history))
