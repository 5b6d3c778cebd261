"""What a worker holds reaches the replica's process without being asked for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.engine import MemoryUsage
from rollout_side.memory.segment import Memory
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import StagedVersion
from rollout_side.vllm_engine.worker.holdings import (
    SLOT_BYTES,
    HoldingsPage,
    HoldingsReport,
    HoldingsWriter,
    ProgressWriter,
    WorkerUsage,
)
from rollout_side.vllm_engine.worker.rank_results import guarded
from rollout_side.vllm_engine.worker.state import WorkerState, usage_of
from tests.waits import until
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import HeldVersion
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

MANIFEST = plan_buckets((TensorMeta("w", DataType.FLOAT32, (4,)),))


def held(spilled: tuple[HeldVersion, ...] = (), **fields: Any) -> WorkerUsage:
    given = {"adapter_bytes": 0, "staging_bytes": 0, **fields}
    return WorkerUsage(MemoryUsage(**given, spilled=spilled))


@pytest.fixture
def page() -> Iterator[HoldingsPage]:
    made = HoldingsPage()
    yield made
    made.close()


def test_what_was_written_last_is_read(page: HoldingsPage) -> None:
    assert page.read().memory.retained_bases == ()
    writer = HoldingsWriter(page.path)
    for number in range(1, 6):
        said = held((HeldVersion(PolicyVersion("math", number), b"d"),), retained_bases=(number,))
        writer.write(said)
        found = page.read()
        assert found == said
        assert page.read() is found  # nothing is parsed where nothing has changed


def test_the_last_word_of_any_rank_that_it_gets_on_is_read(page: HoldingsPage) -> None:
    assert page.progress_at() == 0.0
    before = time.monotonic()
    ProgressWriter(page.path, 0).report_progress()
    first = page.progress_at()
    assert before <= first <= time.monotonic()
    ProgressWriter(page.path, 7).report_progress()
    assert page.progress_at() > first
    assert page.read().memory.adapter_bytes == 0, "what is held is not touched"


def test_a_slot_that_is_being_written_is_not_read(page: HoldingsPage) -> None:
    writer = HoldingsWriter(page.path)
    writer.write(held(adapter_bytes=1))
    writer.write(held(adapter_bytes=2))
    # The next text over the older slot, as far as it came; its header is the old one's.
    torn = SLOT_BYTES + 20
    writer._map[torn : torn + 9] = b"\xff" * 9
    assert page.read().memory.adapter_bytes == 2
    other = HoldingsPage()
    writer = HoldingsWriter(other.path)
    writer.write(held(adapter_bytes=1))
    torn = SLOT_BYTES + 20
    writer._map[torn : torn + 9] = b"\xff" * 9
    assert other.read().memory.adapter_bytes == 0
    other.close()


def test_what_does_not_fit_leaves_what_was_there(page: HoldingsPage) -> None:
    writer = HoldingsWriter(page.path)
    writer.write(held(adapter_bytes=3))
    with pytest.raises(ValueError, match="does not fit"):
        writer.write(WorkerUsage(held().memory, "x" * SLOT_BYTES))
    assert page.read().memory.adapter_bytes == 3


def test_thousands_of_spilled_versions_fit(page: HoldingsPage) -> None:
    copies = [
        HeldVersion(PolicyVersion("n" * 63, number), bytes(32), spilled=True)
        for number in range(4096)
    ]
    HoldingsWriter(page.path).write(held(tuple(copies)))
    assert len(page.read().memory.spilled) == 4096


def _write_for_ever(path: str) -> None:
    writer, number = HoldingsWriter(path), 0
    while True:
        number += 1
        writer.write(held(adapter_bytes=number, staging_bytes=number))


def test_a_writer_of_another_process_is_never_seen_halfway_nor_missed_when_killed(
    page: HoldingsPage,
) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_write_for_ever, args=(page.path,)
    )
    process.start()
    try:
        seen = 0
        until(lambda: page.read().memory.adapter_bytes > 0)
        for _ in range(20_000):
            found = page.read().memory
            assert found.adapter_bytes == found.staging_bytes >= seen
            seen = found.adapter_bytes
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    found = page.read().memory
    assert found.adapter_bytes == found.staging_bytes >= seen
    assert page.read().memory == found


class _Worker:
    rank = 0

    def __init__(self, state: WorkerState) -> None:
        self.weft_state = state

    @guarded
    def drop(self) -> None:
        self.weft_state.store.discard("t")
        raise ValueError("after it was dropped")


def _state(page: HoldingsPage) -> WorkerState:
    state = WorkerState(WorkerStore(2**20, 2**20, 1, Memory()), Reference("Model", ()))
    state.receiver = SimpleNamespace()  # type: ignore[assignment]
    state.report = HoldingsReport(HoldingsWriter(page.path), lambda: usage_of(state))
    return state


def test_what_another_thread_changes_is_told_soon_and_what_a_call_changes_at_once(
    page: HoldingsPage,
) -> None:
    state = _state(page)
    assert state.report is not None
    state.report.start()
    assert page.read().memory.staged_transfer_ids == ()

    def receive() -> None:
        segment = state.store.reserve("t", MANIFEST.wire_bytes, adapter=False)
        version = PolicyVersion("base", 1)
        state.store.put_staged(StagedVersion("t", version, MANIFEST, segment, b"d"))

    thread = threading.Thread(target=receive)
    thread.start()
    thread.join()
    until(lambda: page.read().memory.staged_transfer_ids == ("t",))
    assert page.read().memory.staging_bytes == MANIFEST.wire_bytes
    answer = _Worker(state).drop()
    assert not answer["ok"]
    assert page.read().memory.staged_transfer_ids == ()  # told before the answer was
    state.report.close()
    state.store.reserve("u", 2 * MANIFEST.wire_bytes, adapter=False)
    state.notify_holdings()  # the thread has ended, calls still tell
    assert page.read().memory.staging_bytes == 2 * MANIFEST.wire_bytes


def test_a_page_whose_process_is_gone_fails_no_call(page: HoldingsPage) -> None:
    state = _state(page)
    assert state.report is not None
    state.report.notify()
    page.close()
    state.store.reserve("t", MANIFEST.wire_bytes, adapter=False)
    state.notify_holdings()
    assert page.read().memory.staging_bytes == 0
    with pytest.raises(OSError, match="/proc/"):
        HoldingsWriter(page.path)
