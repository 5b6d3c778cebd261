"""Loading a base in place in a real vLLM, layer by layer, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_side.vllm_engine.worker.rank_results import check_results
from tests.e2e.conftest import TinyModels
from tests.e2e.engine_process import EngineProcess
from tests.e2e.logprobs import PROMPT, check
from tests.models import Referee
from weft_rl.contract.errors import LoadFailedError, PeerUnavailableError

_LONG = [3 + (7 * i) % 250 for i in range(300)]


def load(engine: EngineProcess, version: str, model: Path, fail_at: int = -1) -> dict[str, Any]:
    """What the worker found; raises what it raised. No request runs meanwhile."""
    file = str(model / "model.safetensors")
    answers: Any = engine.rpc("weft_test_load_in_place", version, file, fail_at)
    engine.call("engine.reset_prefix_cache")
    return check_results(answers)[0]


def test_layers_that_come_in_several_buckets_through_one_memory(
    engine_tp1: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine = engine_tp1
    engine.push_adapter("inplace@1", qwen2.adapters[0])
    before = [engine.complete(name, PROMPT, 12) for name in ("tiny", "inplace@1")]
    found = load(engine, "base@101", qwen2.other)
    assert len(found["qkv_buckets"]) > 1
    assert not found["has_plan"]  # a CPU packs its weights
    check(referee, engine.complete("tiny", PROMPT, 12), qwen2.other)
    check(referee, engine.complete("tiny", _LONG, 12), qwen2.other, prompt=_LONG)
    check(referee, engine.complete("inplace@1", PROMPT, 12), qwen2.other, qwen2.adapters[0])
    load(engine, "base@102", qwen2.base)
    assert [engine.complete(name, PROMPT, 12) for name in ("tiny", "inplace@1")] == before


def test_a_transfer_that_ends_early(
    engine_tp1: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    """Before its first bucket nothing has changed; after it the next load repairs."""
    engine = engine_tp1
    before = engine.complete("tiny", PROMPT)
    with pytest.raises(PeerUnavailableError, match="the trainer of the test has gone"):
        load(engine, "base@103", qwen2.other, fail_at=0)
    assert engine.complete("tiny", PROMPT) == before
    with pytest.raises(LoadFailedError, match="loading base@103 failed midway") as failed:
        load(engine, "base@103", qwen2.other, fail_at=4)
    assert failed.value.metadata["dirty"] == "true"
    load(engine, "base@103", qwen2.other)
    check(referee, engine.complete("tiny", PROMPT), qwen2.other)
    load(engine, "base@104", qwen2.base)
    assert engine.complete("tiny", PROMPT) == before


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen3_moe"])
def test_packed_again_after_it(kind: str, request: pytest.FixtureRequest, referee: Referee) -> None:
    """Corrections of a CPU's reload (``cpu_fixes``), on a thread that is not the engine's."""
    models: TinyModels = request.getfixturevalue(kind)
    engine = EngineProcess(models.base).start()
    try:
        load(engine, "base@1", models.other)
        check(referee, engine.complete("tiny", PROMPT), models.other)
    finally:
        engine.stop()
