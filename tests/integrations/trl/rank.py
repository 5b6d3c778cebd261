"""One rank that trains by TRL or Hugging Face's Trainer: ``python -m tests.integrations.trl.rank
TARGET WORK``, with torchrun's environment if there are several.

TARGET is the coordinator's HOST:PORT, WORK a folder for what trainers write. Each line of its
standard input is a JSON object with one command, which every rank is given; it answers each
with a line of JSON. See ``Rank``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trainer_side import Publisher, RolloutClient
from weft_rl.contract.errors import WeftError

_PROMPTS = [f"w{5 + i} w{60 + 7 * i} " + "w9 " * (i % 4) + f"w{30 + i}" for i in range(16)]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
#: What the samples of TRL's trainers are: prompts by completions of each.
_NUM_GENERATIONS = 4
_BATCH = 8


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that can be raised: which part of a completion's tokens is even."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def load(path: str, *, lora: bool) -> Any:
    """A model of the disk, float32, with a fresh adapter if that is wanted."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if not lora:
        return model
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(**LORA))


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """What a model says of a completion's tokens, by a forward pass of its own."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


class Watched:
    """A RolloutClient whose samples are compared with the weights of the trainer and with those
    that it began with."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self.trained: Callable[[], Any] = lambda: None
        self.initial: Any = None
        self.parity: list[float] = []
        self.drift: list[float] = []
        self.asked: list[str] = []
        self.versions: list[list[int]] = []
        self.replicas: set[str] = set()

    def generate(self, prompts: Any, **how: Any) -> Any:
        """The client's, compared."""
        groups = self._client.generate(prompts, **how)
        model = self.trained()
        was_training = model.training
        model.eval()
        self.initial.eval()
        largest = [0.0, 0.0]
        for group in groups:
            for sample in group.samples:
                tokens = sample.token_ids.tolist()
                for i, judge in enumerate((model, self.initial)):
                    mine = logprobs_of(judge, group.prompt_token_ids, tokens)
                    largest[i] = max(largest[i], (mine - sample.logprobs).abs().max().item())
            self.replicas.update(group.replica_ids)
        model.train(was_training)
        self.parity.append(largest[0])
        self.drift.append(largest[1])
        self.asked.append(str(how["model"]))
        self.versions.append(
            sorted({v for g in groups for s in g.samples for v in s.versions.tolist()})
        )
        return groups


class Rank:
    """Commands are methods; their answers are JSON."""

    def __init__(self, target: str, work: Path) -> None:
        self._target, self._work = target, work
        self._trainer_id = f"trl-{os.environ.get('WORLD_SIZE', '1')}"

    def restore(self, model: str) -> dict[str, Any]:
        """Have the pool serve the base of the disk, which the next trainer begins with."""
        if os.environ.get("RANK", "0") == "0":
            with Publisher(self._target, trainer_id="restores", ranks="this") as publisher:
                publisher.push_base(model)
        return {}

    def rl(
        self,
        model: str,
        trainer: str,
        mode: str,
        accumulation: int,
        iterations: int,
        generations: int,
        timeout: float = 60.0,
    ) -> dict[str, Any]:
        """Train so long that there are so many generations, with the pool attached."""
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

        from trainer_side.integrations import trl as weft_trl

        kind, config = {
            "grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig),
        }[trainer]  # fmt: skip
        held = load(model, lora=mode != "full")
        built = kind(
            model=held,
            reward_funcs=even_tokens,
            args=config(
                output_dir=str(self._work),
                per_device_train_batch_size=_BATCH,
                num_generations=_NUM_GENERATIONS,
                gradient_accumulation_steps=accumulation,
                num_iterations=iterations,
                max_completion_length=6,
                max_steps=generations * iterations,
                learning_rate=2e-3,
                lr_scheduler_type="constant",
                beta=0.0,
                temperature=1.0,
                seed=7,
                **_COMMON,
            ),
            train_dataset=Dataset.from_dict({"prompt": _PROMPTS}),
            processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        )
        with ExitStack() as stack:
            # Made after the trainer, which has joined the ranks.
            publisher = stack.enter_context(
                Publisher(self._target, trainer_id=self._trainer_id, progress=None)
            )
            client = stack.enter_context(RolloutClient(self._target, timeout_seconds=timeout))
            watched = Watched(client)
            watched.initial = load(model, lora=mode != "full")  # TRL binds what a copy would run
            watched.trained = lambda: built.accelerator.unwrap_model(built.model)
            policy = "math" if mode == "adapter" else "base"
            generation = weft_trl.attach(built, publisher, watched, policy=policy)
            try:
                built.train()
            except WeftError as error:
                return {"error": str(error), "type": type(error).__name__, "asked": watched.asked}
        key = "sampling/sampling_logp_difference/max"
        return {
            "last": str(generation.pushed.version),
            "asked": watched.asked,
            "versions": watched.versions,
            "parity": watched.parity,
            "drift": watched.drift,
            "replicas": sorted(watched.replicas),
            "logp_difference": [log[key] for log in built.state.log_history if key in log],
            "steps": built.state.global_step,
        }

    def callback(
        self, model: str, policy: str, steps: int, every: int, saved: str, zero3: bool = False
    ) -> dict[str, Any]:
        """Train by Hugging Face's Trainer with the callback, and save what came of it."""
        from transformers import Trainer, TrainingArguments

        from trainer_side.integrations.hf import PushCallback

        arguments: dict[str, Any] = {"deepspeed": _zero3()} if zero3 else {}
        args = TrainingArguments(
            output_dir=str(self._work),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            seed=7,
            **_COMMON,
            **arguments,
        )
        rows = torch.randint(4, 250, (64, 12), generator=torch.Generator().manual_seed(1))
        trainer = Trainer(
            model=load(model, lora=policy != "base"),
            args=args,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        with Publisher(self._target, trainer_id=self._trainer_id, progress=None) as publisher:
            callback = PushCallback(publisher, policy, every_steps=every)
            trainer.add_callback(callback)
            trainer.train()
            assert callback.pushed is not None
            version, report = callback.pushed
        module: Any = trainer.accelerator.unwrap_model(trainer.model)
        with _gathered(module) if zero3 else nullcontext():
            if trainer.is_world_process_zero():
                module.save_pretrained(saved)
        return {"version": str(version), "source": report.source}


def _zero3() -> dict[str, Any]:
    """Settings for a CPU; see examples/zero3.py."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _gathered(module: Any) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(module.parameters()))


_COMMON: dict[str, Any] = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def main() -> None:
    """Serve until standard input closes."""
    torch.set_num_threads(1)
    served = Rank(sys.argv[1], Path(sys.argv[2]))
    answers, sys.stdout = sys.stdout, sys.stderr  # trainers print what they log
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(served, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"crash": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # DeepSpeed now and then aborts at exit, after all work


if __name__ == "__main__":
    main()
