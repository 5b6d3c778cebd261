"""``python -m benchmarks.named``: what ``push_tensors`` costs beside a model's push.

256 MiB in 64 tensors to one engine double in a process of its own, over real gRPC and gloo.
The ways take turns, so that a busy machine slows all of them alike; the ratio is what counts.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.machine import describe
from benchmarks.push import coordinator, doubles, model_of
from trainer_side import Publisher, PushResult

_NUM_TENSORS, _ELEMENTS, _ROUNDS = 64, 2**20, 7


def main() -> None:
    """Print the figures, and what they were measured on."""
    model = model_of(_NUM_TENSORS, _ELEMENTS)
    pairs = [(name, param.detach()) for name, param in model.named_parameters()]
    shuffled = random.Random(1).sample(pairs, len(pairs))
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as work,
        coordinator(Path(work), "named") as target,
        doubles(Path(work), target, 1, _NUM_TENSORS, _ELEMENTS),
        Publisher(target, trainer_id="bench", progress=None) as publisher,
    ):
        ways: dict[str, Callable[[], PushResult]] = {
            "a model": lambda: publisher.push_base(model),
            "named tensors in the model's order": lambda: publisher.push_tensors(pairs),
            "named tensors in another order": lambda: publisher.push_tensors(shuffled),
            "with metadata": lambda: publisher.push_tensors(pairs, metadata=pairs),
        }
        for _ in range(_ROUNDS):
            for way, push in ways.items():
                seconds.setdefault(way, []).append(push().report.seconds)
    print(describe())
    medians = {way: statistics.median(taken[1:]) for way, taken in seconds.items()}
    for way, median in medians.items():
        print(
            f"{way}: {median * 1e3:.0f} ms for {_NUM_TENSORS * _ELEMENTS * 4 / 2**20:.0f} MiB, "
            f"{median / medians['a model']:.2f} times a model's push (median of {_ROUNDS - 1})"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
