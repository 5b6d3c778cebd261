"""Faults planted in each step of a delta: each is found before the commit, and healed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.doubles.trainer_copy import deltas_of
from tests.integration.models import Model, same, step, weights
from trainer_side import Publisher, delta_selection
from trainer_side.deltas.committed_copy import CommittedCopy
from weft_rl.contract.manifest import Run, make_send_plan
from weft_rl.contract.names import PolicyVersion


@pytest.fixture
def engines(pool: Pool) -> list[EngineDouble]:
    """Engines of two replicas that stage, and of one that loads in place."""
    doubles = [EngineDouble(weights(Model()), base_copies=2) for _ in range(2)]
    doubles.append(EngineDouble(weights(Model()), in_place=True, is_readable=True))
    for number, engine in enumerate(doubles):
        pool.add_replica(f"replica-{number}", engine)
    return doubles


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=20, delta="always", bucket_bytes=2048
    ) as running:
        yield running


@pytest.fixture
def served(
    engines: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, torch.Tensor]]:
    """Record the weights that engines of both kinds have served, at each switch of one."""
    found: list[dict[str, torch.Tensor]] = []
    apply_base = EngineDouble.apply_base

    async def note(engine: EngineDouble, *order: Any) -> Any:
        done = await apply_base(engine, *order)
        found.append({name: tensor.clone() for name, tensor in engine.base.items()})
        return done

    monkeypatch.setattr(EngineDouble, "apply_base", note)
    return found


def alter_runs(
    monkeypatch: pytest.MonkeyPatch, alter: Callable[[tuple[Run, ...]], tuple[Run, ...]]
) -> None:
    """Have the trainer list other runs in a bucket of each delta than it compared."""
    pack = delta_selection.delta_packing

    def altered(*arguments: Any) -> Any:
        packing = pack(*arguments)
        runs = [alter(own) for own in packing.runs]
        wires = [
            replace(wire, num_runs=len(own))
            for wire, own in zip(packing.plan.buckets, runs, strict=True)
        ]
        plan = make_send_plan(packing.plan.num_senders, wires, packing.plan.delta_from)
        return replace(packing, plan=plan, runs=tuple(runs))

    monkeypatch.setattr(delta_selection, "delta_packing", altered)


@pytest.mark.parametrize(
    ("alter", "match"),
    [
        (lambda runs: runs[:-1], "did not come"),
        (lambda runs: (*runs[:-1], runs[0]), "came twice"),
    ],
)
def test_a_run_that_is_lost_or_comes_twice_is_found_and_all_is_sent(
    pool: Pool,
    engines: list[EngineDouble],
    served: list[dict[str, torch.Tensor]],
    alter: Callable[[tuple[Run, ...]], tuple[Run, ...]],
    match: str,
) -> None:
    model = Model(seed=1)
    with Publisher(
        pool.target, trainer_id="trainer-a", delta="always", timeout_seconds=20
    ) as publisher:
        publisher.push_base(model)
        step(model)
        num_served = len(served)
        with pytest.MonkeyPatch.context() as planted:
            alter_runs(planted, alter)
            report = publisher.push_base(model).report
        assert match in report.delta.whole_reason
        assert report.num_replicas == len(engines)
        assert all(same(base, weights(model)) for base in served[num_served:])
        for _ in range(2):  # one whole, for a pause
            step(model)
            report = publisher.push_base(model).report
        assert report.delta.is_delta
        assert all(same(engine.base, weights(model)) for engine in engines)


def flip(tensor: torch.Tensor, element: int) -> None:
    tensor.view(-1).view(torch.int32)[element] ^= 1 << 12


def copy_of(publisher: Publisher) -> CommittedCopy:
    copy = deltas_of(publisher).copy
    assert copy is not None
    return copy


def other_base(engines: list[EngineDouble], planted: pytest.MonkeyPatch) -> None:
    """A replica that stages takes its copy of an older base, and takes it for the wanted one."""
    store = engines[1].store
    older = store.held(PolicyVersion("base", store.retained_bases()[-1]))
    planted.setattr(store, "base_of_content", lambda *_: older)


def flip_in_place(engines: list[EngineDouble], planted: pytest.MonkeyPatch) -> None:
    """An old element of the weights that are served is another."""
    flip(engines[2].base["layers.1.q_proj.weight"], 100)


@pytest.mark.parametrize("plant", [other_base, flip_in_place])
def test_a_replica_with_another_base_than_it_says_is_found_and_healed(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    served: list[dict[str, torch.Tensor]],
    plant: Callable[[list[EngineDouble], pytest.MonkeyPatch], None],
) -> None:
    model = Model(seed=1)
    for _ in range(2):
        publisher.push_base(model)
        step(model)
    with torch.no_grad():
        model.layers[1]["q_proj"].weight.view(-1)[100] += 1
    num_served = len(served)
    with pytest.MonkeyPatch.context() as planted:
        plant(engines, planted)
        report = publisher.push_base(model).report
    assert "the pool refused a delta: replica-" in report.delta.whole_reason
    assert all(same(base, weights(model)) for base in served[num_served:])
    assert all(same(engine.base, weights(model)) for engine in engines)


@pytest.mark.parametrize("fault", ["never written", "at an element", "of another version"])
def test_a_copy_of_the_trainers_that_is_not_what_it_says_is_found_and_made_anew(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    served: list[dict[str, torch.Tensor]],
    fault: str,
) -> None:
    model = Model(seed=1)
    with pytest.MonkeyPatch.context() as planted:
        if fault == "never written":
            put = CommittedCopy.put

            def skip(copy: CommittedCopy, nth: int, *packed: Any) -> None:
                former = copy.payload(nth).clone()
                put(copy, nth, *packed)
                if nth == 1:
                    copy.payload(nth).copy_(former)

            planted.setattr(CommittedCopy, "put", skip)
        publisher.push_base(model)
    if fault == "at an element":
        flip(copy_of(publisher).payload(1), 100)
    elif fault == "of another version":
        step(model)
        with pytest.MonkeyPatch.context() as planted:
            planted.setattr(CommittedCopy, "apply", lambda *_: None)
            publisher.push_base(model)
        now = engines[2].store.served.base
        assert now is not None
        copy_of(publisher).committed(now.content_digest)
    num_served = len(served)
    step(model)
    report = publisher.push_base(model).report
    assert "the pool refused a delta: replica-" in report.delta.whole_reason
    assert all(same(base, weights(model)) for base in served[num_served:])
    assert all(same(engine.base, weights(model)) for engine in engines)
    for _ in range(2):  # one whole, for a pause, and one that is a delta of the new copy
        step(model)
        report = publisher.push_base(model).report
    assert report.delta.is_delta
    assert all(same(engine.base, weights(model)) for engine in engines)
