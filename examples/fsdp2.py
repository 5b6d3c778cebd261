"""Every weight, sharded by FSDP2, pushed as the base beside the training.

    weft coordinator
    weft rollout -- tiny
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --model tiny

On GPUs: the same with a real model's name in both places; without one, the ranks use gloo.
examples/README.md has vLLM's settings for a CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from trainer_side import Publisher


def main() -> None:
    parser = argparse.ArgumentParser(description="Train all weights, pushing beside the training.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    # Each rank reads the whole model before it keeps its shard: simple, for models that fit.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(rank)  # each rank has batches of its own

    # Every rank makes a Publisher and calls every push; each sends what it holds.
    # The pool may be starting beside this job: wait for its coordinator.
    with Publisher(args.coordinator, trainer_id="fsdp2-example", connect_seconds=300) as publisher:
        pushing = None
        for step in range(args.steps):
            # Made up; your rollouts and your loss go here.
            ids = torch.randint(model.config.vocab_size, (4, 32), device=device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            # The push of the step before has run beside this one. To wait for it is the same
            # on every rank; to look whether it is done would not be.
            if pushing is not None:
                tell(rank, f"pushed {pushing.result().version}")
            # Returns once the shards are copied: the weights may change at once.
            pushing = publisher.push_base_async(model)
            tell(rank, f"step {step}, loss {loss.item():.3f}")
        if pushing is not None:
            tell(rank, f"pushed {pushing.result().version}")
    dist.destroy_process_group()


def tell(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
