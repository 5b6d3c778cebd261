"""Bases that are loaded as they arrive by a replica of two ranks: real coordinator, real
transport, the real hand-off between the ranks; both are doubles in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollout_side.memory.handoff import Handoff, InPlaceLoad, RankHandoff, RankServer
from rollout_side.memory.versions import tensor_in
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, same, until, weights
from tests.integration.test_in_place_receive import WAIT_SECONDS, Gate, begin, load, push, trainer
from weft_rl.contract.backends import GLOO
from weft_rl.contract.errors import LoadFailedError
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.group import CPU, window


class OtherRank:
    """What the second rank loads."""

    def __init__(self, base: dict[str, torch.Tensor]) -> None:
        self.base = base
        self.before_bucket: Callable[[int], None] = lambda index: None

    def load(self, handoff: Handoff) -> None:
        for index, wire in handoff.buckets():
            self.before_bucket(index)
            for slot in (s for s in handoff.manifest.tensors if s.bucket == index):
                self.base[slot.meta.name] = tensor_in(slot, wire).clone()


class TwoRanks(EngineDouble):
    """A replica whose second rank is told what to load when the first is."""

    def __init__(self, base: dict[str, torch.Tensor]) -> None:
        super().__init__(base, in_place=True, loads_in_place=False)
        self.store.num_ranks = 2
        self.secret = secrets.token_hex(8)
        self.ranks = RankServer(self.secret, self.store.handoff.of, self.store.followers.serve)
        self.other = OtherRank(dict(base))
        self.other_load: InPlaceLoad | None = None

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        former = self.load
        await super().load_in_place(transfer_id, version, timeout_seconds)
        if self.load is not former:
            handoff = RankHandoff(self.secret, 1, transfer_id, version)
            self.other_load = InPlaceLoad(handoff, self.other.load)


@pytest.fixture
def engine(pool: Pool) -> Iterator[TwoRanks]:
    made = TwoRanks(weights(Model(50)))
    pool.add_replica("replica-0", made)
    yield made
    made.ranks.close()
    if made.other_load is not None:
        made.other_load.end()


def holds(engine: TwoRanks, model: Model) -> bool:
    return same(engine.base, weights(model)) and same(engine.other.base, weights(model))


@pytest.mark.parametrize("backend", ["gloo", "one-sided"])
def test_both_ranks_load_what_one_receives(pool: Pool, engine: TwoRanks, backend: Any) -> None:
    with trainer(pool, backend=backend) as publisher:
        for seed in (1, 2):
            assert str(push(pool, publisher, Model(seed))) == f"base@{seed}"
            assert holds(engine, Model(seed))
            assert engine.other_load is not None
            assert engine.other_load.is_complete


def test_no_more_is_received_than_the_slower_rank_has_loaded(pool: Pool, engine: TwoRanks) -> None:
    gate = Gate(engine.other, 1)
    with trainer(pool, backend="gloo") as publisher:
        pushing = begin(publisher, Model(1))
        transfer_id = load(pool)
        assert gate.reached.wait(WAIT_SECONDS)
        handoff = engine.store.handoff.of(transfer_id)
        assert handoff is not None
        until(lambda: len(handoff.digests) == 1 + window(CPU, GLOO))
        assert not handoff.is_loaded(1)
        gate.open()
        pushing.result(WAIT_SECONDS)
    assert holds(engine, Model(1))


def test_a_load_goes_on_in_the_buffers_of_another_group(pool: Pool, engine: TwoRanks) -> None:
    lost = EngineDouble(weights(Model(50)), in_place=True, loads_in_place=False)
    pool.add_replica("replica-1", lost)
    gate = Gate(engine.other, 3)
    with trainer(pool, require=1) as publisher:
        pushing = begin(publisher, Model(1))
        load(pool)
        load(pool, "replica-1")
        assert gate.reached.wait(WAIT_SECONDS)
        former = engine.other_load
        pool.remove_replica("replica-1")
        gate.open()
        pushing.result(WAIT_SECONDS)
    assert engine.other_load is former  # one load, over two groups
    assert holds(engine, Model(1))
    assert not engine.dirty_reason


def test_a_rank_that_fails_midway_makes_the_replica_dirty_until_a_base_is_pushed(
    pool: Pool, engine: TwoRanks
) -> None:
    def burn(index: int) -> None:
        if index == 2:
            raise LoadFailedError("a layer burned", metadata={"dirty": "true"})

    engine.other.before_bucket = burn
    with trainer(pool) as publisher:
        pushing = begin(publisher, Model(1))
        failed = load(pool)
        with pytest.raises(LoadFailedError, match="a layer burned"):
            pushing.result(WAIT_SECONDS)
        until(lambda: bool(engine.dirty_reason))
        assert engine.other_load is not None
        assert engine.other_load.end()
        engine.other.before_bucket = lambda index: None
        pushing = begin(publisher, Model(2))
        load(pool, former=failed)
        pushing.result(WAIT_SECONDS)
    assert holds(engine, Model(2))
    assert not pool.agents["replica-0"].serving.dirty_reason
