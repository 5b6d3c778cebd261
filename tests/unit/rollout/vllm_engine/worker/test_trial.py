"""Watching a worker's steps while a replica asks its own engine for tokens."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.worker.trial import Trial

STEP = SimpleNamespace(num_scheduled_tokens={"weft-trial-1": 4, "weft-trial-2": 4})


class Worker:
    """As vLLM's: a step is asked for in two calls, of which the second has the tokens."""

    def __init__(self, fails_at: str = "", error: Exception | None = None) -> None:
        self.fails_at, self.error = fails_at, error or RuntimeError("no such kernel")
        self.calls: list[str] = []
        self.loras: set[int] = set()
        self.lora_config = SimpleNamespace(max_lora_rank=4)
        self.model_runner = SimpleNamespace(lora_manager=self)

    def execute_model(self, scheduler_output: Any) -> Any:
        return self._call("execute_model", None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._call("sample_tokens", "tokens")

    def _call(self, name: str, answer: Any) -> Any:
        self.calls.append(name)
        if name == self.fails_at:
            raise self.error
        return answer

    def get_dummy_lora_warmup_rank(self, rank: int) -> int:
        return rank

    def add_dummy_lora(self, request: Any, rank: int) -> None:
        if self.fails_at == "add_dummy_lora":
            raise NotImplementedError
        assert rank <= self.lora_config.max_lora_rank
        self.loras.add(request.lora_int_id)

    def remove_lora(self, lora_id: int) -> None:
        self.loras.remove(lora_id)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (
        ("vllm.v1.outputs", "ModelRunnerOutput"),
        ("vllm.lora.request", "LoRARequest"),
    ):
        module: Any = SimpleNamespace(**{kind: lambda **fields: SimpleNamespace(**fields)})
        monkeypatch.setitem(sys.modules, name, module)


def test_steps_that_work_are_the_workers_own() -> None:
    worker = Worker()
    trial = Trial(worker)
    assert worker.execute_model(STEP) is None
    assert worker.sample_tokens(None) == "tokens"
    trial.end()
    assert trial.failure == ""
    assert not {"execute_model", "sample_tokens"} & vars(worker).keys()


@pytest.mark.parametrize("fails_at", ["execute_model", "sample_tokens"])
def test_a_step_that_fails_answers_each_request_and_keeps_the_reason(fails_at: str) -> None:
    worker = Worker(fails_at)
    trial = Trial(worker)
    for _ in range(3):  # vLLM may ask for more steps before it has seen the first's tokens
        answers = [worker.execute_model(STEP), worker.sample_tokens(None)]
        made_up = answers[1]
        assert made_up.req_ids == ["weft-trial-1", "weft-trial-2"]
        assert made_up.req_id_to_index == {"weft-trial-1": 0, "weft-trial-2": 1}
        assert made_up.sampled_token_ids == [[0], [0]]
    assert worker.calls.count(fails_at) == 1  # nothing more is computed
    trial.end()
    assert trial.failure.startswith("RuntimeError: no such kernel (in _call, ")
    assert "test_trial.py:" in trial.failure
    with pytest.raises(RuntimeError):
        getattr(worker, fails_at)(STEP)


def test_an_operation_that_a_build_lacks_is_named() -> None:
    error = AttributeError("'_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'")
    worker = Worker("execute_model", error)
    trial = Trial(worker)
    worker.execute_model(STEP)
    assert trial.failure == (
        "vLLM's build for this machine has no operation cpu_gemm_wna16, which the model needs; "
        "serve it on another machine"
    )


def test_its_adapter_leaves_with_it() -> None:
    worker = Worker()
    trial = Trial(worker)
    assert trial.add_adapter(7)
    assert worker.loras == {7}
    trial.end()
    assert not worker.loras


def test_a_model_that_vllm_makes_no_adapter_for_is_tried_without() -> None:
    worker = Worker("add_dummy_lora")
    trial = Trial(worker)
    assert not trial.add_adapter(7)
    trial.end()
    assert not worker.loras
