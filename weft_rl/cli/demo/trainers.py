"""The demo's two trainers, each a process of its own without vLLM.

``python -m weft_rl.cli.demo.trainers lora|base COORDINATOR MODEL OUT``. At each line "push BASE"
on standard input it trains a little, pushes, saves what was pushed under OUT for the reference,
and answers one line of JSON. BASE is the base that the pool serves: an adapter is trained on that
version, as it was saved. At a line "again" the base's trainer pushes the same weights again.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer_side import PolicyVersion, Publisher, PushResult
from weft_rl.cli.demo.tiny_model import VOCAB_SIZE, load_model

#: Function of a publisher, the push's number and the base to train on; None pushes anew.
Push = Callable[[Publisher, int, PolicyVersion | None], PushResult]

_STEPS = 4
_LEARNING_RATE = 3e-2


def train(model: Any, seed: int) -> None:
    """Take a few optimiser steps on made-up sequences, so that the weights really move."""
    generator = torch.Generator().manual_seed(seed)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=_LEARNING_RATE)
    model.train()
    for _ in range(_STEPS):
        ids = torch.randint(2, VOCAB_SIZE, (4, 24), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def lora_trainer(model_path: Path, out: Path) -> Push:
    """Return a push of the LoRA adapter ``math``, trained with PEFT."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    )
    trained: dict[PolicyVersion, Any] = {}

    def push(publisher: Publisher, number: int, base: PolicyVersion | None) -> PushResult:
        assert base is not None, "an adapter is trained on a base"
        if base not in trained:
            path = out / str(base) if base.version else model_path
            trained[base] = get_peft_model(load_model(path), config)
        model = trained[base]
        train(model, seed=number)
        result = publisher.push_adapter(model, "math", base=base)
        model.save_pretrained(out / str(result.version))
        return result

    return push


def base_trainer(model_path: Path, out: Path) -> Push:
    """Return a push of the base, every weight of which is fine-tuned with plain torch."""
    model = load_model(model_path)

    def push(publisher: Publisher, number: int, base: PolicyVersion | None) -> PushResult:
        if base is None:
            return publisher.push_base(model)
        train(model, seed=100 + number)
        result = publisher.push_base(model)
        model.save_pretrained(out / str(result.version))
        return result

    return push


def _serve(trainer_id: str, coordinator: str, push: Push) -> None:
    with Publisher(coordinator, trainer_id=trainer_id, timeout_seconds=60) as publisher:
        print(json.dumps({"ready": True}), flush=True)
        for number, line in enumerate(sys.stdin):
            order, _, base = line.strip().partition(" ")
            if order not in ("push", "again"):
                break
            version, report = push(publisher, number, PolicyVersion.parse(base) if base else None)
            loaded = {"vllm_imported": "vllm" in sys.modules}
            answer = {"version": str(version)} | dataclasses.asdict(report) | loaded
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    kind, target, model_dir, out_dir = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = {"lora": lora_trainer, "base": base_trainer}[kind]
    _serve(f"{kind}-trainer", target, trainer(Path(model_dir), Path(out_dir)))
