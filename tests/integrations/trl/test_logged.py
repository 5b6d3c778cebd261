"""Figures of pushes that TRL's trainers write through their own logger, read back from the files
of TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integrations.trl.rank import even_tokens
from tests.models import make_model
from tests.unit.trainer.integrations.test_hf import REPORT
from trainer_side.push_request import PushResult
from trainer_side.rollouts.sample import Sample, SampleGroup
from weft_rl.contract.names import PolicyVersion

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
#: Of TRL's: the other trainers here run in processes of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


class Publisher:
    """Takes pushes as the versions 1, 2, …"""

    def __init__(self) -> None:
        self.num_pushes = 0

    def push_base(self, model: torch.nn.Module) -> PushResult:
        self.num_pushes += 1
        return PushResult(PolicyVersion("base", self.num_pushes), REPORT)


class Rollouts:
    """Completes every prompt by two tokens."""

    def generate(self, prompts: list[list[int]], *, n: int, **_: Any) -> list[SampleGroup]:
        return [
            SampleGroup(
                index=i,
                prompt_token_ids=prompt,
                samples=tuple(map(self._sample, range(n))),
                replica_ids=("replica-0",) * n,
            )
            for i, prompt in enumerate(prompts)
        ]

    def _sample(self, number: int) -> Sample:
        versions = torch.ones(2, dtype=torch.int64)
        return Sample(
            token_ids=torch.tensor([5 + number, 9]),
            logprobs=torch.full((2,), -3.0),
            versions=versions,
            base_versions=versions,
            older_cache=versions < 0,
            adapter=None,
            finish_reason="stop",
        )


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_what_pushes_cost_is_in_tensorboards_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from trainer_side.integrations import trl as weft_trl

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
    trainer, config = {
        "grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig),
    }[kind]  # fmt: skip
    path = make_model("qwen2", tmp_path / "model")
    built = trainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=even_tokens,
        args=config(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=4,
            max_steps=3,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            report_to="tensorboard",
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{5 + i} w9" for i in range(8)]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(path),
    )
    weft_trl.attach(built, Publisher(), Rollouts(), policy="base")
    built.train()
    log = EventAccumulator(str(tmp_path / "log")).Reload()
    seen = {
        tag.removeprefix("train/weft/"): [(each.step, each.value) for each in log.Scalars(tag)]
        for tag in log.Tags()["scalars"]
        if tag.startswith("train/weft/")
    }
    assert seen["version"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    expected = PushResult(PolicyVersion("base", 1), REPORT).metrics("")
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert name == "version" or [each for _, each in seen[name]] == [value] * 3, name
