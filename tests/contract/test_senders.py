"""Pushes that two ranks of a trainer send, each what it holds: real agents, real gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles import sharded_trainer
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.doubles.sharded_trainer import ShardedTrainer
from tests.waits import until
from weft_rl.contract.backends import GLOO, ONE_SIDED
from weft_rl.contract.errors import WeftError
from weft_rl.transport.wire.buckets import SealedBucket

Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    """Rows and columns that two or three ranks do not share evenly."""
    torch.manual_seed(seed)
    shapes = {"embed.weight": (51, 30), "head.weight": (30,)}
    for i in range(4):
        shapes |= {f"layers.{i}.up.weight": (22, 30), f"layers.{i}.up.bias": (22,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with running_pool(tmp_path / "weft.db") as running:
        yield running


@pytest.fixture
def engines(pool: Pool) -> list[EngineDouble]:
    doubles = [EngineDouble(weights(0)) for _ in range(2)]
    for i, engine in enumerate(doubles):
        pool.add_replica(f"replica-{i}", engine)
    return doubles


@pytest.fixture
def trainer(pool: Pool, engines: list[EngineDouble]) -> Iterator[ShardedTrainer]:
    running = ShardedTrainer(pool.target)
    yield running
    running.close()


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(
    ("num_senders", "backend"), [(1, GLOO), (2, GLOO), (3, GLOO), (2, ONE_SIDED)]
)
def test_every_rank_sends_what_it_holds(
    num_senders: int, backend: str, pool: Pool, engines: list[EngineDouble]
) -> None:
    trainer = ShardedTrainer(pool.target, num_senders, backend=backend)
    first = trainer.push(weights(1))
    assert all(same(engine.base, weights(1)) for engine in engines)
    sent = [trainer.buckets[rank].made for rank in range(num_senders)]
    assert all(made == [*range(len(made))] and made for made in sent)
    assert first.num_buckets == first.num_buckets_verified == sum(map(len, sent))
    second = trainer.push(weights(2))
    assert all(same(engine.base, weights(2)) for engine in engines)
    assert second.epoch == first.epoch, "the group of the former push is kept"
    assert all(engine.store.usage().staging_bytes == 0 for engine in engines)
    trainer.close()


def test_a_versions_digest_tells_nothing_of_who_sent_it(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    digests = set()
    for num_senders in (1, 2, 3):
        trainer = ShardedTrainer(pool.target, num_senders)
        digests.add(trainer.push(weights(1)).content_digest.value)
        trainer.close()
    assert len(digests) == 1


def test_survivors_and_both_senders_resume_without_a_replica_that_died(
    pool: Pool, engines: list[EngineDouble], trainer: ShardedTrainer
) -> None:
    lost = threading.Lock()

    def before(rank: int, nth: int) -> None:
        if nth == 4 and lost.acquire(blocking=False):
            pool.remove_replica("replica-1")

    transfer = trainer.push(weights(1), min_replicas=1, before=before)
    assert list(transfer.lost_replica_ids) == ["replica-1"]
    assert transfer.epoch > 1
    assert same(engines[0].base, weights(1))
    for rank in range(2):
        made = trainer.buckets[rank].made
        assert made == [*range(len(made))], "nothing is read twice"
    assert not trainer.errors
    trainer.push(weights(2))
    assert same(engines[0].base, weights(2))


def in_place(pool: Pool, replica_id: str) -> EngineDouble:
    engine = EngineDouble(weights(0), in_place=True)
    pool.add_replica(replica_id, engine)
    return engine


def test_replicas_that_load_in_place_gather_each_bucket(pool: Pool) -> None:
    engines = [in_place(pool, "replica-0"), in_place(pool, "replica-1")]
    trainer = ShardedTrainer(pool.target, 3)
    for seed in (1, 2):
        trainer.push(weights(seed))
        assert all(same(engine.base, weights(seed)) for engine in engines)
    trainer.close()


def test_a_replica_that_loads_in_place_resumes_beside_one_that_stages(pool: Pool) -> None:
    staging, loading, lost = EngineDouble(weights(0)), in_place(pool, "replica-1"), []
    pool.add_replica("replica-0", staging)
    pool.add_replica("replica-2", EngineDouble(weights(0)))
    trainer = ShardedTrainer(pool.target)

    def before(rank: int, nth: int) -> None:
        if (rank, nth) == (1, 5) and not lost:
            lost.append("replica-2")
            pool.remove_replica("replica-2")

    transfer = trainer.push(weights(1), min_replicas=1, before=before)
    assert list(transfer.lost_replica_ids) == lost
    assert same(staging.base, weights(1))
    assert same(loading.base, weights(1))
    for buckets in trainer.buckets.values():
        assert buckets.made == [*range(len(buckets.made))]
    trainer.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sender_that_dies_is_everybodys_error_at_once(
    victim: int, engines: list[EngineDouble], trainer: ShardedTrainer
) -> None:
    trainer.push(weights(1))
    died_at: list[float] = []

    def before(rank: int, nth: int) -> None:
        if (rank, nth) == (victim, 3):
            died_at.append(time.monotonic())
            raise RuntimeError("killed")

    with pytest.raises(WeftError, match=rf"sharded \(sender {victim}\) is gone") as caught:
        trainer.push(weights(2), before=before)
    assert caught.value.reason == "PEER_GONE"
    at, error = trainer.errors[1 - victim]
    assert error.reason == "PEER_GONE"
    assert at - died_at[0] < 3
    assert all(same(engine.base, weights(1)) for engine in engines)
    until(lambda: all(engine.store.usage().staging_bytes == 0 for engine in engines))
    trainer.leave()
    trainer.push(weights(3))
    assert all(same(engine.base, weights(3)) for engine in engines)


def test_a_sender_that_stalls_ends_the_push_for_all_once_others_wait(tmp_path: Path) -> None:
    settings = {"stall_seconds": 1.0, "sender_stall_seconds": 1.5}
    free = threading.Event()
    with running_pool(tmp_path / "weft.db", **settings) as pool:
        engine = EngineDouble(weights(0))
        pool.add_replica("replica-0", engine)
        trainer = ShardedTrainer(pool.target)

        def before(rank: int, nth: int) -> None:
            if (rank, nth) == (1, 2):
                rival = threading.Thread(target=trainer.begin, args=(weights(2),), daemon=True)
                rival.start()
                free.wait(20)

        began = time.monotonic()
        threading.Timer(4.5, free.set).start()
        with pytest.raises(WeftError, match=r"sharded \(sender 1\) makes no progress") as caught:
            trainer.push(weights(1), before=before)
        assert caught.value.reason == "STALLED"
        at, error = trainer.errors[0]
        assert error.reason == "STALLED"
        assert at - began < 4
        assert same(engine.base, weights(0))
        trainer.close()


def test_other_bytes_than_were_digested_are_found(
    engines: list[EngineDouble], trainer: ShardedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = sharded_trainer.ShardBuckets.make

    def make_others(
        buckets: sharded_trainer.ShardBuckets, index: int, on_progress: Any
    ) -> SealedBucket:
        sealed = make(buckets, index, on_progress)
        buckets.wire(index)[0] ^= 1
        return sealed

    monkeypatch.setattr(sharded_trainer.ShardBuckets, "make", make_others)
    with pytest.raises(WeftError) as caught:
        trainer.push(weights(1))
    assert caught.value.reason == "DIGEST_MISMATCH"
    assert all(same(engine.base, weights(0)) for engine in engines)
