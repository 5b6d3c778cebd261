"""Base updates in a real vLLM: against transformers and against a fresh engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rollout_side.engine import SwitchTimes
from tests.e2e.conftest import Served, TinyModels
from tests.e2e.engine_process import LORA_ARGS, Completion, EngineProcess
from tests.e2e.logprobs import PROMPT, check
from tests.models import Referee
from weft.contract.errors import (
    InvalidManifestError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
)
from weft.contract.names import PolicyVersion

_LONG = [3 + (7 * i) % 250 for i in range(300)]
_ASKED = [("tiny", PROMPT), ("tiny", _LONG), ("kept@1", PROMPT), ("kept@2", _LONG)]


def ask(engine: EngineProcess) -> list[Completion]:
    """One request after the other: batches of other sizes may round otherwise."""
    return [engine.complete(model, prompt, 12) for model, prompt in _ASKED]


@pytest.fixture(scope="module")
def fresh(qwen2: TinyModels) -> list[Completion]:
    """Answers of an engine that was started with ``qwen2.other``."""
    engine = EngineProcess(qwen2.other, tuple(LORA_ARGS)).start()
    try:
        assert engine.call("engine.get_weight_version") == "base@0"
        for i in (1, 2):
            engine.push_adapter(f"kept@{i}", qwen2.adapters[i])
        return ask(engine)
    finally:
        engine.stop()


def test_equal_to_a_fresh_engine_bit_by_bit(
    fresh: list[Completion], engine_tp1: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine = engine_tp1
    for i in (1, 2):
        engine.push_adapter(f"kept@{i}", qwen2.adapters[i])
    before = ask(engine)  # and all prompts lie in the prefix cache now
    times = engine.push_base("base@1", qwen2.other)
    assert 0 < times.load_seconds <= times.pause_seconds < 2
    assert engine.call("engine.get_weight_version") == "base@1"
    assert ask(engine) == fresh
    engine.scribble()  # what was staged is not referenced any more
    assert ask(engine) == fresh
    check(referee, fresh[0], qwen2.other)
    check(referee, fresh[2], qwen2.other, qwen2.adapters[1])
    engine.push_base("base@2", qwen2.base)
    assert ask(engine) == before


def test_running_requests_go_on(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(engine.complete, "tiny", PROMPT, 400) for _ in range(2)]
        while engine.call("tracker.num_running") < 2:
            time.sleep(0.001)
        times = engine.push_base("base@3", models.other)
        assert not any(request.done() for request in running)
        answers = [request.result() for request in running]
    assert all(len(answer.tokens) == 400 for answer in answers)
    assert times.pause_seconds < 2
    check(referee, engine.complete("tiny", PROMPT), models.other)
    engine.push_base("base@4", models.base)
    check(referee, engine.complete("tiny", PROMPT), models.base)


def test_what_is_not_whole_or_not_staged_changes_nothing(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    file = models.other / "model.safetensors"
    digest = engine.stage("t-part", "base@5", file, drop=("model.norm.weight",))
    with pytest.raises(InvalidManifestError, match=r"'model.norm.weight' is missing"):
        engine.call("apply_base", "t-part", PolicyVersion("base", 5), digest)
    engine.call("discard", "t-part")
    with pytest.raises(NotReadyError):
        engine.call("apply_base", "t-part", PolicyVersion("base", 5), digest)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), models.base)


def test_a_load_that_fails_midway_is_repaired_by_the_next(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    engine.push_adapter("dirty@1", models.adapters[0])
    engine.break_next_load(9)
    with pytest.raises(LoadFailedError, match="the disk of the test is broken") as failed:
        engine.push_base("base@6", models.other)
    assert failed.value.metadata["dirty"] == "true"
    assert "broken" in engine.call("dirty_reason")
    with pytest.raises(httpx.HTTPStatusError) as refused:
        engine.complete("tiny", PROMPT)
    assert refused.value.response.status_code == 503
    assert "mixed" in refused.value.response.json()["error"]["message"]
    assert engine.http.get("/health").status_code == 200
    engine.push_base("base@6", models.other)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), models.other)
    check(referee, engine.complete("dirty", PROMPT), models.other, models.adapters[0])
    engine.push_base("base@7", models.base)
    check(referee, engine.complete("dirty", PROMPT), models.base, models.adapters[0])


def test_going_back_to_a_retained_copy(served: Served, referee: Referee) -> None:
    """With two workers the second maps the first one's copy again."""
    engine, models = served.engine, served.models
    engine.push_adapter("back@1", models.adapters[0])
    engine.push_base("base@8", models.other)
    engine.push_base("base@9", models.base)
    assert engine.call("memory").retained_bases == (9, 8)
    times: SwitchTimes = engine.call("apply_retained", PolicyVersion("base", 8))
    assert 0 < times.pause_seconds < 2
    assert engine.call("memory").retained_bases == (8, 9)
    check(referee, engine.complete("tiny", PROMPT), models.other)
    check(referee, engine.complete("back", PROMPT), models.other, models.adapters[0])
    with pytest.raises(NotFoundError):
        engine.call("apply_retained", PolicyVersion("base", 7))
    engine.call("apply_retained", PolicyVersion("base", 9))
    check(referee, engine.complete("tiny", PROMPT), models.base)


@pytest.fixture(scope="module")
def engine_moe(qwen3_moe: TinyModels) -> Iterator[EngineProcess]:
    """An engine without LoRA that serves ``qwen3_moe.base``."""
    engine = EngineProcess(qwen3_moe.base).start()
    yield engine
    engine.stop()


@pytest.mark.matrix
def test_experts(engine_moe: EngineProcess, qwen3_moe: TinyModels, referee: Referee) -> None:
    """vLLM's own reload of a mixture of experts is wrong on CPU (``cpu_fixes``)."""
    engine = engine_moe
    check(referee, engine.complete("tiny", PROMPT), qwen3_moe.base)
    engine.push_base("base@1", qwen3_moe.other)
    check(referee, engine.complete("tiny", PROMPT), qwen3_moe.other)
    digest = engine.stage("t-lora", "no@1", qwen3_moe.base / "model.safetensors")
    with pytest.raises(NotReadyError, match="enable-lora"):
        engine.call("load_adapter", "t-lora", PolicyVersion("no", 1), "{}", digest)


@pytest.mark.matrix  # it needs an engine of its own
def test_a_dead_worker_ends_the_server(engine_moe: EngineProcess) -> None:
    """So the process ends, and whoever started it starts another one."""
    served = engine_moe.submit("serve_http")
    os.kill(engine_moe.facts["worker_pids"][0], signal.SIGKILL)
    with pytest.raises(PeerUnavailableError, match="has died"):
        served.result(timeout=20)
    assert engine_moe.call("is_alive") is False
    with pytest.raises(LoadFailedError):
        engine_moe.call("memory")
