"""Trainings by AsyncGRPOTrainer as processes, and what must hold of their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft_rl.cli.demo.processes import Process

_SECONDS = 240.0
_RATIO_ERROR = 1e-3


def train_async(
    work: Path, target: str, model: Path, policy: str, staleness: int, steps: int
) -> dict[str, Any]:
    """Train over a pool by ``async_trainer.py``; how it went."""
    args = ("-m", "tests.integrations.trl.async_trainer", target, str(model), str(work), policy,
            str(staleness), str(steps))  # fmt: skip
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = Process(f"async-{policy}-{staleness}", args, work, env)
    try:
        return process.answer(_SECONDS)
    finally:
        process.stop()


def check_samples(outcome: dict[str, Any], steps: int) -> list[bool]:
    """Check what the trainer pushed and how stale samples are; tell whether each sample was made
    by the weights of the version that TRL takes it to be of, or of a later one."""
    assert "error" not in outcome, outcome
    first = outcome["versions"][0]
    assert outcome["versions"] == list(range(first, first + steps + 1))
    assert len(outcome["logs"]) == steps
    # What is trained first was made by just these weights. (TRL takes what comes next from its
    # queue before it trains, and counts staleness then.)
    assert outcome["logs"][0] == {"ratio": pytest.approx(1, abs=_RATIO_ERROR), "staleness": 0}
    # Weights of different versions are told apart by it.
    errors = [error for sample in outcome["samples"] for error in sample["errors"].values()]
    assert max(errors) > 10 * _RATIO_ERROR
    return [
        min(
            error
            for version, error in sample["errors"].items()
            if int(version) >= sample["version"]
        )
        <= _RATIO_ERROR
        for sample in outcome["samples"]
    ]
