"""DeepSpeed ZeRO-3 with a LoRA of PEFT: an adapter, or the base with it merged in.

    weft coordinator
    weft rollout -- tiny --enable-lora --max-lora-rank 8
    torchrun --standalone --nproc-per-node 2 examples/zero3.py --model tiny [--merged]

On GPUs: the same with a real model's name in both places; without one, DeepSpeed needs some
settings, below. examples/README.md has those of vLLM for a CPU.
"""

import argparse
import os
import sys

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trainer_side import Publisher

GPU = torch.cuda.is_available()
if not GPU:  # DeepSpeed would compile this for over a minute; gloo does as well
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": GPU},
    "zero_optimization": {"stage": 3, "overlap_comm": GPU},
    "zero_allow_untested_optimizer": True,  # torch's own, and on a CPU as well
    "zero_force_ds_cpu_optimizer": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA under ZeRO-3 and push it.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--policy", default="math", help="the adapter's name in the pool")
    parser.add_argument("--merged", action="store_true", help="push the base with it merged in")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend="nccl" if GPU else "gloo")
    torch.manual_seed(0)  # the same LoRA on every rank
    # Each rank reads the whole model before ZeRO keeps its shard; see HfDeepSpeedConfig of
    # transformers for models that do not fit.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    torch.manual_seed(dist.get_rank())  # each rank has batches of its own

    # Every rank makes a Publisher and calls every push; each sends what it holds.
    # The pool may be starting beside this job: wait for its coordinator.
    with Publisher(args.coordinator, trainer_id="zero3-example", connect_seconds=300) as publisher:
        for _ in range(args.steps):
            # Made up; your rollouts and your loss go here.
            ids = torch.randint(model.config.vocab_size, (4, 32), device=engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()

            if args.merged:
                version = publisher.push_merged(engine).version
            else:
                version = publisher.push_adapter(engine, args.policy).version
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.3f}, pushed {version}")

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed now and then aborts when Python ends, after all work


if __name__ == "__main__":
    main()
