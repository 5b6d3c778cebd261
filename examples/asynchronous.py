"""Generation that goes on while the trainer learns and pushes, beside the way that takes turns.

    weft coordinator
    weft rollout -- tiny --enable-lora --max-lora-rank 8
    python examples/asynchronous.py --model tiny

Taking turns, one step is: generate, learn, push. Here replicas generate the next batch by the
version before while this one is learnt from, and the push runs beside both: the trainer waits
for nothing but its data. No sample is more than `--max-staleness` versions old when it is used.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trainer_side import Publisher, PushResult, RolloutClient, SampleGroup, Sampling, pad

PROMPTS, SAMPLES, TOKENS = 8, 4, 32
SAMPLING = Sampling(max_tokens=TOKENS)


class Trainer:
    """A model that learns from groups of samples, and where its time goes."""

    def __init__(self, path: str) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(self.device)
        lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(model, lora)
        self.optimizer = torch.optim.AdamW(
            (p for p in self.model.parameters() if p.requires_grad), lr=5e-3
        )
        self.seconds: Counter[str] = Counter()
        self.staleness: list[float] = []
        self.rewards: list[float] = []

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[what] += time.monotonic() - began

    def prompts(self) -> Iterator[list[int]]:
        """Made up, all of one length; yours go here."""
        while True:
            yield torch.randint(self.model.config.vocab_size, (8,)).tolist()

    def learn(self, groups: list[SampleGroup], newest: int) -> None:
        """One step from samples that may be older than the weights, which are of ``newest``."""
        batch = pad(groups, pad_token_id=0)
        ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1).to(self.device)
        width, mask = batch.completion_ids.shape[1], batch.completion_mask.to(self.device)
        # Made up: the share of even tokens; your reward goes here.
        even = (batch.completion_ids % 2 == 0) & batch.completion_mask
        reward = even.sum(1) / batch.completion_mask.sum(1)
        groups_of = reward.view(-1, SAMPLES)
        advantage = (groups_of - groups_of.mean(1, keepdim=True)).view(-1, 1).to(self.device)
        # What is said of a token stands one column before it. The clip is for older samples.
        logits = self.model(input_ids=ids).logits[:, -width - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)
        ratio = (logprobs - batch.logprobs.to(self.device)).masked_fill(~mask, 0.0).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-(gain * mask).sum() / mask.sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rewards.append(float(reward.mean()))
        self.staleness += (newest - batch.versions[batch.completion_mask]).tolist()


def take_turns(
    trainer: Trainer, publisher: Publisher, rollouts: RolloutClient, policy: str, steps: int
) -> None:
    prompts = trainer.prompts()
    version = publisher.push_adapter(trainer.model, policy).version
    with trainer.spending("all"):
        for _ in range(steps):
            with trainer.spending("data"):
                groups = rollouts.generate(
                    [*islice(prompts, PROMPTS)], model=version, n=SAMPLES, sampling=SAMPLING
                )
            trainer.learn(groups, version.version)
            with trainer.spending("pushes"):
                version = publisher.push_adapter(trainer.model, policy).version


def go_on(
    trainer: Trainer,
    publisher: Publisher,
    rollouts: RolloutClient,
    policy: str,
    steps: int,
    max_staleness: int,
) -> None:
    batch = PROMPTS * SAMPLES
    first = publisher.push_adapter(trainer.model, policy).version
    with (
        trainer.spending("all"),
        rollouts.stream(
            islice(trainer.prompts(), steps * PROMPTS),
            model=policy,
            n=SAMPLES,
            sampling=SAMPLING,
            min_version=first,
            batch_size=batch,
            max_staleness=max_staleness,
        ) as stream,
    ):

        def served(push: Future[PushResult]) -> None:
            if push.exception() is None:  # so many new prompts may be admitted
                stream.consumed(batch, version=push.result().version)
            else:
                stream.close()  # nobody is to wait for them

        pushes: list[Future[PushResult]] = []
        for step in range(steps):
            with trainer.spending("data"):
                groups = [*islice(stream, PROMPTS)]
            while pushes and pushes[0].done():
                pushes.pop(0).result()  # raises what failed
            # One trainer owns a policy: its versions are numbered without a gap.
            trainer.learn(groups, first.version + step)
            with trainer.spending("pushes"):  # to copy the adapter; it is sent beside
                push = publisher.push_adapter_async(trainer.model, policy)
            push.add_done_callback(served)
            pushes.append(push)
        with trainer.spending("pushes"):  # the last, beside which nothing is left to be done
            for push in pushes:
                push.result()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn while replicas generate, and in turns.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--policy", default="math", help="the adapter's name in the pool")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-staleness", type=int, default=1, help="versions")
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    args = parser.parse_args()

    # The pool may be starting beside this job: wait for its coordinator.
    with (
        Publisher(args.coordinator, trainer_id="async-example", connect_seconds=300) as publisher,
        RolloutClient(args.coordinator, connect_seconds=300) as rollouts,
    ):
        turns, beside = Trainer(args.model), Trainer(args.model)
        take_turns(turns, publisher, rollouts, args.policy, args.steps)
        go_on(beside, publisher, rollouts, args.policy, args.steps, args.max_staleness)
    for name, trainer in (("in turns", turns), ("asynchronous", beside)):
        seconds, stale = trainer.seconds, trainer.staleness
        print(
            f"{name}: {args.steps} steps in {seconds['all']:.1f} s, "
            f"{seconds['data'] / seconds['all']:.0%} of it waiting for data, "
            f"{seconds['pushes'] / seconds['all']:.0%} in pushes; "
            f"staleness {sum(stale) / len(stale):.2f} on average, {max(stale)} at most; "
            f"reward {trainer.rewards[0]:.2f} to {trainer.rewards[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
