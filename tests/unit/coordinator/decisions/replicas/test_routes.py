"""Which replicas may be sent requests, and when readers are told."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.coordinator.decisions.machine import DIRTY, Machine
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import routes
from weft_rl.coordinator.decisions.state.values import Phase


def _pool(*replica_ids: str) -> Machine:
    m = Machine()
    for replica_id in replica_ids:
        m.register(replica_id, http_url=f"http://{replica_id}")
    m.do(events.ReferenceKnown("f" * 64))
    return m


def _listed(m: Machine) -> list[str]:
    return [f"{r.replica_id} {r.vector.base}" for r in routes(m.state)]


def _told(m: Machine, act: Callable[[], object]) -> list[str] | None:
    """The list if readers were told of one; what they were not told has not changed."""
    before, m.all = _listed(m), []
    act()
    if m.ever(effects.RoutesChanged):
        return _listed(m)
    assert _listed(m) == before
    return None


def test_readers_are_told_of_every_change_and_of_nothing_else() -> None:
    m = _pool("r0", "r1")
    assert _listed(m) == ["r0 0", "r1 0"]
    m.acquire("base")
    assert _told(m, lambda: m.pass_time(1.0)) is None
    ticket = m.begin("base")
    for act in (m.attend_all, m.prepare_all, m.stage_all):
        assert _told(m, lambda act=act: act(ticket)) is None  # type: ignore[misc]
    assert _told(m, lambda: m.answer_commit(ticket, "r0")) == ["r0 1", "r1 0"]
    assert _told(m, lambda: m.answer_commit(ticket, "r1", DIRTY)) == ["r0 1"]


def test_what_is_not_ready_is_not_listed() -> None:
    m = _pool("r0", "r1")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    late = lambda: m.register("r2", http_url="http://r2")  # noqa: E731
    assert _told(m, late) is None  # it lacks base@1
    assert _told(m, lambda: m.do(events.Cordon(1, "r0"))) == ["r1 1"]
    assert _told(m, lambda: m.do(events.Uncordon(2, "r0"))) == ["r0 1", "r1 1"]
    assert _told(m, lambda: m.do(events.Drain(3, "r0", 60.0, ""))) == ["r1 1"]
    assert _told(m, lambda: m.do(events.Leave(4, "r0", "i1"))) is None
    assert _told(m, lambda: m.do(events.Leave(5, "r1", "i1"))) == []


def test_silence_takes_a_replica_off_the_list() -> None:
    m = _pool("r0")
    assert _told(m, lambda: m.pass_time(10.0, beats=False)) == []


def test_a_replica_that_moved_is_told_anew() -> None:
    m = _pool("r0")
    assert _told(m, lambda: m.register("r0", http_url="http://r0")) is None
    assert _told(m, lambda: m.register("r0", http_url="http://r0:2")) == ["r0 0"]
    assert _told(m, lambda: m.register("r0", http_url="")) == []  # nowhere to send to


def test_the_list_is_sorted() -> None:
    m = _pool("b", "c", "a")
    assert [r.replica_id for r in routes(m.state)] == ["a", "b", "c"]
