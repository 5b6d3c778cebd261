"""Copies of the base that are pinned: none is dropped once an operator was told so."""

from __future__ import annotations

from tests.unit.coordinator.decisions.machine import LAYOUT, Machine
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.transfer import TransferIds
from weft_rl.coordinator.decisions.state.values import Phase


def _pushed(times: int, *replica_ids: str) -> Machine:
    m = Machine().pool(*(replica_ids or ("r0",)))
    m.base_copies = 2
    m.acquire("base")
    for _ in range(times):
        m.run_to(Phase.COMMITTED, "base")
    return m


def _pin(m: Machine, version: int, *, pinned: bool = True) -> int:
    ticket = next(m.ids)
    record = m.record(PolicyVersion("base", version))
    m.do(events.Pin(ticket, PolicyVersion("base", version), pinned, record))
    return ticket


def _obey(m: Machine, replica_id: str, *versions: int, num_bytes: int = 0) -> tuple[int, ...]:
    """A heartbeat of a replica that obeys these pins; returns what it is to obey."""
    answer = m.beat(
        replica_id,
        retained_base_versions=m.state.replicas[replica_id].retained,
        pinned_base_versions=frozenset(versions),
        pinned_base_bytes=num_bytes,
    )
    m.check_fits()
    return answer.pinned_base_versions


def test_a_base_waits_until_every_replica_obeys_the_pins() -> None:
    m = _pushed(2, "r0", "r1")
    m.answer(_pin(m, 1))
    ticket = m.begin("base")
    assert m.transfer(ticket).waits_for == "r0, r1 to hear what is pinned"
    assert _obey(m, "r0") == (1,)
    assert _obey(m, "r0", 1) == (1,)
    assert m.transfer(ticket).phase is Phase.WAITING
    _obey(m, "r1", 1)
    assert m.transfer(ticket).phase is Phase.FORMING


def test_an_adapter_does_not_wait_for_pins() -> None:
    m = _pushed(1)
    m.answer(_pin(m, 1))
    m.acquire("math")
    waiting = m.begin("base")
    m.run_to(Phase.COMMITTED)
    assert m.transfer(waiting).phase is Phase.WAITING


def test_a_push_that_hears_of_pins_too_late_says_so() -> None:
    m = _pushed(1)
    m.answer(_pin(m, 1))
    ticket = m.begin("base", timeout=5.0)
    m.pass_time(6.0)
    assert "hear what is pinned" in m.error(ticket).message


def test_what_is_let_go_is_waited_for_by_nobody() -> None:
    m = _pushed(1)
    m.answer(_pin(m, 1))
    m.answer(_pin(m, 1, pinned=False))
    m.run_to(Phase.COMMITTED, "base")
    m.answer(_pin(m, 1, pinned=False))
    assert _obey(m, "r0") == ()


def test_a_clone_and_a_rollback_wait_as_well() -> None:
    m = _pushed(2, "r0")
    m.answer(_pin(m, 1))
    m.register("r1")
    m.pass_time(0.5)
    (clone,) = m.answer_look_ups()
    assert m.transfer(clone).phase is Phase.WAITING
    _obey(m, "r1", 1)
    assert m.transfer(clone).phase is Phase.FORMING
    m.finish(clone)
    m.do(events.Leave(0, "r1", "i1"))
    ids = TransferIds("t-back", 1, "g", "token", "secret")
    record = m.record(PolicyVersion("base", 1))
    m.do(events.Rollback(next(m.ids), "base", 1, ids, m.now + 60, record))
    assert m.state.transfers["t-back"].phase is Phase.WAITING
    _obey(m, "r0", 1)
    assert m.state.transfers["t-back"].phase is Phase.COMMITTING


def test_a_push_without_room_beside_the_pins_is_refused() -> None:
    m = _pushed(2)
    m.answer(_pin(m, 1))
    room = m.state.replicas["r0"].capabilities.staging_capacity_bytes
    _obey(m, "r0", 1, num_bytes=room - LAYOUT.wire_bytes + 1)
    error = m.error(m.begin("base"))
    assert (error.reason, error.metadata["replica"]) == ("STAGING_FULL", "r0")
    assert "held by base@1 that are pinned" in error.message
    _obey(m, "r0", 1, num_bytes=room - LAYOUT.wire_bytes)
    m.run_to(Phase.COMMITTED, "base")


def test_what_cannot_be_pinned() -> None:
    m = _pushed(3)  # and two copies are retained
    assert m.error(_pin(m, 1)).reason == "NOT_RETAINED"
    assert m.error(_pin(m, 7)).reason == "VERSION_UNKNOWN"
    ticket = m.run_to(Phase.STAGING, "base")
    assert m.error(_pin(m, 2)).reason == "TRANSFER_UNDER_WAY"
    m.stage_all(ticket)
    assert m.error(_pin(m, 2)).reason == "TRANSFER_UNDER_WAY"
    m.answer_commits(ticket)
    m.answer(_pin(m, 3))


def test_the_weights_that_replicas_start_with_have_no_copy() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    assert m.error(_pin(m, 0)).reason == "NOT_RETAINED"
    assert m.state.replicas["r0"].vector == VersionVector()


def test_pins_are_announced() -> None:
    m = _pushed(3)
    for pinned in (True, True, False):  # the second changes nothing
        _pin(m, 2, pinned=pinned)
    kinds = [e.kind for e in m.ever(effects.Announce) if e.subject == "base@2"]
    assert kinds[-2:] == ["version_pinned", "version_unpinned"]
