"""The page and its JSON over a real coordinator's port: who may read them, and what they say."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Pool
from tests.doubles.certificates import Authority
from tests.doubles.http import Answer, ask
from tests.doubles.replicas import FakeReplica
from weft_rl.coordinator.page import pages
from weft_rl.rpc.codec import as_dict
from weft_rl.telemetry.config import TelemetryConfig

ON_LOOPBACK = TelemetryConfig(metrics="127.0.0.1:0")
TOKEN, TRAINERS = "a-token-of-32-characters-or-more", "another-token-of-32-characters"
ACCESS = f"""
[[identity]]
name = "people"
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
roles = ["inspect"]

[[identity]]
name = "trainer"
token_sha256 = "{hashlib.sha256(TRAINERS.encode()).hexdigest()}"
roles = ["publish"]
policies = ["*"]
"""
LISTS = ("replicas", "policies", "transfers", "events")
STATIC = Path(pages.__file__).parent / "static"


@pytest.fixture(autouse=True)
def _no_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer tells what is so now."""
    monkeypatch.setattr(pages, "SAME_ANSWER_SECONDS", 0.0)


@asynccontextmanager
async def _pool(folder: Path, **options: Any) -> AsyncIterator[Pool]:
    pool = Pool(folder / "catalog.db")
    await pool.start(**{"telemetry": ON_LOOPBACK, **options})
    try:
        yield pool
    finally:
        await pool.stop()


def _port(pool: Pool) -> int:
    assert pool.coordinator is not None
    return pool.coordinator.ports.metrics_port


async def _listed(pool: Pool, name: str) -> dict[str, Any]:
    answer = await ask(_port(pool), f"/v1/{name}.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    told: dict[str, Any] = json.loads(answer.body)
    return told


async def test_what_a_push_did_is_told_as_the_service_tells_it(tmp_path: Path) -> None:
    async with _pool(tmp_path) as pool:
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
    async with _pool(tmp_path) as pool:
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
    async with _pool(tmp_path) as pool:
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
    async with _pool(tmp_path) as pool:
        index = await ask(_port(pool), "/")
        assert index.status == 200
        wanted = re.findall(r'(?:src|href)="(page/[^"]+)"', index.body.decode())
        assert {"page/main.js", "page/style.css"} <= set(wanted)
        for name in sorted(file.name for file in STATIC.iterdir() if file.name != "index.html"):
            answer = await ask(_port(pool), f"/page/{name}")
            assert answer.body == (STATIC / name).read_bytes()
            allowed = answer.headers["content-security-policy"]
            assert "default-src 'none'" in allowed
            assert "script-src 'self'" in allowed
            assert "unsafe" not in allowed
        for path in ("/page/", "/page/../site.py", "/page/main.js/", "/index.html"):
            assert (await ask(_port(pool), path)).status == 404
        for query in ("page_size=x", "x=1", "&".join("abcdefghijk"), "page_token=1%00"):
            assert (await ask(_port(pool), f"/v1/events.json?{query}")).status == 400


def test_files_ask_for_nothing_from_elsewhere_and_make_no_markup_of_text() -> None:
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\bimport\(|url\(", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        assert not re.search(r"\son\w+=|style=", text) or file.suffix != ".html", file.name


async def test_page_and_json_are_for_who_may_inspect(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(ACCESS)
    async with _pool(tmp_path, access=tmp_path / "access.toml") as pool:
        lists = [f"/v1/{name}.json" for name in ("pool", *LISTS)]
        for path in ("/", *lists, "/page/main.js"):
            refused = await _ask(pool, path)
            assert refused.status == 401
            assert refused.headers["www-authenticate"].startswith("Basic ")
            assert (await _ask(pool, path, TRAINERS)).status == 403
            assert (await _ask(pool, path, TOKEN)).status == 200
        assert (await ask(_port(pool), "/metrics")).status == 200
        assert (await ask(_port(pool), "/healthz")).status == 200


async def _ask(pool: Pool, path: str, password: str = "") -> Answer:
    basic = base64.b64encode(f"x:{password}".encode()).decode()
    headers = {"Authorization": f"Basic {basic}"} if password else {}
    return await ask(_port(pool), path, headers=headers)


async def test_a_password_is_taken_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "access.toml").write_text(ACCESS)
    async with _pool(
        tmp_path,
        credentials=authority.credentials("localhost", "127.0.0.1"),
        access=tmp_path / "access.toml",
    ) as pool:
        basic = base64.b64encode(f"x:{TOKEN}".encode()).decode()
        answer = await ask(
            _port(pool),
            "/",
            headers={"Authorization": f"Basic {basic}"},
            tls=ssl.create_default_context(cafile=authority.path),
        )
        assert answer.status == 200


async def test_forty_pages_that_poll_hold_up_no_push(tmp_path: Path) -> None:
    async with _pool(tmp_path, lost_after_seconds=60.0) as pool:
        await pool.replica("r0")
        trainer = await pool.trainer()
        await trainer.push()
        polls = [
            asyncio.ensure_future(_listed(pool, name))
            for _ in range(40)
            for name in ("pool", "transfers")
        ]
        for _ in range(3):
            await trainer.push(timeout=None)
        for told in await asyncio.gather(*polls):
            assert told.get("transfers") or told["last_transfer"]
        assert len((await _listed(pool, "transfers"))["transfers"]) == 4
