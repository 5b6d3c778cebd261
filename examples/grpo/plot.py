"""A picture of what the trainers saw: rewards, importance ratios, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.grpo.train import Step

_SMOOTHED = 5


def plot(path: Path, runs: Mapping[str, Sequence[Step]]) -> None:
    """Draw three panels over the steps, a line for each trainer, and write a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    reward, ratio, version = figure.subplots(3, 1, sharex=True)
    for place, (name, steps) in enumerate(runs.items()):
        numbers = [each.step for each in steps]
        (line,) = reward.plot(numbers, smoothed([each.reward for each in steps]), label=name)
        reward.plot(numbers, [each.reward for each in steps], alpha=0.25, color=line.get_color())
        ratio.plot(numbers, [each.ratio - 1 for each in steps], label=name)
        # They lie upon each other where no push was lost.
        version.plot(numbers, [each.version for each in steps], lw=7 - 3 * place, label=name)
    reward.set_ylabel(f"mean reward, and of {_SMOOTHED} steps")
    reward.set_ylim(0, 1)
    ratio.set_ylabel("mean importance ratio - 1")
    version.set_ylabel("version of the samples")
    version.set_xlabel("step")
    for panel in (reward, ratio, version):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it."""
    windows = [values[max(0, end - _SMOOTHED) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
