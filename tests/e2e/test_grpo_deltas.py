"""The GRPO example with deltas earns what it earns with whole pushes, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo import train
from examples.grpo.warm_up import make_warm_model
from tests.e2e.replicas import running_coordinator, running_replicas
from trainer_side import Publisher
from trainer_side.deltas.choice import DeltaMode
from trainer_side.push_request import PushReport
from weft_rl.transport.digests.wsum64 import content_digest, digests_of

STEPS = 3
#: One sequence at a time: what a processor sums does not depend on who asks beside.
ENGINE = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "32", "--max-num-seqs", "1",
    "--no-enable-prefix-caching",
)  # fmt: skip


@dataclass
class Run:
    """Course of one run of the example, step by step."""

    rewards: list[float] = field(default_factory=list)
    samples: list[list[list[int]]] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    ratios: list[tuple[float, float]] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)
    """Content digests of what was pushed."""
    reports: list[PushReport] = field(default_factory=list)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo")


@pytest.fixture(scope="module")
def target(work: Path) -> Iterator[str]:
    """Coordinator of a pool of one replica with the warmed model."""
    model = work / "model"
    make_warm_model(model, steps=60)
    with (
        running_coordinator(work) as coordinator,
        running_replicas(work, coordinator.target, [model], *ENGINE),
    ):
        yield coordinator.target


def run(
    target: str, model: Path, delta: DeltaMode, monkeypatch: pytest.MonkeyPatch, seed: int = 0
) -> Run:
    """Run the example's trainer, which trains one layer: float32 changes wherever it is trained."""
    seen = Run()
    load, pad = train.load_model, train.pad

    def load_frozen(settings: train.Settings) -> Any:
        module = load(settings)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("layers.0.self_attn" in name)
        return module

    def pad_noting(groups: Any, **settings: Any) -> Any:
        batch = pad(groups, **settings)
        seen.samples.append(batch.completion_ids.tolist())
        seen.logprobs.append(batch.logprobs.clone())
        return batch

    def push(publisher: Publisher, module: Any, settings: train.Settings) -> Any:
        version, report = publisher.push_base(module)
        seen.reports.append(report)
        seen.weights.append(content_digest(digests_of(module.parameters())))
        return version

    def note(step: train.Step) -> None:
        seen.rewards.append(step.reward)
        seen.ratios.append((step.ratio, step.ratio_distance))

    with monkeypatch.context() as patched:
        patched.setattr(train, "load_model", load_frozen)
        patched.setattr(train, "pad", pad_noting)
        patched.setattr(train, "_push", push)
        patched.setattr(train, "Publisher", functools.partial(Publisher, delta=delta))
        train.train(
            train.Settings(
                coordinator=target, model=model, steps=STEPS, seed=seed, learning_rate=5e-3
            ),
            note,
        )
    return seen


@pytest.mark.matrix
def test_deltas_earn_what_whole_pushes_earn_bit_by_bit(
    target: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(target, work / "model", "never", monkeypatch)
    deltas = run(target, work / "model", "always", monkeypatch)
    assert [r.delta.is_delta for r in deltas.reports] == [False] + [True] * STEPS
    assert not any(r.delta.is_delta for r in whole.reports)
    assert len(set(whole.weights)) == STEPS + 1, "nothing was learnt"
    assert deltas.rewards == whole.rewards
    assert deltas.samples == whole.samples
    assert all(map(torch.equal, deltas.logprobs, whole.logprobs))
    assert (deltas.ratios, deltas.weights) == (whole.ratios, whole.weights)
    assert 0 < sum(whole.rewards) / STEPS < 1
