"""Loading a base in place in a real vLLM, layer by layer, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_side.vllm_engine.server import refusals
from rollout_side.vllm_engine.server.engine_trial import EngineTrial
from rollout_side.vllm_engine.worker.rank_results import check_results
from tests.e2e.conftest import TinyModels
from tests.e2e.engine_process import EngineProcess, run_child
from tests.e2e.logprobs import PROMPT, check
from tests.models import Referee, make_model
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


def run_on_ranks_of_a_cpu(pipe: Any, *args: Any) -> None:
    """Start what is refused because no request would survive it, the trial neither: loads do."""

    async def is_not_tried(trial: EngineTrial) -> None:
        pass

    refusals.refuse_ranks_on_cpu = lambda args: None
    setattr(EngineTrial, "run", is_not_tried)  # noqa: B010 (of a process of its own)
    run_child(pipe, *args)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_ranks_that_have_some_of_the_experts_load_these(kind: str, tmp_path: Path) -> None:
    base, other = (make_model(kind, tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    args = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    engine = EngineProcess(base, args, child=run_on_ranks_of_a_cpu).start()

    def unlike() -> list[str]:
        found = check_results(engine.rpc("weft_test_compare"))  # type: ignore[arg-type]
        return [value["why"] for value in found]

    try:
        assert unlike() == ["", ""]
        engine.push_base("base@1", other)
        assert all("other values than vLLM's start" in why for why in unlike())
        engine.push_base("base@2", base)
        assert unlike() == ["", ""]
    finally:
        engine.stop()
