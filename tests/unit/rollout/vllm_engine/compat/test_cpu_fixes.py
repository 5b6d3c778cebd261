"""Corrections of vLLM's CPU backend, without vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_side.vllm_engine.compat import cpu_fixes

RANK, HIDDEN, VOCAB, SLOTS = 2, 3, 5, 2


class Wrapper:
    """As vLLM's ``PunicaWrapperCPU``: the batch's requests have one row each."""

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> None:
        assert len(y) == 3, "einsum: size of dimension does not match"
        y += 1000


class Runner:
    """As vLLM's model runner: a batch of three requests, whose prompts have four tokens."""

    def __init__(self, wrapper: Wrapper, ids: list[int]) -> None:
        self.wrapper = wrapper
        self.input_batch = SimpleNamespace(
            req_id_to_index={"r0": 0, "r1": 1, "r2": 2}, request_lora_mapping=ids
        )
        manager = SimpleNamespace(lora_index_to_id=[7, 9])
        self.lora_manager: Any = SimpleNamespace(_adapter_manager=manager)
        self.num_prompt_logprobs: dict[str, int] = {}
        self.a = torch.randn(SLOTS, 1, RANK, HIDDEN)
        self.b = torch.randn(SLOTS, 1, VOCAB, RANK)
        self.unfinished: set[str] = set()

    def _get_prompt_logprobs_dict(self, hidden: torch.Tensor, scheduled: Any) -> dict[str, Any]:
        asked, found = self.num_prompt_logprobs, {}
        for name in asked:
            if name in scheduled:
                logits = torch.zeros(len(hidden), VOCAB)
                self.wrapper.add_lora_logits(logits, hidden, self.a, self.b, 1.0)
                if name not in self.unfinished:
                    found[name] = logits
        for name in found:
            del asked[name]
        return found

    def want(self, hidden: torch.Tensor, slot: int) -> torch.Tensor:
        return hidden @ self.a[slot, 0].T @ self.b[slot, 0].T


@pytest.fixture(params=[True, False], ids=["a CPU", "a GPU"])
def is_cpu(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def runner(is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> Runner:
    wrapper: Any = type("Wrapper", (Wrapper,), {})
    kind: Any = type("Runner", (Runner,), {})
    modules = {
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: is_cpu)},
        "vllm.lora.punica_wrapper.punica_cpu": {"PunicaWrapperCPU": wrapper},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": kind},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))  # type: ignore[arg-type]
    for _ in range(2):
        assert cpu_fixes.install_prompt_rows() is is_cpu
    return kind(wrapper(), [9, 0, 7])  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_cpu", [True], indirect=True)
@pytest.mark.parametrize("rows", [4, 3], ids=["other rows than requests", "as many"])
def test_a_prompt_is_looked_at_by_its_own_requests_adapter(runner: Runner, rows: int) -> None:
    hidden = torch.randn(rows, HIDDEN)
    runner.num_prompt_logprobs = asked = {"r0": 1, "r1": 1, "r2": 1, "elsewhere": 1}
    found = runner._get_prompt_logprobs_dict(hidden, {"r0": 4, "r1": 4, "r2": 4})
    for name, slot in (("r0", 1), ("r2", 0)):
        torch.testing.assert_close(found[name], runner.want(hidden, slot))
    assert not found["r1"].any()  # it has none
    assert runner.num_prompt_logprobs is asked
    assert asked == {"elsewhere": 1}


@pytest.mark.parametrize("is_cpu", [True], indirect=True)
def test_a_prompt_that_comes_in_parts_is_looked_at_in_each(runner: Runner) -> None:
    runner.unfinished = {"r0"}
    runner.num_prompt_logprobs = {"r0": 1, "r2": 1}
    assert runner._get_prompt_logprobs_dict(torch.randn(4, HIDDEN), {"r0": 4, "r2": 4}).keys() == {
        "r2"
    }
    assert runner.num_prompt_logprobs == {"r0": 1}


def test_tokens_that_are_sampled_are_vllms_own(runner: Runner) -> None:
    logits = torch.zeros(3, VOCAB)
    runner.wrapper.add_lora_logits(logits, torch.randn(3, HIDDEN), runner.a, runner.b, 1.0)
    assert (logits == 1000).all()


@pytest.mark.parametrize("is_cpu", [True], indirect=True)
def test_an_error_leaves_no_slot_behind(runner: Runner) -> None:
    runner.num_prompt_logprobs = {"r0": 1}
    with pytest.raises(RuntimeError):
        runner._get_prompt_logprobs_dict(torch.randn(4, HIDDEN + 1), {"r0": 4})
    assert runner.num_prompt_logprobs == {"r0": 1}
    test_tokens_that_are_sampled_are_vllms_own(runner)


def test_an_engine_without_adapters_is_left_alone(runner: Runner) -> None:
    runner.lora_manager = None
    assert runner._get_prompt_logprobs_dict(torch.randn(3, HIDDEN), {}) == {}
