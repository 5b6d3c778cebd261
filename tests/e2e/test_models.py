"""The whole path for each kind of model: trainer, coordinator, gloo, real vLLM.

A replica is started from the weights "fresh" and asked. Then other weights are
pushed, and then the first ones: it must answer bitwise as it did when it was fresh.
"""

import contextlib
import random

import pytest
from safetensors.torch import load_file

from tests import models
from tests.e2e.replicas import (
    LORA_ARGS,
    MODEL_NAME,
    running_coordinator,
    running_replicas,
)
from trainer_side import Publisher
from weft_rl.cli.demo.main import complete

#: vLLM against Hugging Face in fp32.
BOUND = 5e-5
PROMPTS = ([5, 17, 99, 200, 33], [7, 8, 9, 10, 11, 12, 13, 14], [100])
DENSE = ("qwen2", "llama", "qwen3")
MOE = ("qwen3_moe", "mixtral")
#: Their reload is more than weight loaders: what MLA derives, and what gpt-oss copies itself.
#: DeepSeek-V3's and GLM-4-MoE's checkpoints hold a buffer, too. Lists linears of attention.
OWN_WAYS = {
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "glm4_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "gpt_oss": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
# The rest of the matrix by `make matrix`; dense ones are in test_vllm_engine_* and
# test_trainers, with two ranks, too.
#: Kinds that `make test` runs; tests/unit/docs/test_models.py reads it.
IN_CI = ("deepseek_v3", "gpt_oss")
HERE = {(IN_CI[0], 1, "auto"), (IN_CI[1], 2, "in-place")}
CASES = [
    pytest.param(*case, marks=() if case in HERE else pytest.mark.matrix)
    for kind in (*DENSE, *MOE, *OWN_WAYS)
    for case in ((kind, 1, "auto"), (kind, 1, "in-place"), (kind, 2, "auto"), (kind, 2, "in-place"))
    if case[1:] != (1, "in-place") or kind in OWN_WAYS
]


def answers(url, model=MODEL_NAME):
    return [complete(url, model, prompt) for prompt in PROMPTS]


def assert_close(got, referee, path, adapter=None):
    for answer, prompt in zip(got, PROMPTS, strict=True):
        want = referee.logprobs(path, prompt, answer.tokens, adapter)
        assert max(abs(a - b) for a, b in zip(answer.log_probs, want, strict=True)) <= BOUND


def content(got):
    return [(answer.tokens, answer.log_probs) for answer in got]


def named(path):
    """A checkpoint's tensors in no order, as a trainer's framework may yield them."""
    pairs = [pair for file in path.glob("*.safetensors") for pair in load_file(file).items()]
    random.Random(1).shuffle(pairs)
    for name, tensor in pairs:
        yield name, tensor
        tensor.zero_()  # whoever looks at it later sees that


@pytest.mark.parametrize(("kind", "tensor_parallel", "staging"), CASES)
def test_pushes_answer_like_hugging_face_and_like_a_fresh_engine(
    kind, tensor_parallel, staging, tmp_path
):
    fresh = models.make_model(kind, tmp_path / "fresh", seed=1)
    other = models.make_model(kind, tmp_path / "other", seed=2)
    referee = models.Referee()
    args = ["--tensor-parallel-size", str(tensor_parallel)]
    if "deepseek" in kind:  # of itself vLLM takes AMX where the processor has it: no float32
        args += ["--attention-backend", "CPU_MLA"]
    lora = kind in DENSE  # CPU MoE with LoRA does not start in vLLM without Triton
    adapters = []
    if lora:
        adapters = [models.make_adapter(fresh, tmp_path / f"a{i}", seed=i) for i in (1, 2)]
        # vLLM's own way, from disk, beside ours: their answers must be the same.
        args += [*LORA_ARGS, "--lora-modules", f"disk={adapters[0]}"]
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(running_coordinator(tmp_path))
        options = ("--staging", staging)
        (url,) = stack.enter_context(
            running_replicas(tmp_path, coordinator.target, [fresh], *args, options=options)
        )
        publisher = stack.enter_context(
            Publisher(coordinator.target, trainer_id="trainer-a", timeout_seconds=120)
        )
        when_fresh = answers(url)  # also fills its prefix cache
        assert_close(when_fresh, referee, fresh)
        from_disk = answers(url, "disk") if lora else []

        assert str(publisher.push_base(models.load_hf(other)).version) == "base@1"
        assert_close(answers(url), referee, other)
        # Out of order, which has to be said where buckets are loaded as they come.
        metadata = {name: tensor.to("meta") for name, tensor in named(fresh)}
        in_place = {"metadata": metadata} if staging == "in-place" else {}
        assert str(publisher.push_tensors(named(fresh), **in_place).version) == "base@2"
        assert content(answers(url)) == content(when_fresh)

        if kind in OWN_WAYS:
            adapter = models.make_adapter(fresh, tmp_path / "a", seed=3, targets=OWN_WAYS[kind])
            publisher.push_merged(models.load_peft(fresh, adapter))
            assert_close(answers(url), referee, fresh, adapter)
            publisher.push_base(models.load_hf(fresh))
            assert content(answers(url)) == content(when_fresh)
        for number, adapter in enumerate(adapters, start=1):
            pushed = publisher.push_adapter(models.load_peft(fresh, adapter), "math").version
            assert str(pushed) == f"math@{number}"
            got = answers(url, "math")
            assert {answer.model for answer in got} == {f"math@{number}"}
            assert_close(got, referee, fresh, adapter)
        if lora:
            assert content(answers(url, "math@1")) == content(from_disk)
            # Another base under the same adapters: they stay served, on the new base.
            assert str(publisher.push_base(models.load_hf(other)).version) == "base@3"
            assert_close(answers(url), referee, other)
            for number, adapter in enumerate(adapters, start=1):
                assert_close(answers(url, f"math@{number}"), referee, other, adapter)
