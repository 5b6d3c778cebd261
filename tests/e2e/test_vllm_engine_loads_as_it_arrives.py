"""A real vLLM that was started to load bases in place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rollout_side.engine import SwitchTimes
from tests.e2e.arriving_file import arriving_digest
from tests.e2e.conftest import TinyModels
from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.e2e.logprobs import PROMPT, check
from tests.models import Referee
from weft.contract.errors import NotReadyError
from weft.contract.names import PolicyVersion

WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def engine(qwen2: TinyModels) -> Iterator[EngineProcess]:
    """It serves ``qwen2.base``; leave it so."""
    running = EngineProcess(qwen2.base, tuple(LORA_ARGS), staging="in-place").start()
    yield running
    running.stop()


def commit(engine: EngineProcess, version: str, model: Path) -> SwitchTimes:
    """What the coordinator does once the receiver has everything."""
    digest = arriving_digest(model / "model.safetensors")
    until_loaded(engine)
    times: SwitchTimes = engine.call(
        "apply_base", f"t-{version}", PolicyVersion.parse(version), digest
    )
    return times


def push(engine: EngineProcess, version: str, model: Path) -> SwitchTimes:
    engine.arrive(version, model)
    return commit(engine, version, model)


def until_loaded(engine: EngineProcess, *, begun: bool = False) -> None:
    """Wait until what arrives was loaded, or its first bucket."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not engine.rpc("weft_test_arriving")[0]["value"]["begun" if begun else "complete"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_bases_are_loaded_as_they_arrive(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    assert engine.facts["capabilities"].loads_in_place
    engine.push_adapter("kept@1", qwen2.adapters[0])
    before = [engine.complete(name, PROMPT, 12) for name in ("tiny", "kept")]
    for number in (1, 3):
        times = push(engine, f"base@{number}", qwen2.other)
        assert 0 < times.load_seconds <= times.pause_seconds
        assert engine.call("engine.get_weight_version") == f"base@{number}"
        check(referee, engine.complete("tiny", PROMPT, 12), qwen2.other)
        check(referee, engine.complete("kept", PROMPT, 12), qwen2.other, qwen2.adapters[0])
        push(engine, f"base@{number + 1}", qwen2.base)
        assert [engine.complete(name, PROMPT, 12) for name in ("tiny", "kept")] == before
    held = engine.call("memory")
    assert (held.staging_bytes, held.retained_bases) == (0, ())


def test_running_requests_wait_and_go_on(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(engine.complete, "tiny", PROMPT, 400) for _ in range(2)]
        while engine.call("tracker.num_running") < 2:
            time.sleep(0.001)
        engine.arrive("base@11", qwen2.other)
        late = pool.submit(engine.complete, "tiny", PROMPT, 8)
        assert engine.call("loading") == "t-base@11"
        commit(engine, "base@11", qwen2.other)
        answers = [request.result(60) for request in running]
        assert all(len(answer.tokens) == 400 for answer in answers)
        check(referee, late.result(60), qwen2.other)
    push(engine, "base@12", qwen2.base)
    check(referee, engine.complete("tiny", PROMPT), qwen2.base)


def test_nothing_changes_if_it_ends_before_it_began(
    engine: EngineProcess, qwen2: TinyModels
) -> None:
    before = engine.complete("tiny", PROMPT)
    with pytest.raises(NotReadyError):
        engine.call("load_in_place", "t-unknown", PolicyVersion("base", 20), 1.0)
    assert engine.complete("tiny", PROMPT) == before
    engine.arrive("base@21", qwen2.other, num_buckets=0)
    engine.call("discard", "t-base@21")
    assert engine.complete("tiny", PROMPT) == before
    engine.arrive("base@22", qwen2.other, num_buckets=0, seconds=0.01)  # the order's own end
    assert engine.complete("tiny", PROMPT) == before
    assert engine.call("dirty_reason") == engine.call("loading") == ""


def test_one_that_ends_midway_is_repaired_by_the_next(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine.push_adapter("mid@1", qwen2.adapters[1])
    engine.arrive("base@31", qwen2.other, num_buckets=3)
    until_loaded(engine, begun=True)
    with pytest.raises(NotReadyError, match="in place"):
        engine.push_adapter("mid@2", qwen2.adapters[2])
    assert engine.call("memory").staged_transfer_ids == ("t-base@31", "t-mid@2")
    engine.call("discard", "t-base@31")
    assert "base@31" in engine.call("dirty_reason")
    with pytest.raises(httpx.HTTPStatusError) as refused:
        engine.complete("tiny", PROMPT)
    assert refused.value.response.status_code == 503
    push(engine, "base@32", qwen2.other)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), qwen2.other)
    check(referee, engine.complete("mid", PROMPT), qwen2.other, qwen2.adapters[1])
    push(engine, "base@33", qwen2.base)
    check(referee, engine.complete("mid", PROMPT), qwen2.base, qwen2.adapters[1])
    engine.call("discard", "t-mid@2")


def test_a_commit_may_come_late(engine: EngineProcess, qwen2: TinyModels, referee: Referee) -> None:
    """As from a coordinator that starts anew."""
    engine.arrive("base@41", qwen2.other, seconds=1.0)
    until_loaded(engine)
    deadline = time.monotonic() + WAIT_SECONDS
    while not engine.call("dirty_reason"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.call("memory").staged_transfer_ids == ("t-base@41",)
    commit(engine, "base@41", qwen2.other)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), qwen2.other)
    push(engine, "base@42", qwen2.base)


def test_the_end_does_not_wait_for_what_never_comes(
    engine: EngineProcess, qwen2: TinyModels
) -> None:
    """The last one: it ends the engine."""
    engine.arrive("base@50", qwen2.other, num_buckets=2)
    until_loaded(engine, begun=True)
    engine.stop()
    assert engine.process.exitcode == 0
