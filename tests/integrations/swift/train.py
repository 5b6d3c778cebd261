"""ms-swift's GRPO on a CPU over a pool, each rank a process of ``test_swift.py``.

``python -m tests.integrations.swift.train FOLDER COORDINATOR POLICY full|lora``: the model lies in
FOLDER/model. Rank 0 writes what it found to FOLDER/results.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swift import rlhf_main
from swift.rewards import ORM, orms
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

from tests.integrations.parity import error, sampled, version
from trainer_side.integrations.swift import install

NUM_STEPS = 3


class EvenWords(ORM):  # type: ignore[misc]
    """Something to learn: words of an even number."""

    def __call__(self, completions: list[str], **others: Any) -> list[float]:
        words = [[word[1:] for word in text.split()] for text in completions]
        return [sum(int(w) % 2 == 0 for w in each if w.isdigit()) / 8 for each in words]


def compare_pushes(coordinator: str, policy: str, found: list[dict[str, Any]]) -> None:
    """Have each push compared, on rank 0, with the model that was pushed."""
    push = RolloutTrainerMixin._move_model_to_vllm

    def push_and_compare(trainer: Any, skip_async_check: bool = False) -> None:
        push(trainer, skip_async_check)
        if trainer.accelerator.is_main_process:
            group = sampled(coordinator, policy)
            training = trainer.model.training
            found.append({"version": version(group), "error": error(group, trainer.model.eval())})
            trainer.model.train(training)

    RolloutTrainerMixin._move_model_to_vllm = push_and_compare


def main(folder: str, coordinator: str, policy: str, tuner: str) -> None:
    work = Path(folder)
    rows = [{"messages": [{"role": "user", "content": f"w{5 + i} w{9 + i}"}]} for i in range(32)]
    data = work / "prompts.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    orms["even_words"] = EvenWords
    pushes: list[dict[str, Any]] = []
    install(coordinator, policy=policy)
    compare_pushes(coordinator, policy, pushes)
    args = f"""
        --rlhf_type grpo --tuner_type {tuner} --model {work}/model --model_type llama
        --template dummy --torch_dtype float32 --attn_impl eager --check_model false
        --dataset {data} --split_dataset_ratio 0 --max_length 32 --dataloader_num_workers 0
        --use_vllm true --vllm_mode server --vllm_server_host weft
        --reward_funcs even_words --num_generations 4 --max_completion_length 8 --beta 0
        --per_device_train_batch_size 8 --max_steps {NUM_STEPS} --learning_rate 1e-2
        --lr_scheduler_type constant --warmup_ratio 0 --gradient_checkpointing false
        --rollout_importance_sampling_mode token_truncate --log_rollout_offpolicy_metrics true
        --logging_steps 1 --save_strategy no --eval_strategy no --report_to none
        --output_dir {work}/out
    """.split()
    if tuner == "lora":
        args += ["--lora_rank", "8", "--lora_dropout", "0", "--target_modules", "all-linear"]
    result = rlhf_main(args)
    if pushes:  # rank 0
        log = [entry for entry in result["log_history"] if "reward" in entry]
        (work / "results.json").write_text(json.dumps({"pushes": pushes, "log": log}))


if __name__ == "__main__":
    main(*sys.argv[1:])
