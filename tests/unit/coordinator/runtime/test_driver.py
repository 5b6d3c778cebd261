"""Nothing is told before it is on disk; what cannot be kept is not decided."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.errors import PeerUnavailableError, WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.values import ContentDigest, PolicyKind, RecordedFacts
from weft_rl.coordinator.runtime import driver as driver_module
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.manifests import ReferenceCache
from weft_rl.coordinator.runtime.replica_client import ReplicaCaller
from weft_rl.coordinator.runtime.watchers import Feed


class _Watched(Catalog):
    """A catalog that says when it writes, or fails to."""

    log: list[str]
    broken = False

    def apply(self, saves: Sequence[effects.Save]) -> None:
        if self.broken:
            raise sqlite3.OperationalError("disk full")
        super().apply(saves)
        self.log.append(f"saved {len(saves)}")


def _driver(path: Path) -> tuple[Driver, _Watched]:
    catalog = _Watched.open(path)
    assert isinstance(catalog, _Watched)
    catalog.log = []
    return Driver(PoolState(), catalog, ReferenceCache(), Feed(), commit_seconds=1.0), catalog


def _acquire(policy: str, trainer: str = "t1") -> object:
    return lambda ticket: events.AcquirePolicy(ticket, trainer, "s", policy, PolicyKind.ADAPTER)


async def test_a_batch_is_one_transaction_and_answers_come_after_it(catalog_path: Path) -> None:
    driver, catalog = _driver(catalog_path)
    calls = [asyncio.create_task(driver.call(_acquire(f"p{i}"))) for i in range(5)]  # type: ignore[arg-type]
    for call in calls:
        call.add_done_callback(lambda _: catalog.log.append("told"))
    await asyncio.sleep(0)
    driver.start()
    await asyncio.gather(*calls)
    await asyncio.sleep(0)
    # Five policies, what is announced of each, and that the coordinator has started.
    assert catalog.log == ["saved 11", *["told"] * 5]
    await driver.stop()
    catalog.close()


async def test_a_catalog_that_cannot_be_written_ends_the_coordinator(catalog_path: Path) -> None:
    driver, catalog = _driver(catalog_path)
    catalog.broken = True
    task = driver.start()
    with pytest.raises(PeerUnavailableError):
        await driver.call(_acquire("p"))  # type: ignore[arg-type]
    with pytest.raises(sqlite3.OperationalError):
        await task
    assert not driver.state.policies
    with pytest.raises(PeerUnavailableError):
        await driver.call(_acquire("p"))  # type: ignore[arg-type]
    await driver.stop()
    catalog.close()


async def test_a_call_that_nobody_awaits_any_more_ends_in_silence(catalog_path: Path) -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
    driver, catalog = _driver(catalog_path)
    driver.start()
    call = driver.call(_acquire("p"))  # type: ignore[arg-type]
    call.send(None)  # it waits, in no task: as where its server has been stopped
    await driver.stop()
    call.close()
    del call
    gc.collect()
    assert said == []
    catalog.close()


async def test_what_may_be_written_late_and_cannot_ends_it_too(catalog_path: Path) -> None:
    driver, catalog = _driver(catalog_path)
    task = driver.start()
    await driver.call(_acquire("p"))  # type: ignore[arg-type]
    catalog.broken = True
    driver._lazy = [effects.SaveRetired(PolicyVersion("p", 1))]
    with pytest.raises(PeerUnavailableError):
        await driver.flush()
    with pytest.raises(sqlite3.OperationalError):
        await asyncio.wait_for(task, 5)
    await driver.stop()
    catalog.close()


async def test_events_alone_that_cannot_be_written_wait_and_end_nothing(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "TICK_SECONDS", 0.005)
    monkeypatch.setattr(driver_module, "RETRY_SECONDS", 0.02)
    driver, catalog = _driver(catalog_path)
    catalog.broken = True
    task = driver.start()  # which is an event

    async def until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():
                await asyncio.sleep(0.005)

    await until(lambda: driver.unwritten_reason == "disk full")
    assert not task.done()
    assert "events are in this log and in no catalog" in caplog.text
    catalog.broken = False
    await until(lambda: not driver.unwritten_reason)
    (past,) = catalog.snapshot().events
    assert past.event.kind is effects.EventKind.COORDINATOR_STARTED
    catalog.broken = True
    catalog_path.unlink()  # that its file is gone ends it all the same
    driver._lazy = [past]
    with pytest.raises(CatalogError, match="was removed"):
        await asyncio.wait_for(task, 5)
    await driver.stop()
    catalog.close()


async def test_events_that_cannot_be_written_at_the_end_do_not_fail_it(
    catalog_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver, catalog = _driver(catalog_path)
    catalog.broken = True
    driver.start()
    await driver.stop()
    assert "events are in this log and in no catalog" in caplog.text
    catalog.close()


async def test_an_event_that_cannot_be_decided_harms_nobody_else(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, catalog = _driver(catalog_path)
    real = driver_module.step

    def step(state: PoolState, event: events.Event, now: float) -> object:
        if isinstance(event, events.RenewLease):
            raise ZeroDivisionError
        return real(state, event, now)

    monkeypatch.setattr(driver_module, "step", step)
    driver.start()
    with pytest.raises(WeftError, match="read its log"):
        await driver.call(lambda ticket: events.RenewLease(ticket, "p", 1))
    await driver.call(_acquire("p"))  # type: ignore[arg-type]
    assert "deciding RenewLease failed" in caplog.text
    await driver.stop()
    catalog.close()


async def test_a_cancelled_call_is_forgotten(catalog_path: Path) -> None:
    driver, catalog = _driver(catalog_path)
    driver.start()
    call = asyncio.create_task(
        driver.call(lambda ticket: events.DescribeTarget(ticket, driver.now() + 60))
    )
    async with asyncio.timeout(5):
        while not driver.state.target_tickets:
            await asyncio.sleep(0.001)
        call.cancel()
        while driver.state.target_tickets:
            await asyncio.sleep(0.001)
    assert not driver._calls
    await driver.stop()
    catalog.close()


def test_a_thousand_replicas_are_decided_in_reasonable_time() -> None:
    """Twice linear at most: no step looks at every pair of replicas."""
    m = Machine().pool(*(f"r{i:04}" for i in range(1000)))
    m.acquire("math")
    begin = time.process_time()
    ticket = m.begin()
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.stage_all(ticket)
    m.answer_commits(ticket)
    assert m.transfer(ticket).served_by == set(m.state.replicas)
    assert time.process_time() - begin < 5


async def test_ticks_go_on_whatever_fails_before_one(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "TICK_SECONDS", 0.005)
    driver, catalog = _driver(catalog_path)
    ticks = 0

    def count(event: object, *_: object) -> None:
        nonlocal ticks
        ticks += isinstance(event, events.Tick)

    def fail() -> list[events.Event]:
        raise ValueError("what a member said")

    driver._on_step = [count]
    monkeypatch.setattr(driver.groups, "take_progress", fail)
    driver.start()
    for _ in range(1000):
        if ticks > 3:
            break
        await asyncio.sleep(0.005)
    assert ticks > 3
    assert "what a member said" in caplog.text
    await driver.stop()
    catalog.close()


async def test_a_program_that_locks_the_catalog_delays_its_readers_alone(
    catalog_path: Path,
) -> None:
    driver, catalog = _driver(catalog_path)
    driver.start()
    other = sqlite3.connect(catalog_path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    reader = asyncio.create_task(driver.read(lambda known: known.list_versions("p", 9, 9)))
    began = time.monotonic()
    await asyncio.sleep(0)  # it is on its way
    stopping = asyncio.create_task(driver.stop())
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert time.monotonic() - began < 1, "the event loop did not wait"
    assert not reader.done()
    other.execute("COMMIT")
    other.close()
    assert await asyncio.wait_for(reader, 5) == []
    await stopping
    with pytest.raises(PeerUnavailableError):
        await driver.read(lambda known: known.list_versions("p", 9, 9))
    catalog.close()


@pytest.mark.parametrize("kind", ["load", "commit", "sleep"])
async def test_a_call_that_cannot_be_made_is_answered_all_the_same(kind: str) -> None:
    """Whoever waits for the answer would wait on: for a commit, until somebody restarts it."""
    posted: list[events.Event] = []

    class Reader:
        def stub(self, address: str) -> object:
            raise ValueError("no such address")

    caller = ReplicaCaller(Reader(), lambda: 1, posted.append, 1.0)  # type: ignore[arg-type]
    call: effects.ReplicaCall = {
        "load": effects.CallLoad("t", "r0", "h:1", PolicyVersion("base", 1), 1.0),
        "commit": effects.CallSwitch("t", "r0", "i0", "h:1", PolicyVersion("base", 1)),
        "sleep": effects.CallSleep("r0", "i0", "h:1", "trainer", 1, False, 1.0, 1.0),
    }[kind]
    caller.start(call)
    for _ in range(1000):
        if posted:
            break
        await asyncio.sleep(0.002)
    (answer,) = posted
    assert answer.failure.reason == "INTERNAL"  # type: ignore[union-attr]
    assert "no such address" in answer.failure.message  # type: ignore[union-attr]
    await caller.close()


async def test_a_catalog_whose_disk_hangs_is_said_and_waited_for(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "SLOW_SAVE_SECONDS", 0.05)
    driver, catalog = _driver(catalog_path)
    go_on, apply = threading.Event(), catalog.apply

    def hang(saves: Sequence[effects.Save]) -> None:
        go_on.wait(10)
        apply(saves)

    catalog.apply = hang  # type: ignore[method-assign]
    driver.start()
    call = asyncio.create_task(driver.call(_acquire("p")))  # type: ignore[arg-type]
    for _ in range(1000):
        if "its disk does not answer" in caplog.text:
            break
        await asyncio.sleep(0.005)
    assert "its disk does not answer, or another program reads it" in caplog.text
    assert not call.done(), "nothing is acknowledged that is not on disk"
    go_on.set()
    await call
    await driver.stop()
    catalog.close()


@pytest.mark.parametrize(
    "asked",
    [
        effects.LookUp("r1", "i1", "r0", "h:1", PolicyVersion("p", 1)),
        effects.DescribeVersion("r1", "i1", "h:1", PolicyVersion("p", 1), b"digest"),
    ],
)
async def test_a_look_up_that_cannot_read_the_catalog_is_answered_all_the_same(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch, asked: effects.Query
) -> None:
    """The replica that needs the version would wait on, pending its weights."""
    driver, catalog = _driver(catalog_path)
    posted: list[events.Event] = []

    async def facts(*_: object) -> RecordedFacts:
        return RecordedFacts(ContentDigest(0, b"digest", 8), b"layout", None)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(driver, "post", posted.append)
    monkeypatch.setattr(driver.replicas, "facts", facts)
    monkeypatch.setattr(catalog, "find_version", fail)
    driver._carry_out(asked)
    await asyncio.wait(driver._aside)
    (answer,) = posted
    assert isinstance(answer, events.LookedUp | events.VersionDescribed)
    assert answer.failure is not None
    assert answer.failure.reason == "INTERNAL"
    await driver.stop()
    catalog.close()
