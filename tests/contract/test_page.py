"""The page and its JSON over a real coordinator's port: who may read them, and what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Pool
from tests.contract.test_metrics import (
    ACCESS,
    ON_LOOPBACK,
    TOKEN,
    TRAINERS,
    basic,
    port_of,
    watched,
)
from tests.doubles.http import ask
from tests.doubles.replicas import FakeReplica
from weft_rl.coordinator.page import pages
from weft_rl.rpc.codec import as_dict

LISTS = ("replicas", "policies", "transfers", "events")
STATIC = Path(pages.__file__).parent / "static"


@pytest.fixture(autouse=True)
def _no_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer tells what is so now."""
    monkeypatch.setattr(pages, "SAME_ANSWER_SECONDS", 0.0)


async def _listed(pool: Pool, name: str) -> dict[str, Any]:
    answer = await ask(port_of(pool), f"/v1/{name}.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    told: dict[str, Any] = json.loads(answer.body)
    return told


async def test_what_a_push_did_is_told_as_the_service_tells_it(tmp_path: Path) -> None:
    async with watched(tmp_path) as pool:
        await pool.replica("r0")
        await pool.replica("r1")
        trainer = await pool.trainer()
        pushed = await trainer.push()
        told, seen = await _listed(pool, "pool"), as_dict(await pool.seen())
        assert told["listen"] == pool.target
        (past,) = (await _listed(pool, "transfers"))["transfers"]
        assert past == as_dict(pushed)
        assert past == told["last_transfer"]
        assert past["serving_replica_ids"] == ["r0", "r1"]
        for replica in (*told["replicas"], *seen["replicas"]):
            for name in ("since_heartbeat", "version_vector", "version_vector_index"):
                replica.pop(name, None)
            replica["report"].pop("adapter_used_bytes", None)
        for policy in (*told["policies"], *seen["policies"]):
            del policy["lease"]["time_to_live"]
        for name in ("replicas", "policies", "replica_counts", "pool_id"):
            assert told[name] == seen[name]
        kinds = [event["kind"] for event in (await _listed(pool, "events"))["events"]]
        assert "EVENT_KIND_TRANSFER_COMMITTED" in kinds


async def test_a_pause_is_told_of_each_replica(tmp_path: Path) -> None:
    async with watched(tmp_path) as pool:
        replicas: list[FakeReplica] = [await pool.replica("r0"), await pool.replica("r1")]
        trainer = await pool.trainer(policy="base")
        await trainer.push()
        (past,) = (await _listed(pool, "transfers"))["transfers"]
        pauses = {one["replica_id"]: one["pause"] for one in past["pauses"]}
        assert pauses.keys() == {replica.replica_id for replica in replicas}
        assert max(pauses.values()) == past["pause"]


async def test_a_restarted_coordinator_is_another_one_and_numbers_events_anew(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as pool:
        await pool.replica("r0")
        await (await pool.trainer()).push()
        told = await _listed(pool, "pool")
        await pool.restart(telemetry=ON_LOOPBACK)
        after = await _listed(pool, "pool")
        assert after["coordinator_generation"] != told["coordinator_generation"]
        assert "last_transfer" not in after
        started = [
            event
            for event in (await _listed(pool, "events"))["events"]
            if event["kind"] == "EVENT_KIND_COORDINATOR_STARTED"
        ]
        assert [event["subject"] for event in started] == ["generation 2", "generation 1"]


async def test_files_come_with_a_policy_that_lets_nothing_else_in(tmp_path: Path) -> None:
    async with watched(tmp_path) as pool:
        index = await ask(port_of(pool), "/")
        assert index.status == 200
        wanted = re.findall(r'(?:src|href)="(page/[^"]+)"', index.body.decode())
        assert {"page/main.js", "page/style.css"} <= set(wanted)
        for name in sorted(file.name for file in STATIC.iterdir() if file.name != "index.html"):
            answer = await ask(port_of(pool), f"/page/{name}")
            assert answer.body == (STATIC / name).read_bytes()
            allowed = answer.headers["content-security-policy"]
            assert "default-src 'none'" in allowed
            assert "script-src 'self'" in allowed
            assert "unsafe" not in allowed
        for path in ("/page/", "/page/../site.py", "/page/main.js/", "/index.html"):
            assert (await ask(port_of(pool), path)).status == 404
        for query in ("page_size=x", "x=1", "&".join("abcdefghijk"), "page_token=1%00"):
            assert (await ask(port_of(pool), f"/v1/events.json?{query}")).status == 400


def test_files_ask_for_nothing_from_elsewhere_and_make_no_markup_of_text() -> None:
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\bimport\(|url\(", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        assert not re.search(r"\son\w+=|style=", text) or file.suffix != ".html", file.name


async def test_page_and_json_are_for_who_may_inspect(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(ACCESS)
    async with watched(tmp_path, access=tmp_path / "access.toml") as pool:
        lists = [f"/v1/{name}.json" for name in ("pool", *LISTS)]
        for path in ("/", *lists, "/page/main.js"):
            refused = await ask(port_of(pool), path)
            assert refused.status == 401
            assert refused.headers["www-authenticate"].startswith("Basic ")
            for password, status in ((TRAINERS, 403), (TOKEN, 200)):
                answer = await ask(port_of(pool), path, headers=basic(password))
                assert answer.status == status
        assert (await ask(port_of(pool), "/metrics")).status == 200
        assert (await ask(port_of(pool), "/healthz")).status == 200
