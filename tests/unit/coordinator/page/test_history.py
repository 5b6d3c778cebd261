"""What is remembered of a pool, and how much of it."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import GONE, LAYOUT, LOAD_FAILED
from tests.unit.coordinator.page.pool import Watched, watched
from weft_rl.contract.names import VersionVector
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.page import history
from weft_rl.coordinator.page.history import Mark, PastTransfer
from weft_rl.coordinator.runtime.watchers import Log


def _last(m: Watched) -> PastTransfer:
    return m.history.transfers.since()[-1]


def _marks(m: Watched, replica_id: str) -> list[tuple[str, dict[str, int]]]:
    return [
        (mark.state, dict(mark.serves))
        for mark in m.history.marks.since()
        if mark.replica_id == replica_id
    ]


def test_a_push_is_remembered_with_its_times() -> None:
    m = watched("r0", "r1", policies=("base",))
    began = m.state.wall(m.now)
    ticket = m.begin("base", backend="gloo")
    m.now += 0.5
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.now += 2.0
    m.stage_all(ticket)
    m.now += 0.75
    m.answer_commit(ticket, "r0")
    m.now += 0.25
    m.answer_commit(ticket, "r1")
    (past,) = m.history.transfers.since()
    assert past.message.version.version == 1
    assert past.message.begin_time.ToDatetime().timestamp() == pytest.approx(began, abs=1e-3)
    assert past.message.forming.ToTimedelta().total_seconds() == 0.5
    assert past.message.staging.ToTimedelta().total_seconds() == 2.0
    assert past.message.committing.ToTimedelta().total_seconds() == 1.0
    assert past.message.pause.ToTimedelta().total_seconds() == 0.5
    assert past.message.total_bytes == LAYOUT.total_bytes
    assert (past.commit_time, past.end_time) == (began + 2.5, began + 3.5)
    assert (past.kind, past.backend, past.waiting_seconds) == ("base", "gloo", 0.0)
    assert past.targets.replica_ids == past.served_by.replica_ids == ("r0", "r1")
    assert past.pauses == {"r0": (0.75, 0.5), "r1": (1.0, 0.5)}
    rate = m.history.rates["gloo"]
    assert (rate.version, rate.bytes_per_second) == ("base@1", LAYOUT.total_bytes / 2.0)


def test_the_highest_rate_stays() -> None:
    m = watched("r0")
    for seconds in (4.0, 1.0, 2.0):
        ticket = m.run_to(Phase.STAGING)
        m.now += seconds
        m.stage_all(ticket)
        m.answer_commits(ticket)
    (rate,) = m.history.rates.values()
    assert (rate.version, rate.bytes_per_second) == ("math@2", LAYOUT.total_bytes)


def test_a_push_that_waited_for_its_turn_says_how_long() -> None:
    m = watched("r0", policies=("math", "code"))
    first, second = m.begin("math"), m.begin("code")
    m.now += 3.0
    m.finish(first)
    m.finish(second)
    assert [past.waiting_seconds for past in m.history.transfers.since()] == [0.0, 3.0]


def test_what_did_not_switch_is_no_part_of_the_seam_and_says_why() -> None:
    m = watched("r0", "r1")
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commits(ticket, r1=LOAD_FAILED)
    past = _last(m)
    assert past.targets.replica_ids == ("r0", "r1")
    assert past.served_by.replica_ids == ("r0",)
    assert [(r.replica_id, r.reason) for r in past.message.refusals] == [("r1", "LOAD_FAILED")]
    assert past.replaced_version == 0
    m.finish(m.begin())
    assert _last(m).replaced_version == 1


def test_a_push_that_is_given_up_says_why() -> None:
    m = watched("r0")
    ticket = m.begin()
    m.do(events.JoinAnswered(f"t{ticket}", "r0", GONE))
    past = _last(m)
    assert past.message.failure_reason == GONE.reason
    assert past.served_by.replica_ids == ()
    assert m.history.rates == {}


def test_a_rollback_is_a_seam_and_a_clone_is_none() -> None:
    m = watched("r0", policies=("base",))
    m.base_copies = 2
    for _ in range(2):
        m.run_to(Phase.COMMITTED, "base")
    m.answer_commits(m.roll_back("base", 1))
    assert _last(m).message.version.version == 1
    m.register("r1")
    m.do(events.Tick())
    for clone in m.answer_look_ups():
        m.finish(clone)
    assert len(m.history.transfers.since()) == 3
    (repair,) = m.history.repairs.since()
    assert repair.targets.replica_ids == ("r1",)
    assert _marks(m, "r1") == [("pending_weights", {"base": 0}), ("ready", {"base": 1})]


def test_marks_say_what_replicas_are_and_pushes_make_none() -> None:
    m = watched("r0", "r1")
    m.run_to(Phase.COMMITTED)
    assert _marks(m, "r0") == [("ready", {"base": 0})]
    m.pass_time(1.0)
    assert len(_marks(m, "r0")) == 1, "nor do heartbeats"
    m.pass_time(8.0, beats=False)
    assert _marks(m, "r0")[1:] == [("lost", {"base": 0, "math": 1})]
    m.register("r0", "i2", vector=VersionVector())
    assert _marks(m, "r0")[2][1] == {"base": 0}, "it has come back without it"
    m.do(events.Leave(1, "r1", "i1"))
    assert _marks(m, "r1")[-1] == ("lost", {})


def test_a_mark_in_the_midst_of_a_switch_says_which_policy_is_open() -> None:
    m = watched("r0", "r1")
    m.run_to(Phase.COMMITTING)
    m.do(events.DrainReplica(1, "r0", 30.0, "maintenance"))
    mark = m.history.marks.since()[-1]
    assert (mark.replica_id, mark.state, mark.switching) == ("r0", "draining", ("math",))


def test_transfers_with_the_same_replicas_share_them() -> None:
    m = watched("r0", "r1")
    for _ in range(3):
        m.run_to(Phase.COMMITTED)
    first, *others = m.history.transfers.since()
    assert all(past.served_by is first.targets is past.targets for past in others)
    assert first.targets.revision == first.revision


def test_everything_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_TRANSFERS", "MAX_MARKS"):
        monkeypatch.setattr(history, name, 3)
    m = watched("r0")
    for _ in range(9):
        m.run_to(Phase.COMMITTED)
    for i in range(9):
        m.pass_time(8.0, beats=False)
        m.register("r0", f"process-{i}")
    assert len(m.history.transfers.since()) == 3
    assert len(m.history.marks.since()) == 3
    assert set(m.history.older_marks) == {"r0"}
    assert m.history.older_marks["r0"].revision < m.history.marks.since()[0].revision


def test_long_texts_and_many_replicas_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_REASONS", 2)
    monkeypatch.setattr(history, "MAX_PAUSES", 2)
    m = watched("r0", "r1", "r2", "r3", policies=("base",))
    ticket = m.run_to(Phase.COMMITTING, "base")
    refusal = Failure("LOAD_FAILED", "x" * 9000, {"dirty": "false"})
    m.answer_commits(ticket, r0=refusal, r1=refusal, r2=refusal)
    past = _last(m)
    assert [(r.replica_id, len(r.message)) for r in past.message.refusals] == [
        ("r0", 500), ("r1", 500),
    ]  # fmt: skip
    assert past.pauses == {}
    assert past.message.pause.ToTimedelta().total_seconds() == 0.5, "the longest stays"


def test_a_log_keeps_the_newest_and_says_what_it_drops() -> None:
    dropped: list[int] = []
    log = Log[Mark](2, lambda marks: dropped.extend(mark.revision for mark in marks))
    for revision in range(1, 8):
        log.add(
            Mark(revision=revision, time=0.0, replica_id="r0", state="ready", reason="", serves={},
                 switching=())
        )  # fmt: skip
    assert [mark.revision for mark in log.since()] == [6, 7]
    assert [mark.revision for mark in log.since(6)] == [7]
    assert dropped == [1, 2, 3, 4]
