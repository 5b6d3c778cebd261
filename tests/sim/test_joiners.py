"""Replicas catch up while trainers push without a break, and no push fails for it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.sim.replica import Kind
from tests.sim.trainer import SimTrainer
from tests.sim.world import World
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state.replica_state import explain_state
from weft_rl.coordinator.decisions.state.values import ReplicaState

#: Pushes under way when a replica comes, and when the clone of its base has its turn.
_MORE_PUSHES = 5
_MORE_SECONDS = 5.0


def _world(seed: int, policies: list[str]) -> World:
    """A healthy pool of two with a base; a trainer for each policy pushes, and at once again."""
    world = World(seed)
    world.quiet = True
    world.faults.stop()
    world.operator.crash()
    for process in (*world.trainers.values(), *world.replicas.values()):
        process.crash()
    world.trainers.clear()
    world.replicas.clear()
    for name in ("r0", "r1"):
        world.start_replica(name, Kind(1, 1))
    world.start_trainer("first", ["base", *policies])
    for policy in ("base", *policies):
        push = world.trainers["first"].spawn(world.trainers["first"].push(policy, 30.0))
        while not push.done:
            world.clock.run_until(world.clock.now + 0.5)
        assert push.value.error is None
    world.trainers.pop("first").crash()
    world.clock.run_until(world.clock.now + 10.0)
    for policy in policies:
        world.start_trainer(policy, [policy])
        world.trainers[policy].spawn(_pushing(world.trainers[policy], policy))
    world.clock.run_until(world.clock.now + 3.0)
    return world


def _pushing(trainer: SimTrainer, policy: str) -> Generator[Any, Any, None]:
    while True:
        yield from trainer.push(policy, 10.0)


def _until_ready(world: World, name: str) -> tuple[int, float]:
    """Pushes that ended meanwhile, none in failure, and seconds."""
    pushes = [push for trainer in world.trainers.values() for push in trainer.pushes]
    before, began = sum(push.done for push in pushes), world.clock.now
    while world.clock.now < began + 60:
        world.clock.run_until(world.clock.now + 0.05)
        state = world.coordinator.state
        joiner = state.replicas.get(name)
        if joiner and explain_state(state, joiner)[0] is ReplicaState.READY:
            break
    pushes = [push for trainer in world.trainers.values() for push in trainer.pushes]
    assert [push.error for push in pushes if push.error] == []
    clones = [t.policy for t in world.coordinator.state.history.values() if t.source]
    assert "base" in clones, "it was not brought by pushes alone"
    return sum(push.done for push in pushes) - before, world.clock.now - began


@pytest.mark.parametrize("seed", range(10))
def test_between_the_pushes_of_one_trainer_a_clone_ends_after_three(seed: int) -> None:
    world = _world(seed, ["math"])
    world.start_replica("joiner", Kind(1, 1))
    num_pushes, _ = _until_ready(world, "joiner")
    limit = world.settings.clone_interruptions + _MORE_PUSHES
    assert num_pushes <= limit
    (base,) = [
        t
        for t in world.coordinator.state.history.values()
        if isinstance(t.purpose, Clone) and t.policy == "base"
    ]
    assert base.purpose.num_interruptions <= world.settings.clone_interruptions


@pytest.mark.parametrize("seed", range(10))
def test_where_trainers_always_wait_a_clone_goes_first_when_it_is_old(seed: int) -> None:
    world = _world(seed, ["code", "math"])
    world.start_replica("joiner", Kind(1, 1))
    _, seconds = _until_ready(world, "joiner")
    assert seconds <= world.settings.clone_patience_seconds + _MORE_SECONDS
