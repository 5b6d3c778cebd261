"""The operator's commands against a real coordinator: what they print, for people and for
programs, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest_asyncio

from tests.contract.conftest import Pool
from tests.contract.test_access import TOKEN, TOKEN_ACCESS, Secured
from tests.doubles.certificates import Authority
from weft_rl.cli.doctor import Finding, check_connection, check_own
from weft_rl.rpc.security.credentials import Credentials

_SECONDS = 60.0


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """One that gives nobody up: its replica is not heard while commands start."""
    made = Pool(tmp_path / "weft.db")
    await made.start(lost_after_seconds=600.0)
    yield made
    await made.stop()


class Ended:
    """How a command ended."""

    def __init__(self, code: int | None, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()

    @property
    def facts(self) -> dict[str, Any]:
        """The one object that it printed."""
        (line,) = self.out.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    def finding(self, check: str) -> dict[str, str]:
        """What the doctor says of one thing."""
        (found,) = [f for f in self.facts["findings"] if f["check"] == check]
        return found


async def _begin(*words: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weft_rl", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **environment},
    )  # fmt: skip


async def weft(*words: str, **environment: str) -> Ended:
    process = await _begin(*words, **environment)
    out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    return Ended(process.returncode, out, err)


async def ordered(pool: Pool, *words: str) -> dict[str, Any]:
    """What an order that is carried out says to programs."""
    ended = await weft(*words, "-c", pool.target, "--json")
    assert ended.code == 0, ended.err
    return ended.facts


@asynccontextmanager
async def watching(pool: Pool, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await _begin("watch", "-c", pool.target, *words)
    try:
        async with asyncio.timeout(_SECONDS):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _pushed(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    for _ in range(2):
        await trainer.push()


async def test_versions(pool: Pool) -> None:
    await _pushed(pool)
    listed = (await ordered(pool, "versions", "math"))["versions"]
    assert [v["version"]["version"] for v in listed] == ["2", "1"]
    assert (await ordered(pool, "versions"))["versions"] == listed
    newest = (await ordered(pool, "versions", "math", "--limit", "1"))["versions"]
    assert newest == listed[:1]
    table = (await weft("versions", "-c", pool.target)).out
    assert "math@2" in table
    assert listed[0]["content_digest_hex"][:12] in table
    assert "served" in table
    unknown = await weft("versions", "chess", "-c", pool.target)
    assert (unknown.code, unknown.out) == (1, "")
    assert "POLICY_UNKNOWN" in unknown.err


async def test_versions_say_how_one_goes_back_to_them(pool: Pool) -> None:
    one, other = await pool.replica("r0"), await pool.replica("r1")
    trainer = await pool.trainer(policy="base")
    for _ in range(4):
        await trainer.push()

    async def lines(undoable: list[int], retained: list[int], told: str) -> list[str]:
        for replica in (one, other):
            replica.undoable, replica.retained = undoable, retained
        other.retained = [4, 3]
        deadline = time.monotonic() + 10.0
        while True:  # a heartbeat is believed some time after a commit
            for replica in (one, other):
                await replica.heartbeat()
            found = (await weft("versions", "base", "-c", pool.target)).out.splitlines()
            if told in of(found, "base@3") or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)

    def of(found: list[str], version: str) -> str:
        return next(line for line in found if version in line)

    told = "rollback by retained copies"
    copies = await lines([], [4, 3], told)
    assert told in of(copies, "base@3")
    assert all("rollback" not in of(copies, name) for name in ("base@4", "base@2"))
    assert not any("--staging-memory-gib" in line for line in copies)
    told = "rollback by retained copies, and by undo in place at 1 replica of 2"
    undone = await lines([3, 2], [4], told)
    assert told in of(undone, "base@3")
    assert "rollback by undo in place" in of(undone, "base@2")
    assert "rollback" not in of(undone, "base@1")
    assert sum("--staging-memory-gib" in line for line in undone) == 1
    (base,) = [p for p in (await ordered(pool, "status"))["policies"] if p["policy"] == "base"]
    assert base["rollback_versions"] == [
        {"version": "3", "num_copies": 1, "num_undo": 1},
        {"version": "2", "num_undo": 2},
    ]
    status = (await weft("status", "-c", pool.target)).out
    assert "undo in place: 2 versions, as far as 2" in status


async def test_transfers(pool: Pool) -> None:
    await _pushed(pool)
    listed = (await ordered(pool, "transfers", "--purpose", "push"))["transfers"]
    assert [t["version"]["version"] for t in listed] == ["2", "1"]
    assert await ordered(pool, "transfers", "--purpose", "rollback") == {}
    await ordered(pool, "rollback", "math", "--to", "1")
    (back,) = (await ordered(pool, "transfers", "--purpose", "rollback"))["transfers"]
    assert back["trainer_id"] == "(operator)"
    assert len((await ordered(pool, "transfers", "--limit", "2"))["transfers"]) == 2
    table = (await weft("transfers", "-c", pool.target)).out
    assert all(word in table for word in ("math@2", "push", "rollback", "committed", "r0"))
    assert (await weft("transfers", "--purpose", "x", "-c", pool.target)).code == 2


async def test_orders_say_what_was_done(pool: Pool) -> None:
    await _pushed(pool)
    named = {"policy": "math", "version": "1"}
    assert await ordered(pool, "pin", "math@1") == {"version": named, "pinned": True}
    assert await ordered(pool, "pin", "math@1", "--off") == {"version": named}
    assert await ordered(pool, "retain", "math", "7") == {"policy": "math", "num_versions": 7}
    rolled = await ordered(pool, "rollback", "math", "--to", "1")
    assert (rolled["replaced_version"], rolled["replica_ids"]) == ("2", ["r0"])
    cordon = {"replica_id": "r0", "reason": "new disk"}
    assert await ordered(pool, "cordon", "r0", "--reason", "new disk") == cordon
    assert (await ordered(pool, "uncordon", "r0"))["replica_id"] == "r0"
    assert (await ordered(pool, "base"))["replica_ids"] == ["r0"]
    forgotten = await ordered(pool, "forget", "math", "--force")
    assert forgotten["retired_versions"] == [{**named, "version": n} for n in ("1", "2")]
    (last,) = (await ordered(pool, "transfers", "--limit", "1"))["transfers"]
    for name, reason in ((last["transfer_id"], "ALREADY_COMMITTED"), ("t9", "TRANSFER_UNKNOWN")):
        refused = await weft("cancel", name, "-c", pool.target, "--json")
        assert json.loads(refused.err)["error"]["reason"] == reason
    refused = await weft("cordon", "r9", "-c", pool.target, "--json")
    assert (refused.code, refused.out) == (1, "")
    error = json.loads(refused.err)["error"]
    assert (error["reason"], error["status"]) == ("REPLICA_UNKNOWN", "NOT_FOUND")


async def test_events(pool: Pool) -> None:
    await _pushed(pool)
    ended = await weft("events", "--limit", "2", "-c", pool.target, "--json")
    assert [json.loads(line)["kind"] for line in ended.out.splitlines()] == [
        "EVENT_KIND_TRANSFER_STAGED",
        "EVENT_KIND_TRANSFER_COMMITTED",
    ]
    shown = (await weft("events", "-c", pool.target)).out.splitlines()
    assert "coordinator started  generation 1" in shown[0]
    assert "replica ready  r0" in shown[1] or "lease acquired" in shown[1]
    assert "transfer committed" in shown[-2]
    assert "kept since" in shown[-1]


async def test_events_are_watched_over_a_restart(pool: Pool) -> None:
    port = pool.target.rpartition(":")[2]
    async with watching(pool, "--json") as process:
        assert process.stdout
        assert process.stderr
        first = asyncio.ensure_future(process.stdout.readline())
        while not first.done():  # it may not listen yet
            await pool.trainer(f"trainer-{len(pool.things)}", f"math-{len(pool.things)}")
            await asyncio.wait({first}, timeout=0.5)
        event = json.loads(first.result())
        assert event["kind"] == "EVENT_KIND_LEASE_ACQUIRED"
        assert event["subject"].startswith("math-")
        assert pool.coordinator
        await pool.coordinator.stop()
        assert b"waiting for it" in await process.stderr.readline()
        pool.coordinator.config = replace(pool.coordinator.config, listen=f"127.0.0.1:{port}")
        await pool.coordinator.start()
        assert b"it answers again" in await process.stderr.readline()
        await pool.trainer("another", "chess")
        while True:
            event = json.loads(await process.stdout.readline())
            if (event["kind"], event["subject"]) == ("EVENT_KIND_LEASE_ACQUIRED", "chess"):
                break
        process.send_signal(2)
        assert await process.wait() == 130


async def test_how_commands_end(pool: Pool) -> None:
    assert (await weft("status", "-c", pool.target)).code == 0
    away = await weft("status", "-c", "127.0.0.1:1")
    assert away.code == 3
    assert "weft doctor" in away.err
    assert json.loads((await weft("status", "-c", "127.0.0.1:1", "--json")).err)["error"]
    assert (await weft("status", "-c", "nonsense")).code == 2
    assert (await weft("version", "--json")).facts["protocol_revision"]


async def test_the_doctor_of_a_pool_that_is_well(pool: Pool, tmp_path: Path) -> None:
    await pool.replica()
    ended = await weft(
        "doctor", "-c", pool.target, "--json", "--catalog", str(tmp_path / "weft.db"),
        "--spill-dir", str(tmp_path / "new"), "--data-host", "127.0.0.1",
    )  # fmt: skip
    assert ended.code == 0, ended.out
    assert ended.facts["ok"]
    looked_at = [finding["check"] for finding in ended.facts["findings"]]
    assert looked_at == [
        "dns", "tcp", "tls", "access", "versions", "clock", "pool", "data_host", "interfaces",
        "backends", "gpus", "one_sided_dir", "vllm", "catalog_disk", "spill_disk", "shm", "memory",
    ]  # fmt: skip
    for check in ("access", "versions", "clock"):
        assert ended.finding(check)["level"] == "ok", ended.finding(check)
    shown = await weft("doctor", "-c", pool.target, "--data-host", "192.0.2.77")
    assert shown.code == 1
    assert "192.0.2.77 is no address of this machine" in shown.out
    assert "-> name one" in shown.out


async def examined(target: str, credentials: Credentials) -> dict[str, Finding]:
    """What the doctor finds on the way to a coordinator."""

    def examine() -> dict[str, Finding]:
        return {
            f.check: f for f in (*check_own(credentials), *check_connection(target, credentials))
        }

    return await asyncio.to_thread(examine)


async def test_the_doctor_where_nobody_listens() -> None:
    refused = await examined("127.0.0.1:1", Credentials())
    assert refused["tcp"].level == "fail"
    assert "weft coordinator" in refused["tcp"].advice
    unknown = await examined("nowhere.invalid:1", Credentials())
    assert {check: f.level for check, f in unknown.items()} == {"dns": "fail"}


async def test_the_doctor_looks_at_certificates(tmp_path: Path) -> None:
    pool = Secured(tmp_path)
    await pool.start()
    try:
        viewer = pool.authority.credentials("viewer.test")
        well = await examined(pool.target, viewer)
        for check in ("tls", "own_certificate", "server_certificate", "access", "versions"):
            assert well[check].level == "ok", well[check]
        nobody = await examined(pool.target, Credentials(tls_ca=pool.authority.path))
        assert "was shown none" in nobody["tls"].says
        assert nobody["server_certificate"].level == "ok"
        plain = await examined(pool.target, Credentials())
        assert "it speaks TLS only" in plain["tls"].says
        misled = await examined(pool.target, replace(viewer, tls_ca=Authority(tmp_path).path))
        assert "not trusted" in misled["tls"].says
        for found in (nobody, plain, misled):
            assert found["tls"].level == "fail"
            assert found["tls"].advice
            assert "access" not in found
        unknown = await examined(pool.target, pool.authority.credentials("somebody.test"))
        assert unknown["access"].level == "fail"
        trainer = await examined(pool.target, pool.authority.credentials("trainer.test"))
        assert trainer["access"].level == "warn"
        now = datetime.now(UTC)
        for left, level in ((timedelta(hours=-1), "fail"), (timedelta(days=3), "warn")):
            soon = pool.authority.credentials("viewer.test", file="soon", not_after=now + left)
            assert (await examined(pool.target, soon))["own_certificate"].level == level
        torn = replace(viewer, tls_key=pool.credentials.tls_key)
        assert (await examined(pool.target, torn))["own_certificate"].level == "fail"
    finally:
        await pool.stop()


async def test_the_doctor_looks_at_tokens(tmp_path: Path) -> None:
    pool = Secured(tmp_path, TOKEN_ACCESS)
    await pool.start()
    try:
        tls = Credentials(tls_ca=pool.authority.path)
        assert (await examined(pool.target, replace(tls, token=TOKEN)))["access"].level == "ok"
        assert (await examined(pool.target, replace(tls, token="guess")))["access"].level == "fail"
        assert (await examined(pool.target, tls))["access"].level == "fail"
    finally:
        await pool.stop()


async def test_a_status_that_is_watched_waits_for_a_coordinator_that_is_away(pool: Pool) -> None:
    process = await _begin("status", "--watch", "--interval", "0.1", "--json", "-c", pool.target)
    assert process.stdout
    assert process.stderr
    try:
        async with asyncio.timeout(_SECONDS):
            assert json.loads(await process.stdout.readline())["coordinator_generation"] == "1"
            assert pool.coordinator
            listen = pool.target
            await pool.coordinator.stop()
            assert b"this is how it was before" in await process.stderr.readline()
            pool.coordinator.config = replace(pool.coordinator.config, listen=listen)
            await pool.coordinator.start()
            while json.loads(await process.stdout.readline())["coordinator_generation"] == "1":
                pass
    finally:
        process.kill()
        await process.communicate()
