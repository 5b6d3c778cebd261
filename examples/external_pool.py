"""A trainer that joins a pool which runs without it: it knows the coordinator's address, no more.

    weft coordinator
    weft rollout -- tiny --enable-lora --max-lora-rank 8        (any number, before or after)
    python examples/external_pool.py --model tiny

Replicas may join, drain and die meanwhile. When this ends, they go on serving its last version,
and when it is started again, its versions are numbered from there.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trainer_side import Publisher, RolloutClient, Sampling, pad

WAIT = 300.0
PROMPTS, SAMPLES = 8, 4
SAMPLING = Sampling(max_tokens=16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from the rollouts of a pool that runs.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--policy", default="math", help="the adapter's name in the pool")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device)
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)

    # Credentials come from the environment (WEFT_TLS_CA, WEFT_TOKEN_FILE, ...), if any. Both wait:
    # the one for its coordinator, the other for replicas, too.
    with (
        Publisher(
            args.coordinator, trainer_id="external-example", connect_seconds=WAIT
        ) as publisher,
        RolloutClient(args.coordinator, connect_seconds=WAIT) as rollouts,
    ):
        version = publisher.push_adapter(model, args.policy).version
        print(f"joined, pushed {version}")
        for _ in range(args.steps):
            # Made up, all of one length; your prompts go here.
            prompts = torch.randint(model.config.vocab_size, (PROMPTS, 8)).tolist()
            groups = rollouts.generate(prompts, model=version, n=SAMPLES, sampling=SAMPLING)
            batch = pad(groups, pad_token_id=0)
            ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1).to(device)
            width, mask = batch.completion_ids.shape[1], batch.completion_mask.to(device)

            # Made up: the share of even tokens; your reward goes here.
            even = (batch.completion_ids % 2 == 0) & batch.completion_mask
            reward = even.sum(1) / batch.completion_mask.sum(1)
            groups_of = reward.view(PROMPTS, SAMPLES)
            advantage = (groups_of - groups_of.mean(1, keepdim=True)).view(-1, 1).to(device)

            # What is said of a token stands one column before it.
            logits = model(input_ids=ids).logits[:, -width - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)
            loss = -(logprobs * advantage * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            made_by, version = version, publisher.push_adapter(model, args.policy).version
            replicas = {replica for group in groups for replica in group.replica_ids}
            print(
                f"reward {reward.mean():.3f} of samples by {made_by} from {len(replicas)} "
                f"replicas, pushed {version}"
            )


if __name__ == "__main__":
    main()
