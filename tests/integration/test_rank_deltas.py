"""Deltas at a replica that loads in place and has its weights in parts at two ranks: real
coordinator, real transport, real exchange between the ranks; both are doubles in this process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rollout_side.engine import SwitchTimes
from rollout_side.memory.handoff import Handoff, InPlaceLoad, RankHandoff, RankServer
from rollout_side.memory.rank_deltas import DeltaFollower
from rollout_side.memory.served_delta import StagedDelta
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import ElementPlace, ServedBase, tensor_in
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, same, step, until, weights
from tests.integration.replicas import replica
from trainer_side import Publisher
from weft_rl.cli.orders import rollback
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion


class Shard:
    """Weights of one rank: of a matrix some columns or some rows, of a vector all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: dict[str, torch.Tensor] = {}

    def cut(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            return tensor
        dim = number % 2
        return tensor.chunk(2, dim)[self.rank]

    def load(self, handoff: Handoff) -> None:
        for index, wire in handoff.buckets():
            for number, slot in enumerate(handoff.manifest.tensors):
                if slot.bucket == index:
                    part = self.cut(number, tensor_in(slot, wire))
                    self.parts[slot.meta.name] = part.clone(memory_format=torch.contiguous_format)

    def places(self, manifest: Manifest, number: int) -> list[ElementPlace]:
        meta = manifest.tensors[number].meta
        bits = self.parts[meta.name].view(-1).view(torch.int32)
        if len(meta.shape) == 1:
            return [ElementPlace(0, meta.num_elements, bits)]
        rows, columns = meta.shape
        if number % 2 == 0:
            begin = self.rank * len(bits)
            return [ElementPlace(begin, begin + len(bits), bits)]
        half = columns // 2
        begin = self.rank * half
        end = begin + (rows - 1) * columns + half
        return [ElementPlace(begin, end, bits, half, columns)]

    def served(self, handoff: Handoff, content_digest: bytes) -> ServedBase:
        manifest = handoff.manifest
        return ServedBase(
            handoff.transfer_id,
            handoff.version,
            manifest,
            content_digest,
            lambda index, out: out,
            tuple(handoff.tensor_digests),
            partial(self.places, manifest),
            is_whole=False,
        )


class SharedReplica(EngineDouble):
    """A replica whose two ranks have a part of each matrix, as with tensor parallelism."""

    def __init__(self, base: dict[str, torch.Tensor]) -> None:
        super().__init__(base, in_place=True)
        self.store.num_ranks = 2
        self.secret = secrets.token_hex(8)
        self.ranks = RankServer(self.secret, self.store.handoff.of, self.store.followers.serve)
        self.other = WorkerStore(2**32, 2**30, num_ranks=2)
        self.shards = Shard(0), Shard(1)
        self.other_load: InPlaceLoad | None = None
        self.follower: DeltaFollower | None = None
        self.manifest: Manifest | None = None

    def _take_in_place(self, handoff: Handoff) -> None:
        self.shards[0].load(handoff)

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        former = self.load
        await super().load_in_place(transfer_id, version, timeout_seconds)
        if self.load is not former:
            self.other.served.set(None)
            handoff = RankHandoff(self.secret, 1, transfer_id, version)
            self.other_load = InPlaceLoad(handoff, self.shards[1].load)

    def _commit_in_place(self, content_digest: bytes) -> SwitchTimes:
        assert self.load is not None
        assert self.other_load is not None
        loads = self.load, self.other_load
        times = super()._commit_in_place(content_digest)
        loads[1].confirm(content_digest)
        self.manifest = loads[0].handoff.manifest
        for store, shard, each in zip((self.store, self.other), self.shards, loads, strict=True):
            store.served.set(shard.served(each.handoff, content_digest))
        self.follow()
        return times

    def follow(self) -> None:
        if self.follower is not None:
            self.follower.close()
        served = self.other.served
        assert served.base is not None
        self.follower = DeltaFollower(
            self.secret, 1, served.base, lambda: served.base, self.other.put_staged
        )

    def _apply_base(self, transfer_id: str, content_digest: bytes) -> SwitchTimes:
        if self.loading == transfer_id:
            return self._commit_in_place(content_digest)
        for store in (self.store, self.other):
            if store.served.switch_to(transfer_id, content_digest):
                continue
            staged = store.staged(transfer_id, content_digest)
            assert isinstance(staged, StagedDelta)
            store.served.apply(staged)
        numbers = [store.keep_delta(transfer_id) for store in (self.store, self.other)]
        for store in (self.store, self.other):
            store.keep_delta("", most=min(numbers))
        return SwitchTimes(pause_seconds=0.001)

    async def discard(self, transfer_id: str) -> None:
        await super().discard(transfer_id)
        self.other.discard(transfer_id)

    def whole(self) -> dict[str, torch.Tensor]:
        """The weights of both ranks, brought together."""
        assert self.manifest is not None
        found = {}
        for number, slot in enumerate(self.manifest.tensors):
            parts = [shard.parts[slot.meta.name] for shard in self.shards]
            if len(slot.meta.shape) == 1:
                assert parts[0].equal(parts[1])
                found[slot.meta.name] = parts[0].clone()
            else:
                found[slot.meta.name] = torch.cat(parts, number % 2)
        return found

    def close(self) -> None:
        if self.follower is not None:
            self.follower.close()
        self.store.followers.close()
        self.ranks.close()
        super().close()


@pytest.fixture
def engine(pool: Pool) -> Iterator[SharedReplica]:
    made = SharedReplica(weights(Model(50)))
    pool.add_replica("replica-0", made)
    yield made
    made.close()


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=20, delta="always", bucket_bytes=2048
    ) as running:
        yield running


def takes_deltas(pool: Pool) -> bool:
    return replica(pool, "replica-0").report.takes_deltas


def pushed(pool: Pool, publisher: Publisher, model: Model) -> Any:
    report = publisher.push_base(model).report
    until(lambda: takes_deltas(pool))
    return report


def test_each_rank_applies_what_is_its_own_and_takes_it_back(
    pool: Pool, engine: SharedReplica, publisher: Publisher
) -> None:
    model, made = Model(seed=1), list[dict[str, torch.Tensor]]()
    for number in range(4):
        report = pushed(pool, publisher, model)
        assert report.delta.is_delta is (number > 0), report.delta
        assert same(engine.whole(), weights(model))
        made.append(weights(model))
        step(model)
    usage = engine.store.usage()
    assert (usage.retained_bases, usage.undo_bases) == ((), (3, 2, 1)), "none can be cloned"
    assert engine.other.usage().undo_bases == (3, 2, 1)
    for version in (2, 4, 1):
        rollback("base", version, coordinator=pool.target, timeout=20)
        assert same(engine.whole(), made[version - 1])


def test_what_one_rank_holds_otherwise_is_found_before_anything_is_written(
    pool: Pool, engine: SharedReplica, publisher: Publisher
) -> None:
    """An element that only the second rank has, and one that both have."""
    model = Model(seed=1)
    pushed(pool, publisher, model)
    for name in ("layers.1.q_proj.weight", "layers.1.q_proj.bias"):
        step(model)
        with torch.no_grad():
            dict(model.named_parameters())[name].view(-1)[-1] += 1
        engine.shards[1].parts[name].view(-1).view(torch.int32)[-1] ^= 1 << 12
        report = pushed(pool, publisher, model)
        assert name in report.delta.whole_reason
        assert same(engine.whole(), weights(model))
        for _ in range(2):  # after a pause
            step(model)
            report = pushed(pool, publisher, model)
        assert report.delta.is_delta
        assert same(engine.whole(), weights(model))


def test_without_its_other_rank_a_replica_is_sent_all_elements(
    pool: Pool, engine: SharedReplica, publisher: Publisher
) -> None:
    model = Model(seed=1)
    pushed(pool, publisher, model)
    step(model)
    assert engine.follower is not None
    engine.follower.close()
    until(lambda: not takes_deltas(pool))
    report = pushed(pool, publisher, model)
    assert "loads bases in place, and cannot read base@1 back" in report.delta.whole_reason
    assert same(engine.whole(), weights(model))
    for _ in range(2):  # the copy was given up
        step(model)
        report = pushed(pool, publisher, model)
    assert report.delta.is_delta
    assert same(engine.whole(), weights(model))


def test_a_rank_without_room_leaves_the_delta_to_none(
    pool: Pool, engine: SharedReplica, publisher: Publisher
) -> None:
    model = Model(seed=1)
    pushed(pool, publisher, model)
    step(model)
    engine.other.staging_capacity_bytes = 100
    report = pushed(pool, publisher, model)
    assert "STAGING_FULL" in report.delta.whole_reason
    assert same(engine.whole(), weights(model))
    assert not engine.store.usage().undo_bases
