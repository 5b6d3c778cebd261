"""Bases that are loaded as they arrive: real coordinator, real gloo, engine double.

The tests order the load themselves, so that they choose its moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, lora, peft_of, same, until, weights
from trainer_side import Publisher, PushResult
from weft_rl.contract.backends import GLOO
from weft_rl.contract.errors import LoadFailedError, WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.group import CPU, window

WAIT_SECONDS = 20.0
#: Deadline of a push whose receivers wait for a load that never comes: nothing else ends it.
_END_SECONDS = 6.0


class Gate:
    """Holds a double's loader before a bucket, until it is opened."""

    def __init__(self, engine: Any, at: int) -> None:
        self.reached, self._open, self._at = threading.Event(), threading.Event(), at
        engine.before_bucket = self._before

    def _before(self, index: int) -> None:
        if index == self._at:
            self.reached.set()
            assert self._open.wait(WAIT_SECONDS)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def engine(pool: Pool) -> EngineDouble:
    return add(pool, "replica-0")


def add(pool: Pool, replica_id: str) -> EngineDouble:
    """A replica whose engine loads in place when the test orders it."""
    engine = EngineDouble(weights(Model(50)), in_place=True, loads_in_place=False)
    pool.add_replica(replica_id, engine)
    return engine


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with trainer(pool) as running:
        yield running


def trainer(pool: Pool, **settings: Any) -> Publisher:
    settings = {"timeout_seconds": 20.0, "bucket_bytes": 2048} | settings
    return Publisher(pool.target, trainer_id="trainer-a", **settings)


def begin(publisher: Publisher, model: Model) -> Future[PushResult]:
    """Push in a thread of its own, which ends with the push."""
    threads = ThreadPoolExecutor(1)
    push = threads.submit(publisher.push_base, model)
    threads.shutdown(wait=False)
    return push


def load(pool: Pool, replica_id: str = "replica-0", former: str = "") -> str:
    """Have a replica load what it was prepared for; returns the transfer."""
    agent = pool.agents[replica_id]
    engine = agent.engine
    assert isinstance(engine, EngineDouble)
    until(lambda: engine.store.handoff.transfer_ids not in ((), (former,)), WAIT_SECONDS)
    (transfer_id,) = engine.store.handoff.transfer_ids
    pool.run(agent.serving.load_in_place(transfer_id, PolicyVersion("base", 1), 60.0))
    return transfer_id


def push(pool: Pool, publisher: Publisher, model: Model) -> PolicyVersion:
    pushing = begin(publisher, model)
    for replica_id in pool.agents:
        load(pool, replica_id)
    return pushing.result(WAIT_SECONDS)


def test_pushes_are_loaded_as_they_arrive(pool: Pool, publisher: Publisher) -> None:
    engines = [add(pool, "replica-0"), add(pool, "replica-1")]
    adapter = peft_of(Model(), 1)
    publisher.push_adapter(adapter, "math")
    for seed in (1, 2):
        assert str(push(pool, publisher, Model(seed))) == f"base@{seed}"
        for engine in engines:
            assert same(engine.base, weights(Model(seed)))
            assert same(engine.adapter("math@1"), lora(adapter))
            assert engine.store.usage().staged_transfer_ids == ()
            assert engine.store.usage().staging_bytes == 0
            assert not engine.loading
    for agent in pool.agents.values():
        assert agent.serving.vector.base == 2


def test_no_more_is_received_than_the_buffers_hold(
    pool: Pool, engine: EngineDouble, publisher: Publisher
) -> None:
    gate = Gate(engine, 1)
    pushing = begin(publisher, Model(1))
    transfer_id = load(pool)
    assert gate.reached.wait(WAIT_SECONDS)
    handoff = engine.store.handoff.of(transfer_id)
    assert handoff is not None
    # Bucket 1 is being loaded; the others' buffers are full.
    until(lambda: len(handoff.digests) == 1 + window(CPU, GLOO))
    assert pool.agents["replica-0"].serving.is_switching
    assert transfer_id in pool.agents["replica-0"].serving.memory.staged_transfer_ids
    assert not pushing.done()
    assert len(handoff.digests) == 1 + window(CPU, GLOO)
    gate.open()
    pushing.result(WAIT_SECONDS)
    assert same(engine.base, weights(Model(1)))
    assert not pool.agents["replica-0"].serving.is_switching


def test_what_was_received_before_the_order_waits_for_it(
    pool: Pool, engine: EngineDouble, publisher: Publisher
) -> None:
    pushing = begin(publisher, Model(1))
    until(lambda: bool(engine.store.handoff.transfer_ids))
    handoff = engine.store.handoff.of(*engine.store.handoff.transfer_ids)
    assert handoff is not None
    until(lambda: len(handoff.digests) == window(CPU, GLOO))
    load(pool)
    pushing.result(WAIT_SECONDS)
    assert same(engine.base, weights(Model(1)))


def test_a_load_goes_on_when_another_replica_is_lost(pool: Pool, engine: EngineDouble) -> None:
    add(pool, "replica-1")
    gate = Gate(engine, 3)
    with trainer(pool, require=1) as publisher:
        pushing = begin(publisher, Model(1))
        transfer_id = load(pool)
        load(pool, "replica-1")
        assert gate.reached.wait(WAIT_SECONDS)
        former = engine.load
        pool.remove_replica("replica-1")
        gate.open()
        pushing.result(WAIT_SECONDS)
    assert former is not None
    assert former.transfer_id == transfer_id
    assert former.is_complete  # one load, over two groups
    assert same(engine.base, weights(Model(1)))
    assert not engine.dirty_reason


def test_a_receiver_that_waits_for_the_engine_follows_into_a_new_group(
    pool: Pool, engine: EngineDouble
) -> None:
    """No load was ordered: only the end of the group can wake it."""
    add(pool, "replica-1")
    with trainer(pool, require=1) as publisher:
        pushing = begin(publisher, Model(1))
        for agent in pool.agents.values():
            store = agent.engine.store  # type: ignore[attr-defined]
            until(lambda store=store: bool(store.handoff.transfer_ids))
        handoff = engine.store.handoff.of(*engine.store.handoff.transfer_ids)
        assert handoff is not None
        until(lambda: len(handoff.digests) == window(CPU, GLOO))
        pool.remove_replica("replica-1")
        load(pool)
        pushing.result(WAIT_SECONDS)
    assert same(engine.base, weights(Model(1)))


def test_an_engine_that_fails_midway_is_dirty_until_a_base_is_pushed(
    pool: Pool, engine: EngineDouble, publisher: Publisher
) -> None:
    def burn(index: int) -> None:
        if index == 2:
            raise LoadFailedError("a layer burned", metadata={"dirty": "true"})

    engine.before_bucket = burn
    pushing = begin(publisher, Model(1))
    failed = load(pool)
    with pytest.raises(LoadFailedError, match="a layer burned"):
        pushing.result(WAIT_SECONDS)
    until(lambda: bool(engine.dirty_reason))
    assert pool.agents["replica-0"].serving.dirty_reason == engine.dirty_reason
    engine.before_bucket = lambda index: None
    pushing = begin(publisher, Model(2))
    load(pool, former=failed)
    pushing.result(WAIT_SECONDS)
    assert same(engine.base, weights(Model(2)))
    assert not pool.agents["replica-0"].serving.dirty_reason


def test_a_push_that_ends_early_leaves_the_engine_as_it_was_if_nothing_was_loaded(
    pool: Pool, engine: EngineDouble
) -> None:
    before = dict(engine.base)
    add(pool, "replica-1")
    with trainer(pool, timeout_seconds=_END_SECONDS) as publisher:  # which needs all replicas
        pushing = begin(publisher, Model(1))
        until(lambda: bool(engine.store.handoff.transfer_ids))
        handoff = engine.store.handoff.of(*engine.store.handoff.transfer_ids)
        assert handoff is not None
        until(lambda: len(handoff.digests) == window(CPU, GLOO))
        pool.remove_replica("replica-1")
        with pytest.raises(WeftError):
            pushing.result(WAIT_SECONDS)
    until(lambda: handoff.error is not None)
    assert engine.store.usage().staged_transfer_ids == ()
    assert same(engine.base, before)
    assert not engine.dirty_reason
    with pytest.raises(WeftError, match="not prepared"):
        pool.run(engine.load_in_place(handoff.transfer_id, handoff.version, 1.0))
