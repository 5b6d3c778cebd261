"""Real trainers of two ranks push to a real vLLM replica, each kind in turn.

After each push the replica must answer as Hugging Face does with the trainer's own
weights, which its framework gathers by its own, slow way. One engine serves all; the
kinds of model beyond the dense one are in the matrix (``make trainers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models
from tests.e2e.replicas import LORA_ARGS, MODEL_NAME, running_coordinator, running_replicas
from tests.integration.models import peft_of
from tests.trainers.launch import running_ranks
from trainer_side import Publisher
from trainer_side.params.names import base_name_in_peft
from weft_rl.cli.demo.main import complete

KINDS = ("ddp", "fsdp1", "fsdp1_flat", "fsdp2", "zero1", "zero2", "zero3")
#: In CI, one of each way to lie: whole, flat runs, rows, padded runs.
SAMPLE = ("ddp", "fsdp1", "fsdp2", "zero3")
PROMPTS = ([5, 17, 99, 200, 33], [7, 8, 9, 10, 11, 12, 13, 14])
#: vLLM against Hugging Face in float32 (tests/e2e/test_models.py).
MAX_ERROR, MEAN_ERROR = 5e-5, 5e-6
#: Of LoRA's values: far larger ones would make the model magnify float32's own error.
SCALE = 0.08
TARGETS = ["q_proj", "v_proj", "o_proj"]


def check(url: str, served: str, reference: Any) -> None:
    """The replica answers as a model of transformers does."""
    errors = []
    for prompt in PROMPTS:
        answer = complete(url, served, prompt)
        assert answer.model in (served, MODEL_NAME)
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            logits = reference.eval()(input_ids=ids).logits[0].float()
        log_probs = torch.log_softmax(logits, dim=-1)
        for i, (token, got) in enumerate(zip(answer.tokens, answer.log_probs, strict=True)):
            errors.append(abs(float(log_probs[len(prompt) - 1 + i, token]) - got))
    assert max(errors) <= MAX_ERROR
    assert sum(errors) / len(errors) <= MEAN_ERROR


class Rig:
    """A trainer of two ranks and a replica, for one saved model."""

    def __init__(self, stack: ExitStack, work: Path, kind: str, *, tied: bool, lora: bool) -> None:
        self.work = work
        self.model = models.make_model(kind, work / "model", seed=1, tied=tied)
        coordinator = stack.enter_context(running_coordinator(work))
        self.target = coordinator.target
        args = LORA_ARGS if lora else ()
        (self.url,) = stack.enter_context(
            running_replicas(work, coordinator.target, [self.model], *args)
        )
        self.trainer = stack.enter_context(running_ranks(work, coordinator.target, 2))

    def make(self, kind: str, peft: dict | None = None) -> None:
        """A trainer of the model, trained a step."""
        self.trainer.do("make", kind=kind, model=str(self.model), peft=peft)
        self.trainer.do("train", steps=1)

    def answers_after(
        self, whats: Sequence[str], policy: str
    ) -> list[tuple[list[int], list[float]]]:
        """What the replica answers, the base and an adapter each, after pushes of both."""
        found: list[tuple[object, ...]] = []
        for what in whats:
            options = {"policy": policy} if what == "adapter" else {}
            version = self.trainer.push(what, **options)
            served = f"{policy}@{version}" if what == "adapter" else MODEL_NAME
            answers = [complete(self.url, served, prompt) for prompt in PROMPTS]
            found += [(answer.tokens, answer.log_probs) for answer in answers]
        return found

    def expect(self, served: str, peft: dict | None = None, *, merged: bool = False) -> None:
        """The replica's answers are those of the trainer's whole weights, ``merged`` by
        PEFT if it was pushed so."""
        path = self.work / "whole.pt"
        self.trainer.do("save", path=str(path))
        whole = torch.load(path)
        reference = models.load_hf(self.model)
        if peft is not None:
            reference = peft_of(reference, **peft)
        missing, unknown = reference.load_state_dict(whole, strict=False)
        assert not unknown
        assert all("lm_head" in name for name in missing), missing  # tied
        reference.tie_weights()
        check(self.url, served, reference.merge_and_unload() if merged else reference)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    with ExitStack() as stack:
        yield Rig(stack, tmp_path_factory.mktemp("dense"), "qwen2", tied=False, lora=True)


def _params(kinds):
    rest = [pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS if kind not in SAMPLE]
    return [*(kind for kind in kinds if kind in SAMPLE), *(p for p in rest if p.values[0] in kinds)]


@pytest.mark.parametrize("kind", _params(KINDS))
def test_full_push(dense, kind):
    dense.make(kind)
    version = dense.trainer.push("base")
    assert version >= 1
    dense.expect(MODEL_NAME)


@pytest.mark.parametrize("kind", _params([kind for kind in KINDS if kind != "fsdp1_flat"]))
def test_adapter_push_then_merged_push(dense, kind):
    peft = {"seed": 2, "scale": SCALE, "use_rslora": True, "target_modules": TARGETS}
    # The adapter's base is the saved model: the replica goes back to it.
    dense.trainer.do("make", kind="ddp", model=str(dense.model))
    dense.trainer.push("base")
    dense.make(kind, peft)
    name = f"math-{kind}".replace("_", "-")
    version = dense.trainer.push("adapter", policy=name)
    dense.expect(f"{name}@{version}", peft)
    dense.trainer.push("merged")
    dense.expect(MODEL_NAME, peft, merged=True)


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_shards_are_served_bit_by_bit_as_whole_weights(dense, kind):
    """What follows a push of whole weights is a fresh engine's (test_vllm_engine_base.py)."""
    peft = {"seed": 3, "scale": SCALE, "target_modules": TARGETS}
    for whats, adapter in ((("base",), None), (("merged", "adapter"), peft)):
        dense.make(kind, adapter)
        name = f"exact-{kind}"
        sharded = dense.answers_after(whats, name)
        dense.trainer.do("save", path=str(dense.work / "whole.pt"))
        dense.trainer.do("make", kind="plain", model=str(dense.model), peft=adapter)
        dense.trainer.do("load", path=str(dense.work / "whole.pt"))
        assert dense.answers_after(whats, name) == sharded


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_trainer(dense, bits):
    """Its adapter, on the pool's own base; its dequantised base with it merged in, and without."""
    from peft.utils.integrations import dequantize_module_weight

    dense.trainer.do("close")  # gives its leases back
    model = peft_of(models.load_quantised(dense.model, bits), 5, SCALE, target_modules=TARGETS)
    with Publisher(dense.target, trainer_id="trainer-q", timeout_seconds=60) as publisher:
        publisher.push_base(dense.model)
        version, report = publisher.push_adapter(model, "quantised")
        assert "quantised to" in report.remarks[0]
        reference = peft_of(models.load_hf(dense.model), 5, SCALE, target_modules=TARGETS)
        check(dense.url, str(version), reference)

        publisher.push_merged(model)
        whole = {
            f"{name}.weight": dequantize_module_weight(part).float()
            for name, part in model.named_modules()
            if type(part).__name__ in ("Linear4bit", "Linear8bitLt") and not hasattr(part, "lora_A")
        }
        rest = {name: p for name, p in model.named_parameters() if name not in whole}
        reference.load_state_dict({**rest, **whole})
        check(dense.url, MODEL_NAME, reference.merge_and_unload())

        publisher.push_base(models.load_quantised(dense.model, bits))
        plain = models.load_hf(dense.model)
        plain.load_state_dict(
            {base_name_in_peft(n): p for n, p in {**rest, **whole}.items() if "lora_" not in n}
        )
        check(dense.url, MODEL_NAME, plain)


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["tied", "moe"])
def test_other_kinds_of_model(model, tmp_path):
    kind = {"tied": "qwen2", "moe": "qwen3_moe"}[model]
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, kind, tied=model == "tied", lora=model == "tied")
        peft = {"seed": 2, "scale": SCALE, "target_modules": TARGETS}
        for trainer in ("ddp", "fsdp1", "fsdp2", "zero3"):
            rig.make(trainer)
            rig.trainer.push("base")
            rig.expect(MODEL_NAME)
            rig.make(trainer, peft)
            rig.trainer.push("merged")
            rig.expect(MODEL_NAME, peft, merged=True)
