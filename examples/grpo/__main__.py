"""Runs it all: model, warm-up, replicas, a trainer of every weight, then two of adapters.

make grpo
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from examples.grpo.plot import plot
from examples.grpo.pool import running_pool
from examples.grpo.train import Step
from examples.grpo.warm_up import make_warm_model
from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process, interrupt_once

#: Of the first step, that of a whole process's start and first push.
_FIRST_SECONDS, _STEP_SECONDS = 120.0, 60.0
#: How many steps say what was reached in the end.
_LAST = 10
#: About 0.5: what the warm-up leaves to be learnt.
_AT_FIRST = (0.35, 0.65)
_MEAN_RATIO = 1e-3


@dataclass(frozen=True)
class Trainer:
    """One trainer of a run, and what it must reach."""

    name: str
    options: tuple[str, ...]
    over: float


_FULL = Trainer("full", ("--learning-rate", "5e-4", "--seed", "0"), 0.85)
_ADAPTERS = (
    Trainer(
        "math, rank 8",
        ("--policy", "math", "--rank", "8", "--learning-rate", "2e-3", "--seed", "1"),
        0.70,
    ),
    Trainer(
        "sums, rank 16",
        ("--policy", "sums", "--rank", "16", "--learning-rate", "1e-3", "--seed", "2"),
        0.70,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="GRPO with rollouts from vLLM replicas.")
    parser.add_argument("--steps", type=int, default=60, help="of each trainer")
    parser.add_argument("--work", type=Path, default=Path("build/grpo"), help="logs and the PNG")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt_once)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    (work / "weft.db").unlink(missing_ok=True)  # versions count from 1 again

    began = time.monotonic()
    model = work / "model"
    make_warm_model(model)
    say(began, f"warmed a model up: {model}")
    with running_pool(work, model) as target:
        say(began, f"two replicas serve it; the coordinator listens on {target}")
        runs = run_trainers(work, target, model, args.steps, [_FULL])
        say(began, "trained every weight; the replicas get the warmed model back")
        # Not both kinds at once: each push of the base changes what adapters are served over.
        with Publisher(target, trainer_id="grpo-example") as publisher:
            base = publisher.push_base(model).version
        say(began, f"pushed it as {base}; adapters of it are trained by two at once")
        adapters = [
            Trainer(each.name, (*each.options, "--base", f"only {base}"), each.over)
            for each in _ADAPTERS
        ]
        runs |= run_trainers(work, target, model, args.steps, adapters)
    plot(work / "grpo.png", runs)
    say(began, f"drew {work / 'grpo.png'}")
    show(runs)
    missed = [
        sentence
        for trainer in (_FULL, *_ADAPTERS)
        for sentence in missed_bounds(trainer, runs[trainer.name])
    ]
    for sentence in missed:
        print(f"MISSED: {sentence}")
    return 1 if missed else 0


def run_trainers(
    work: Path, target: str, model: Path, num_steps: int, trainers: Sequence[Trainer]
) -> dict[str, list[Step]]:
    """Run trainers at once, each a process; returns what each saw of its steps.

    Raises:
        WeftError: One ended early, or said nothing for a minute; shows the end of its log.
    """
    common = ("--coordinator", target, "--model", str(model), "--steps", str(num_steps))
    with ExitStack() as stack:
        processes = {}
        for trainer in trainers:
            args = ("-m", "examples.grpo.train", *common, *trainer.options)
            processes[trainer.name] = Process(trainer.name.split(",")[0], args, work, {})
            stack.callback(processes[trainer.name].stop)
        runs: dict[str, list[Step]] = {name: [] for name in processes}
        for number in range(num_steps):
            for name, process in processes.items():
                seconds = _STEP_SECONDS if number else _FIRST_SECONDS
                runs[name].append(Step(**process.answer(seconds)))
                if number % 10 == 9:
                    recent = fmean(each.reward for each in runs[name][-10:])
                    print(f"  {name}: step {number + 1}, reward of the last 10 {recent:.2f}")
        for process in processes.values():
            process.wait(_STEP_SECONDS)
    return runs


def missed_bounds(trainer: Trainer, steps: Sequence[Step]) -> list[str]:
    """A sentence for each bound that a run missed."""
    first = steps[0].reward
    last = fmean(each.reward for each in steps[-_LAST:])
    missed = []
    if not _AT_FIRST[0] <= first <= _AT_FIRST[1]:
        missed.append(f"{trainer.name}: reward {first:.2f} at first, which is not about 0.5")
    if not last > trainer.over:
        missed.append(f"{trainer.name}: reward {last:.2f} at last, not over {trainer.over:.2f}")
    missed += [
        f"{trainer.name}: mean importance ratio {each.ratio:.6f} at step {each.step}"
        for each in steps
        if not abs(each.ratio - 1) <= _MEAN_RATIO
    ]
    return missed


def show(runs: dict[str, list[Step]]) -> None:
    """Print a table, in Markdown."""
    print(
        "\n| trainer | reward of the first step | of the last 10 | distance from 1, at most: of a "
        "step's mean ratio | of a token's | versions | a step: generate | learn | push |\n"
        f"|{'---|' * 9}"
    )
    for name, steps in runs.items():
        rewards = [each.reward for each in steps]
        mean = max(abs(each.ratio - 1) for each in steps)
        token = max(each.ratio_distance for each in steps)
        seconds = [
            f"{fmean(getattr(each, part) for each in steps):.2f} s"
            for part in ("generate_seconds", "learn_seconds", "push_seconds")
        ]
        print(
            f"| {name} | {rewards[0]:.2f} | {fmean(rewards[-_LAST:]):.2f} | "
            f"{mean:.1e} | {token:.1e} | {steps[0].version} to {steps[-1].version} | "
            f"{' | '.join(seconds)} |"
        )


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
