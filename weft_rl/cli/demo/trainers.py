"""The demo's two trainers, each a process of its own without vLLM.

``python -m weft_rl.cli.demo.trainers lora|base COORDINATOR MODEL OUT``. At each line "push BASE"
on standard input it trains a little, pushes, saves what was pushed under OUT for the reference,
and answers one line of JSON. BASE is the base that the pool serves: an adapter is trained on that
version, as it was saved. At a line "again" the base's trainer pushes the same weights again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from trainer_side import PolicyVersion, Publisher, PushResult
from weft_rl.cli.demo.tiny_model import VOCAB_SIZE, load_model

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


def lora_trainer(coordinator: str, model_path: Path, out: Path) -> None:
    """Train a LoRA adapter with PEFT; push it as ``math``."""
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

    _serve("lora-trainer", coordinator, push)


def base_trainer(coordinator: str, model_path: Path, out: Path) -> None:
    """Fine-tune every weight with plain torch; push the base."""
    model = load_model(model_path)

    def push(publisher: Publisher, number: int, base: PolicyVersion | None) -> PushResult:
        if base is not None:
            train(model, seed=100 + number)
        result = publisher.push_base(model)
        if base is not None:
            model.save_pretrained(out / str(result.version))
        return result

    _serve("base-trainer", coordinator, push)


def _serve(trainer_id: str, coordinator: str, push: Any) -> None:
    with Publisher(coordinator, trainer_id=trainer_id, timeout_seconds=60) as publisher:
        print(json.dumps({"ready": True}), flush=True)
        for number, line in enumerate(sys.stdin):
            order, _, base = line.strip().partition(" ")
            if order not in ("push", "again"):
                break
            version, report = push(publisher, number, PolicyVersion.parse(base) if base else None)
            answer = {
                "version": str(version),
                "bytes": report.total_bytes,
                "seconds": report.seconds,
                "forming_seconds": report.forming_seconds,
                "staging_seconds": report.staging_seconds,
                "committing_seconds": report.committing_seconds,
                "pause_seconds": report.pause_seconds,
                "vllm_imported": "vllm" in sys.modules,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    kind, target, model_dir, out_dir = sys.argv[1:]
    torch.set_num_threads(1)
    run = {"lora": lora_trainer, "base": base_trainer}[kind]
    run(target, Path(model_dir), Path(out_dir))
