"""GRPO with trainer and replica on one GPU, in turns: generate, sleep, train, push, wake.

    weft coordinator
    weft rollout --enable-sleep -- Qwen/Qwen3-0.6B --gpu-memory-utilization 0.4
    python examples/colocated_grpo.py --model Qwen/Qwen3-0.6B

While the trainer computes, the replica's weights and KV cache are no longer on the GPU: only the
trainer's own must fit there, and its weights beside the engine as it generates. Weights that are
pushed in each round need not be kept meanwhile, so the replica sleeps at level 2. Replicas on other
GPUs generate, too, and do not sleep; on a CPU none does, and the rest is the same.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from trainer_side import PaddedBatch, Publisher, RolloutClient, Sampling, pad

WAIT = 300.0
PROMPTS, SAMPLES = 8, 4
SAMPLING = Sampling(max_tokens=16)
CLIP = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn by GRPO on the GPU of the replica.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--level", type=int, default=2, choices=(1, 2), help="of vLLM's sleep")
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    with (
        Publisher(
            args.coordinator, trainer_id="colocated-example", connect_seconds=WAIT
        ) as publisher,
        RolloutClient(args.coordinator, connect_seconds=WAIT) as rollouts,
    ):
        version = publisher.push_base(model).version
        for _ in range(args.steps):
            # Made up, all of one length; your prompts go here.
            prompts = torch.randint(model.config.vocab_size, (PROMPTS, 8)).tolist()
            groups = rollouts.generate(prompts, model=version, n=SAMPLES, sampling=SAMPLING)
            batch = pad(groups, pad_token_id=0)

            made_by = version
            with publisher.rollouts_asleep(level=args.level) as asleep:
                reward, loss = learn(model, optimizer, batch, device)
                if device == "cuda":
                    torch.cuda.empty_cache()  # what torch would keep for itself, the engine needs
                began = time.monotonic()
                version = publisher.push_base(model).version  # wakes the weights
            # And the KV cache: requests are answered again.
            print(
                f"reward {reward:.3f} of samples by {made_by}, loss {loss:.4f}; "
                f"asleep meanwhile: {', '.join(asleep) or 'none'}; "
                f"pushed {version} and awake after {time.monotonic() - began:.2f} s"
            )


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: PaddedBatch, device: str
) -> tuple[float, float]:
    """One step; returns the mean reward, and the loss."""
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1).to(device)
    width, mask = batch.completion_ids.shape[1], batch.completion_mask.to(device)

    # Made up: the share of even tokens; your reward goes here.
    even = (batch.completion_ids % 2 == 0) & batch.completion_mask
    reward = even.sum(1) / batch.completion_mask.sum(1)
    of_groups = reward.view(PROMPTS, SAMPLES)
    mean, spread = of_groups.mean(1, keepdim=True), of_groups.std(1, keepdim=True)
    advantage = ((of_groups - mean) / (spread + 1e-4)).view(-1, 1).to(device)

    # What is said of a token stands one column before it.
    logits = model(input_ids=ids).logits[:, -width - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)
    ratio = (logprobs - batch.logprobs.to(device)).masked_fill(~mask, 0.0).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -(torch.minimum(ratio * advantage, clipped * advantage) * mask).sum() / mask.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(reward.mean()), float(loss.detach())


if __name__ == "__main__":
    main()
