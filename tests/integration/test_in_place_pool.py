"""Pools that load in place: a real coordinator gives the orders, over real gRPC and gloo."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, same, until, weights
from trainer_side import Publisher
from weft_rl.contract.errors import LoadFailedError, WeftError
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

WAIT_SECONDS = 20.0


def add(
    pool: Pool, replica_id: str, *, in_place: bool = True, is_readable: bool = False
) -> EngineDouble:
    engine = EngineDouble(
        weights(Model(50)), in_place=in_place, is_readable=is_readable, base_copies=1
    )
    pool.add_replica(replica_id, engine)
    return engine


def trainer(pool: Pool, seconds: float = WAIT_SECONDS) -> Publisher:
    return Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=seconds, bucket_bytes=2048
    )


def standing(pool: Pool, replica_id: str) -> tuple[pb.ReplicaState, str]:
    with open_channel(pool.target) as channel:
        replicas = InspectServiceStub(channel).ListReplicas(pb.ListReplicasRequest()).replicas
    found = next(r for r in replicas if r.replica_id == replica_id)
    return found.state, found.state_reason


def is_ready(pool: Pool, replica_id: str) -> bool:
    return standing(pool, replica_id)[0] == pb.REPLICA_STATE_READY


def at_bucket(engine: EngineDouble, index: int, do: Callable[[], object]) -> None:
    """Once, before a bucket is loaded."""
    waiting = [do]

    def before(number: int) -> None:
        if number == index and waiting:
            waiting.pop()()

    engine.before_bucket = before


def test_they_serve_with_others_what_is_pushed(pool: Pool) -> None:
    engines = [add(pool, "replica-0"), add(pool, "replica-1", in_place=False)]
    with trainer(pool) as publisher:
        for seed in (1, 2, 3):
            publisher.push_base(Model(seed))
            for engine in engines:
                assert same(engine.base, weights(Model(seed)))
    assert engines[0].store.retained_bases() == ()
    assert is_ready(pool, "replica-0")


def test_one_that_is_lost_midway_does_not_cost_the_others_their_weights(pool: Pool) -> None:
    """``require="all"``, which counts when the push begins."""
    engine = add(pool, "replica-0")
    add(pool, "replica-1")
    at_bucket(engine, 2, lambda: pool.remove_replica("replica-1"))
    with trainer(pool) as publisher:
        report = publisher.push_base(Model(1), require="all").report
    assert report.num_replicas == 1
    assert same(engine.base, weights(Model(1)))


def test_one_whose_engine_fails_is_repaired_by_the_next_push(pool: Pool) -> None:
    good, bad = add(pool, "replica-0"), add(pool, "replica-1")

    def burn() -> None:
        raise LoadFailedError("a layer burned", metadata={"dirty": "true"})

    at_bucket(bad, 2, burn)
    with trainer(pool) as publisher:
        publisher.push_base(Model(1))
        assert same(good.base, weights(Model(1)))
        until(lambda: standing(pool, "replica-1")[0] == pb.REPLICA_STATE_QUARANTINED)
        publisher.push_base(Model(2))
    assert same(bad.base, weights(Model(2)))
    until(lambda: is_ready(pool, "replica-1"))


def test_a_push_that_runs_out_of_time_leaves_them_out_of_service(pool: Pool) -> None:
    """The staged replica serves on, and lends its copy to the one that cannot."""
    in_place, staged = add(pool, "replica-0"), add(pool, "replica-1", in_place=False)
    with trainer(pool) as publisher:
        publisher.push_base(Model(1))
    with trainer(pool, 3.0) as publisher:  # time to come to the bucket on a busy machine
        # The double's discard waits for this, and with it the loop that all are on: until the push
        # has ended, and before the replica says by itself that it waits no longer.
        ended = time.monotonic() + 3.5
        at_bucket(in_place, 2, lambda: time.sleep(max(0.0, ended - time.monotonic())))
        with pytest.raises(WeftError) as failed:
            publisher.push_base(Model(2), require="all")
    assert (failed.value.reason, failed.value.metadata["dirty"]) == ("DEADLINE", "true")
    assert "replica-0 had begun to load it in place" in failed.value.message
    assert same(staged.base, weights(Model(1)))
    until(lambda: is_ready(pool, "replica-0"), WAIT_SECONDS)
    assert same(in_place.base, weights(Model(1)))


def test_a_coordinator_that_dies_midway_finds_them_dirty(pool: Pool) -> None:
    engine = add(pool, "replica-0")
    at_bucket(engine, 2, pool.stop_coordinator)
    with trainer(pool, 5.0) as publisher:
        with pytest.raises(WeftError):
            publisher.push_base(Model(1))
        pool.start_coordinator()
        until(lambda: bool(engine.dirty_reason), WAIT_SECONDS)
        publisher.push_base(Model(2))
    assert same(engine.base, weights(Model(2)))
    until(lambda: is_ready(pool, "replica-0"), WAIT_SECONDS)


def test_what_one_serves_others_clone_though_it_kept_no_copy(pool: Pool) -> None:
    source = add(pool, "replica-0", is_readable=True)
    with trainer(pool) as publisher:
        for seed in (1, 2):
            publisher.push_base(Model(seed))
            late = add(pool, f"replica-{seed}", is_readable=True)
            until(lambda seed=seed: is_ready(pool, f"replica-{seed}"), WAIT_SECONDS)
            assert same(late.base, weights(Model(seed)))
            assert same(source.base, weights(Model(seed)))
    assert source.store.retained_bases() == late.store.retained_bases() == (2,)


def test_one_whose_engine_fails_is_repaired_by_a_clone(pool: Pool) -> None:
    add(pool, "replica-0", is_readable=True)
    bad = add(pool, "replica-1", is_readable=True)

    def burn() -> None:
        raise LoadFailedError("a layer burned", metadata={"dirty": "true"})

    at_bucket(bad, 2, burn)
    with trainer(pool) as publisher:
        publisher.push_base(Model(1))
    until(lambda: is_ready(pool, "replica-1"), WAIT_SECONDS)
    assert same(bad.base, weights(Model(1)))


def test_a_copy_that_has_changed_since_is_not_cloned(pool: Pool) -> None:
    source = add(pool, "replica-0", is_readable=True)
    with trainer(pool) as publisher:
        publisher.push_base(Model(1))
        source.base = dict(weights(Model(9)))  # the engine's memory rots
        add(pool, "replica-1")
        until(lambda: "is not what was committed" in standing(pool, "replica-1")[1], WAIT_SECONDS)
        assert not is_ready(pool, "replica-1")


def test_one_whose_cache_was_not_reset_is_repaired_without_a_byte(pool: Pool) -> None:
    """Its weights are whole: what failed is done again."""
    engine = add(pool, "replica-0", is_readable=True)
    with trainer(pool) as publisher:
        publisher.push_base(Model(1))
    engine.dirty_reason = "the cache could not be reset"
    until(lambda: not engine.dirty_reason, WAIT_SECONDS)
    until(lambda: is_ready(pool, "replica-0"), WAIT_SECONDS)
    assert same(engine.base, weights(Model(1)))
    assert engine.store.retained_bases() == (1,)
