"""The lists that a page asks for, as JSON: what they tell, in pages, and whom they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from google.protobuf.json_format import ParseDict

from tests.doubles.http import request
from tests.unit.coordinator.decisions.machine import GONE, LAYOUT, LOAD_FAILED
from tests.unit.coordinator.page.pool import Watched, watched
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.effects import EventKind
from weft_rl.coordinator.decisions.state.event_kinds import TOPICS
from weft_rl.coordinator.decisions.state.values import Phase
from weft_rl.coordinator.page import pages as page
from weft_rl.coordinator.page.pages import JsonList
from weft_rl.v1 import inspect_pb2

STATIC = Path(page.__file__).parent / "static"


@pytest.fixture(autouse=True)
def _no_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SAME_ANSWER_SECONDS", 0.0)


def _ask(m: Watched, name: str, **query: object) -> dict[str, Any]:
    response = JsonList(name, m.lists.by_name[name])(request(query=urlencode(query)))
    assert (response.status_code, response.media_type) == (200, "application/json")
    answer: dict[str, Any] = json.loads(response.body)
    return answer


def _last(m: Watched) -> dict[str, Any]:
    last: dict[str, Any] = _ask(m, "transfers")["transfers"][0]
    return last


def test_each_list_is_the_message_of_its_method() -> None:
    m = watched("r0", "r1", policies=("math", "base"))
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.STAGING, "base")
    pool = _ask(m, "pool")
    assert pool["listen"] == "127.0.0.1:50051"
    assert pool["replica_counts"] == [{"state": "REPLICA_STATE_READY", "num_replicas": 2}]
    (under_way,) = pool["active_transfers"]
    assert under_way["state"] == "TRANSFER_STATE_STAGING"
    assert pool["last_transfer"]["version"] == {"policy": "math", "version": "1"}
    types = {
        "pool": inspect_pb2.GetPoolResponse,
        "replicas": inspect_pb2.ListReplicasResponse,
        "policies": inspect_pb2.ListPoliciesResponse,
        "transfers": inspect_pb2.ListTransfersResponse,
        "events": inspect_pb2.ListEventsResponse,
    }
    for name in m.lists.by_name:
        told = _ask(m, name)
        assert ParseDict(told, types[name]()).ByteSize()
        assert name == "pool" or told[name]
    for listed in ("replicas", "policies"):
        assert _ask(m, listed)[listed] == pool[listed]
    assert [_ask(m, "transfers")["transfers"][i] for i in (0, 1)] == [
        under_way, pool["last_transfer"],
    ]  # fmt: skip


def test_replicas_refer_to_what_they_serve_which_is_told_once() -> None:
    told = _ask(watched("r0", "r1"), "pool")
    assert [replica["version_vector_index"] for replica in told["replicas"]] == [0, 0]
    assert len(told["version_vectors"]) == 1


def test_a_long_list_comes_in_pages_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    m = watched("r0", "r1", "r2", policies=("math", "code"))
    for _ in range(3):
        m.run_to(Phase.COMMITTED)
    smallest = {name: type(most)(page_size=1) for name, most in page._REQUESTS.items()}
    whole = {name: _ask(m, name)[name] for name in ("replicas", "policies", "transfers", "events")}
    for size in (2, 100):
        pieces = [_ask(m, "events", page_size=size)]
        while token := pieces[-1].get("next_page_token"):
            pieces.append(_ask(m, "events", page_size=size, page_token=token))
        assert [entry for piece in pieces for entry in piece["events"]] == whole["events"]
        assert all(len(piece["events"]) <= size for piece in pieces)
    monkeypatch.setattr(page, "_REQUESTS", smallest)
    pool = _ask(m, "pool", page_size=50)
    assert (len(pool["replicas"]), len(pool["policies"])) == (1, 1), "no more than a page has"
    for name in ("replicas", "policies", "transfers"):
        found, token = list[Any](), ""
        while True:
            piece = _ask(m, name, page_size=50, page_token=token)
            assert len(piece[name]) == 1
            found += piece[name]
            if not (token := piece.get("next_page_token", "")):
                break
        assert len(found) == len(whole[name]) > 1


@pytest.mark.parametrize(
    "query",
    ["x=1", "page_size=x", "page_size=-1", "page_size=" + "9" * 5000, "page_token=" + "1" * 5000,
     "page_token=%00", "page_token=../../etc/passwd", "&".join("abcdefghijk")],
)  # fmt: skip
def test_nonsense_is_refused(query: str) -> None:
    m = watched("r0")
    assert JsonList("events", m.lists.list_events)(request(query=query)).status_code == 400


def test_who_asks_the_same_at_once_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SAME_ANSWER_SECONDS", 60.0)
    m = watched("r0")
    answers = JsonList("transfers", m.lists.list_transfers)
    first = answers(request()).body
    m.run_to(Phase.COMMITTED)
    assert answers(request()).body == first
    for size in range(1, 20):
        assert answers(request(query=f"page_size={size}")).body != first
    assert len(answers._made) <= 8
    assert answers(request()).body != first, "it was forgotten"


# -- what the page draws of it -----------------------------------------------------------------


def test_what_is_wrong_is_told_and_how_far_a_replica_is_behind() -> None:
    m = watched("r0", "r1")
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    pool = _ask(m, "pool")
    assert "problems" not in pool
    assert not any("differences" in replica for replica in pool["replicas"])
    m.answer_commits(m.run_to(Phase.COMMITTING), r1=LOAD_FAILED)
    pool = _ask(m, "pool")
    (problem,) = pool["problems"]
    assert (problem["severity"], problem["subject"]) == ("PROBLEM_SEVERITY_ERROR", "r1")
    assert problem["message"].startswith("r1 is pending weights: lacks math@3")
    assert pool["replicas"][1]["state"] == "REPLICA_STATE_PENDING_WEIGHTS"
    assert pool["replicas"][1]["differences"] == [
        {"policy": "math", "version": "2", "pool_version": "3", "num_behind": "1"}
    ]
    last = pool["last_transfer"]
    assert (last["replica_ids"], last["serving_replica_ids"]) == (["r0", "r1"], ["r0"])
    assert [(one["replica_id"], one["reason"]) for one in last["refusals"]] == [
        ("r1", "LOAD_FAILED")
    ]


def test_a_push_is_told_with_its_times_and_its_pauses() -> None:
    m = watched("r0", "r1", policies=("base",))
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
    past = _last(m)
    assert (past["forming"], past["staging"], past["committing"]) == ("0.500s", "2s", "1s")
    assert (past["pause"], past["backend"], past["waiting"]) == ("0.500s", "gloo", "0s")
    assert past["total_bytes"] == str(LAYOUT.total_bytes)
    assert past["pauses"] == [
        {"replica_id": "r0", "pause": "0.500s", "resumed_after": "0.750s"},
        {"replica_id": "r1", "pause": "0.500s", "resumed_after": "1s"},
    ]
    assert "replaced_version" not in past
    m.run_to(Phase.COMMITTED, "base")
    assert _last(m)["replaced_version"] == "1"


def test_pauses_of_many_replicas_are_told_by_the_longest() -> None:
    m = watched(*(f"r{i}" for i in range(65)), policies=("base",))
    m.run_to(Phase.COMMITTED, "base")
    assert "pauses" not in _last(m)
    assert _last(m)["pause"] == "0.500s"


def test_a_push_that_waits_says_for_what_and_then_how_long_it_did() -> None:
    m = watched("r0", policies=("math", "code"))
    first, second = m.begin("math"), m.begin("code")
    assert [one.get("waits_for") for one in _ask(m, "pool")["active_transfers"]] == [
        None, "its turn",
    ]  # fmt: skip
    m.now += 3.0
    m.finish(first)
    m.finish(second)
    assert (_last(m)["waiting"], _last(m).get("waits_for")) == ("3s", None)


def test_a_push_that_is_given_up_says_why() -> None:
    m = watched("r0")
    ticket = m.begin()
    m.do(events.JoinAnswered(f"t{ticket}", "r0", GONE))
    assert _last(m)["failure"]["reason"] == GONE.reason
    assert "committing" not in _last(m)


def test_a_rollback_has_no_staging_and_a_clone_names_its_replica() -> None:
    m = watched("r0", policies=("base",))
    m.base_copies = 2
    for _ in range(2):
        m.run_to(Phase.COMMITTED, "base")
    m.answer_commits(m.roll_back("base", 1))
    assert _last(m)["purpose"] == "TRANSFER_PURPOSE_ROLLBACK"
    assert "staging" not in _last(m)
    assert _last(m)["committing"]
    m.register("r1")
    m.do(events.Tick())
    for clone in m.answer_look_ups():
        m.finish(clone)
    assert (_last(m)["purpose"], _last(m)["replica_ids"]) == ("TRANSFER_PURPOSE_CLONE", ["r1"])


def test_events_say_what_they_are_about_and_which_story_they_tell() -> None:
    m = watched("r0")
    m.run_to(Phase.COMMITTED)
    m.answer_commits(m.run_to(Phase.COMMITTING), r0=LOAD_FAILED)
    told = {e["kind"].removeprefix("EVENT_KIND_"): e for e in _ask(m, "events")["events"]}
    begun, committed = told["TRANSFER_BEGUN"], told["TRANSFER_COMMITTED"]
    assert (begun["story"], committed["story"]) == ("math@1", "math@1")
    assert (begun.get("detail"), committed.get("detail")) == (True, None)
    assert (committed["topic"], committed["outcome"]) == ("pushes", "EVENT_OUTCOME_SUCCESS")
    assert (committed["policy"], committed["version"]) == ("math", "1")
    ready, failed = told["REPLICA_READY"], told["VERSION_FAILED"]
    assert (ready["topic"], ready.get("story")) == ("replicas", None)
    assert failed["outcome"] == "EVENT_OUTCOME_FAILURE"
    assert "outcome" not in begun
    revisions = [int(event["revision"]) for event in _ask(m, "events")["events"]]
    assert revisions == [*range(len(revisions), 0, -1)]


def test_the_page_offers_each_topic_and_knows_each_state_that_events_tell() -> None:
    (listed,) = re.findall(
        r'<select id="topic".*?</select>', (STATIC / "index.html").read_text(), re.DOTALL
    )
    assert re.findall(r"<option>(\w+)</option>", listed) == [*TOPICS]
    (states,) = re.findall(r"const STATES = {(.*?)}", (STATIC / "pool.js").read_text(), re.DOTALL)
    told = {kind.name for kind in TOPICS["replicas"] - {EventKind.REPLICA_ANSWERS}}
    assert set(re.findall(r"([A-Z_]+):", states)) == told
