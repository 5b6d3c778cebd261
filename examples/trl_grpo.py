"""TRL's GRPOTrainer: the pool serves what it trains, and generates for it.

    weft coordinator
    weft rollout -- tiny --enable-lora --max-lora-rank 8
    python examples/trl_grpo.py --model tiny

On a GPU: the same with a real model's name in both places. examples/README.md has vLLM's
settings for a CPU. docs/integrations/trl.md says what is supported.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trainer_side import Publisher, RolloutClient
from trainer_side.integrations.trl import attach


def num_characters(completions: list[str], **_: object) -> list[float]:
    """Made up; your reward goes here."""
    return [float(len(set(text))) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train by TRL's GRPOTrainer over a pool.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--policy", default="math", help="the adapter's name in the pool")
    parser.add_argument("--full", action="store_true", help="train and push every weight")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    args = parser.parse_args()

    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="auto"),
        reward_funcs=num_characters,
        args=GRPOConfig(
            output_dir="trainer_output",
            max_steps=args.steps,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-3,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        # Made up; your prompts go here.
        train_dataset=Dataset.from_dict({"prompt": [f"Count to {n}:" for n in range(64)]}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=None if args.full else lora,
    )
    # Made after the trainer, which has joined the ranks if there are several.
    # The pool may be starting beside this job: wait for its coordinator.
    with (
        Publisher(args.coordinator, trainer_id="trl-example", connect_seconds=300) as publisher,
        RolloutClient(args.coordinator) as rollouts,
    ):
        policy = "base" if args.full else args.policy
        generation = attach(trainer, publisher, rollouts, policy=policy)
        trainer.train()

    if trainer.accelerator.is_main_process:
        for log in trainer.state.log_history:
            if (difference := log.get("sampling/sampling_logp_difference/max")) is not None:
                print(f"log-probabilities differ by at most {difference:.1e}")
        print(f"pushed {generation.pushed.version}")


if __name__ == "__main__":
    main()
