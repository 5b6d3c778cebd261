"""Ten trainers push at once, as fast as they can: each gets its turn.

Counted by what the coordinator decided and in what order, not by time.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, peft_of, weights
from trainer_side import Publisher
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.runtime import driver

NUM_ADAPTERS = 9
PUSHES = 4
POLICIES = ("base", *(f"adapter-{i}" for i in range(NUM_ADAPTERS)))


class Log:
    """("asks" | "turn", policy) in the order in which the coordinator decided."""

    def __init__(self, monkeypatch):
        self.entries = []
        decide = driver.step

        def step(state, event, now):
            if isinstance(event, events.BeginTransfer):
                self.entries.append(("asks", event.policy))
            state, made = decide(state, event, now)
            self.entries += [
                ("turn", state.transfers[effect.subject].policy)
                for effect in made
                if isinstance(effect, effects.Announce) and effect.kind == "transfer_begun"
            ]
            return state, made

        monkeypatch.setattr(driver, "step", step)

    def all_have_asked(self):
        return {policy for kind, policy in self.entries if kind == "asks"} == set(POLICIES)

    def waits(self):
        """Of each turn: which policies had theirs since it was asked for, in order."""
        since, waits = {}, []
        for kind, policy in self.entries:
            if kind == "asks":
                since[policy] = []
                continue
            waits.append((policy, since.pop(policy)))
            for others in since.values():
                others.append(policy)
        assert not since, f"{sorted(since)} asked and never had a turn"
        return waits


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch)


def push_all(target, policy, model, barrier):
    with Publisher(target, trainer_id=f"trainer-of-{policy}", timeout_seconds=60) as publisher:
        barrier.wait(30)
        for _ in range(PUSHES):
            if policy == "base":
                publisher.push_base(model)
            else:
                publisher.push_adapter(model, policy)


def test_ten_trainers_that_push_at_once_all_get_their_turns(tmp_path, log, monkeypatch):
    for name in ("load_adapter", "apply_base"):
        load = getattr(EngineDouble, name)

        async def gated(self, *args, load=load):
            async with asyncio.timeout(20):
                while not log.all_have_asked():
                    await asyncio.sleep(0.005)
            return await load(self, *args)

        monkeypatch.setattr(EngineDouble, name, gated)
    models = {
        policy: Model(1) if policy == "base" else peft_of(Model(), seed=i)
        for i, policy in enumerate(POLICIES)
    }
    barrier = threading.Barrier(len(POLICIES))
    with running_pool(tmp_path / "weft.db") as pool, ThreadPoolExecutor(len(POLICIES)) as threads:
        for i in range(2):
            pool.add_replica(f"replica-{i}", EngineDouble(weights(Model())))
        pushing = [
            threads.submit(push_all, pool.target, policy, model, barrier)
            for policy, model in models.items()
        ]
        for trainer in pushing:
            trainer.result(60)
        vectors = [agent.serving.vector for agent in pool.agents.values()]
    for vector in vectors:
        assert vector.base == PUSHES
        assert {name: v.alias for name, v in vector.adapters.items()} == dict.fromkeys(
            POLICIES[1:], PUSHES
        )
    waits = log.waits()
    assert len(waits) == len(POLICIES) * PUSHES
    for policy, others in waits:
        assert len(set(others)) == len(others), f"{policy} was overtaken twice: {others}"
    # The first load waited until all had asked: one of them had to let eight go first.
    assert max(len(others) for _, others in waits) >= NUM_ADAPTERS - 1
