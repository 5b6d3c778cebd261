"""The JSON that a page polls: whole at first, then what has changed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.http import request
from tests.unit.coordinator.decisions.machine import LOAD_FAILED
from tests.unit.coordinator.page.pool import COORDINATOR, Watched, watched
from weft_rl.contract.names import VersionVector
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.event_kinds import TOPICS
from weft_rl.coordinator.decisions.state.replica import OutOfService
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState
from weft_rl.coordinator.page import document
from weft_rl.coordinator.page.document import Document


@pytest.fixture(autouse=True)
def _no_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "SAME_ANSWER_SECONDS", 0.0)


class Reader:
    """Polls as a page does."""

    def __init__(self, m: Watched) -> None:
        self.document = Document(
            m.history,
            m.feed,
            "127.0.0.1:50051",
            lambda: m.state,
            lambda: m.now,
            lambda *_: 0,
            lambda: "",
        )
        self.cursor = ""

    def poll(self, query: str | None = None) -> dict[str, Any]:
        asked = f"since={self.cursor}" if query is None else query
        response = self.document(request(query=asked))
        assert response.status_code == 200
        answer: dict[str, Any] = json.loads(response.body)
        self.cursor = answer["cursor"]
        return answer


def _names(answer: dict[str, Any]) -> list[str]:
    return sorted(replica["replica_id"] for replica in answer["replicas"])


def test_a_first_answer_has_all() -> None:
    m = watched("r0", "r1", policies=("math", "base"))
    m.run_to(Phase.COMMITTED)
    under_way = m.run_to(Phase.STAGING, "base")
    answer = Reader(m).poll("")
    assert answer["is_new"]
    assert not answer["is_more"]
    assert answer["coordinator"] == "127.0.0.1:50051"
    assert answer["history"]["began"] == 1e9 + 100.0
    assert answer["pool"]["replica_counts"] == [{"state": "REPLICA_STATE_READY", "num_replicas": 2}]
    assert _names(answer) == ["r0", "r1"]
    assert {p["policy"]: p["lease"]["trainer_id"] for p in answer["policies"]} == {
        "math": "t1", "base": "t1",
    }  # fmt: skip
    (past,) = answer["transfers"]
    assert past["transfer"]["version"] == {"policy": "math", "version": "1"}
    assert answer["members"][str(past["served_by"])] == ["r0", "r1"]
    (now,) = answer["under_way"]
    assert (now["transfer"]["transfer_id"], now["num_targets"]) == (f"t{under_way}", 2)
    assert {mark["replica_id"] for mark in answer["marks"]} == {"r0", "r1"}
    assert answer["events"][-1]["kind"] == "EVENT_KIND_TRANSFER_BEGUN"


def test_the_next_answers_have_what_has_changed() -> None:
    m = watched("r0", "r1")
    m.run_to(Phase.COMMITTED)
    reader = Reader(m)
    reader.poll()
    m.pass_time(3.0)
    quiet = reader.poll()
    for listed in ("replicas", "policies", "transfers", "repairs", "marks", "events", "members"):
        assert not quiet[listed], f"heartbeats and renewals are no change of {listed}"
    assert not quiet["is_new"]
    m.finish(m.begin())
    answer = reader.poll()
    assert [past["transfer"]["version"]["version"] for past in answer["transfers"]] == ["2"]
    assert not answer["members"], "they are known"
    assert _names(answer) == ["r0", "r1"], "what they serve has changed"
    assert [p["served_version"] for p in answer["policies"]] == ["2"]


def test_replicas_say_why_they_are_not_ready_and_when_they_are_gone() -> None:
    m = watched("r0", "r1")
    reader = Reader(m)
    reader.poll()
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commits(ticket, r1=LOAD_FAILED)
    changed = {r["replica_id"]: r for r in reader.poll()["replicas"]}
    assert changed["r1"]["state"] == "REPLICA_STATE_PENDING_WEIGHTS"
    assert "lacks math@1" in changed["r1"]["state_reason"]
    m.do(events.Leave(1, "r1", "i1"))
    answer = reader.poll()
    assert answer["gone_replicas"] == ["r1"]
    assert answer["num_replicas"] == 1
    assert reader.poll()["gone_replicas"] == []
    m.register("r1", "i2", vector=VersionVector())
    assert _names(reader.poll()) == ["r1"]


def test_what_is_wrong_is_told_and_how_far_a_replica_is_behind() -> None:
    m = watched("r0", "r1")
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    reader = Reader(m)
    answer = reader.poll()
    assert "problems" not in answer["pool"]
    assert not any("differences" in replica for replica in answer["replicas"])
    m.answer_commits(m.run_to(Phase.COMMITTING), r1=LOAD_FAILED)
    answer = reader.poll()
    (problem,) = answer["pool"]["problems"]
    assert (problem["severity"], problem["subject"]) == ("PROBLEM_SEVERITY_ERROR", "r1")
    assert problem["message"].startswith("r1 is pending weights: lacks math@3")
    (behind,) = [r for r in answer["replicas"] if r["replica_id"] == "r1"]
    assert behind["differences"] == [
        {"policy": "math", "version": "2", "pool_version": "3", "num_behind": "1"}
    ]


def test_a_replica_is_sent_again_when_the_pool_leaves_it_behind() -> None:
    m = watched("r0", "r1")
    m.run_to(Phase.COMMITTED)
    order = OutOfService(ReplicaState.QUARANTINED, "new disk")
    m.do(events.TakeOutOfService(900, "r1", order))
    reader = Reader(m)
    reader.poll()
    for number in ("1", "2"):
        m.run_to(Phase.COMMITTED)
        (behind,) = [r for r in reader.poll()["replicas"] if r["replica_id"] == "r1"]
        assert [one["num_behind"] for one in behind["differences"]] == [number]


def test_events_say_what_they_are_about_and_which_story_they_tell() -> None:
    m = watched("r0")
    m.run_to(Phase.COMMITTED)
    told = {e["kind"].removeprefix("EVENT_KIND_"): e for e in Reader(m).poll()["events"]}
    begun, committed = told["TRANSFER_BEGUN"], told["TRANSFER_COMMITTED"]
    assert begun["story"] == committed["story"] == "math@1"
    assert (begun["is_detail"], committed["is_detail"]) == (True, False)
    assert (committed["topic"], committed["tone"]) == ("pushes", "good")
    assert (committed["policy"], committed["version"]) == ("math", "1")
    assert (told["REPLICA_READY"]["topic"], told["REPLICA_READY"]["story"]) == ("replicas", "")


def test_the_page_offers_each_topic() -> None:
    page = (Path(document.__file__).parent / "static" / "index.html").read_text()
    (listed,) = re.findall(r'<select id="topic".*?</select>', page, re.DOTALL)
    assert re.findall(r"<option>(\w+)</option>", listed) == [*TOPICS]


def test_who_missed_too_much_of_what_is_gone_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_GONE", 1)
    m = watched("r0", "r1", "r2")
    reader = Reader(m)
    cursor = reader.poll()["cursor"]
    for i, name in enumerate(("r1", "r2")):
        m.do(events.Leave(i, name, "i1"))
    answer = reader.poll()
    assert answer["is_new"]
    assert _names(answer) == ["r0"]
    assert cursor != answer["cursor"]


def test_a_cursor_of_another_coordinator_begins_anew_and_nonsense_is_refused() -> None:
    m = watched("r0")
    reader = Reader(m)
    reader.poll()
    reader.cursor = reader.cursor.replace(COORDINATOR, "beef")
    assert reader.poll()["is_new"]
    for nonsense in ("1", f"{COORDINATOR}.1.1.1", f"{COORDINATOR}.-1.0.0.0", "../../etc/passwd"):
        assert reader.document(request(query=f"since={nonsense}")).status_code == 400


def test_a_long_history_comes_in_pieces_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    m = watched("r0")
    for _ in range(12):
        m.run_to(Phase.COMMITTED)
    whole = Reader(m).poll()
    monkeypatch.setattr(document, "MAX_BYTES", 2000)
    reader = Reader(m)
    pieces = [reader.poll()]
    while pieces[-1]["is_more"]:
        pieces.append(reader.poll())
    assert len(pieces) > 3
    assert [piece["is_new"] for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    for listed in ("transfers", "marks", "events"):
        assert [entry for piece in pieces for entry in piece[listed]] == whole[listed]
    named = {number for piece in pieces for number in piece["members"]}
    assert named == whole["members"].keys()


def test_who_asks_the_same_at_once_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    m = watched("r0")
    reader = Reader(m)
    monkeypatch.setattr(document, "SAME_ANSWER_SECONDS", 60.0)
    first = reader.poll("")
    m.run_to(Phase.COMMITTED)
    assert reader.poll("") == first
    for number in range(20):
        assert reader.poll(f"since={COORDINATOR}.0.{number}.0.0")["transfers"]
    assert len(reader.document._made) <= 8
    assert reader.poll("")["transfers"], "it was forgotten"


def test_a_large_pool_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "LOOK_SECONDS", 0.0)
    names = [f"r{i}" for i in range(5)]
    m = watched(*names)
    reader = Reader(m)
    seen, answers = list[str](), 0
    while True:
        answer = reader.poll()
        seen += _names(answer)
        answers += 1
        if not answer["is_more"]:
            break
    assert sorted(seen) == names
    assert answers == 5, "one a look"
    m.pass_time(1.0)
    for _ in range(12):
        assert not reader.poll()["is_more"], "nothing has changed in what was looked at"


def test_what_is_older_than_an_hour_is_only_what_replicas_were_before() -> None:
    m = watched("r0", "r1")
    for i in range(3):
        m.pass_time(8.0, beats=False)
        m.register("r0", f"process-{i}")
    m.now += 4000.0
    m.register("r0", "last")
    marks = Reader(m).poll()["marks"]
    assert [(mark["replica_id"], mark["time"] > 1e9 + 4000) for mark in marks] == [
        ("r1", False), ("r0", False), ("r0", True),
    ]  # fmt: skip
