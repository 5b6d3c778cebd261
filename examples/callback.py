"""Hugging Face's Trainer: a callback pushes the adapter as steps end.

    weft coordinator
    weft rollout -- tiny --enable-lora --max-lora-rank 8
    python examples/callback.py --model tiny

On a GPU: the same with a real model's name in both places. examples/README.md has vLLM's
settings for a CPU.
"""

import argparse
import logging
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from trainer_side import Publisher
from trainer_side.integrations.hf import PushCallback


def main() -> None:
    parser = argparse.ArgumentParser(description="Train by Hugging Face's Trainer and push.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--policy", default="math", help="the adapter's name in the pool")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--every", type=int, default=2, help="steps from push to push")
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    # Made up; your dataset goes here.
    rows = torch.randint(model.config.vocab_size, (64, 32))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    # The callback logs what it pushes.
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("trainer_side.integrations").setLevel(logging.INFO)
    # Made after the Trainer, which has joined the ranks if there are several.
    # The pool may be starting beside this job: wait for its coordinator.
    with Publisher(
        args.coordinator, trainer_id="callback-example", connect_seconds=300
    ) as publisher:
        trainer.add_callback(PushCallback(publisher, args.policy, every_steps=args.every))
        trainer.train()


if __name__ == "__main__":
    main()
