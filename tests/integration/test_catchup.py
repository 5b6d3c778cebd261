"""Late joiners and repairs: real coordinator, real gRPC, real gloo, engine double."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_side.receive.clone_source import CopiedBuckets
from rollout_side.receive.incoming_buckets import ReceiveRing
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, lora, peft_of, same, until, weights
from tests.integration.replicas import is_ready, replica
from trainer_side import Publisher
from weft_rl.contract.errors import LoadFailedError, NotFoundError, PeerUnavailableError
from weft_rl.contract.names import AdapterVersions
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import admin_pb2
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub

DIRTY = LoadFailedError("mixed", metadata={"dirty": "true"})


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=20, bucket_bytes=2048
    ) as running:
        yield running


def double(**settings: int) -> EngineDouble:
    return EngineDouble(weights(Model()), **{"base_copies": 1, **settings})


def test_a_late_joiner_catches_up_bitwise_and_then_takes_pushes(
    pool: Pool, publisher: Publisher
) -> None:
    first, late = double(), double()
    pool.add_replica("replica-0", first)
    base, adapters = Model(seed=5), [peft_of(Model(), seed) for seed in (1, 2, 3)]
    publisher.push_base(base)
    publisher.push_adapter(adapters[0], "math")
    publisher.push_adapter(adapters[1], "math")
    publisher.push_adapter(adapters[2], "code")
    agent = pool.add_replica("replica-9", late)
    assert not agent.is_ready
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, weights(base))
    for name, adapter in zip(("math@1", "math@2", "code@1"), adapters, strict=True):
        assert same(late.adapter(name), lora(adapter))
    assert late.aliases == {"math": 2, "code": 1}
    assert agent.serving.vector == pool.agents["replica-0"].serving.vector
    assert list(replica(pool, "replica-9").report.retained_base_versions) == [1]
    assert same(first.base, weights(base)), "the source was only read"
    assert same(first.adapter("math@1"), lora(adapters[0]))
    assert str(publisher.push_base(Model(6)).version) == "base@2"
    assert str(publisher.push_adapter(adapters[0], "math").version) == "math@3"
    assert same(late.base, weights(Model(6)))
    assert not [t for t in threading.enumerate() if t.name.startswith("weft-clone")]


def test_a_chain_the_second_late_joiner_can_clone_from_the_first(
    pool: Pool, publisher: Publisher
) -> None:
    pool.add_replica("replica-0", double())
    publisher.push_base(Model(5))
    pool.add_replica("replica-1", double())
    until(lambda: is_ready(pool, "replica-1"))
    pool.remove_replica("replica-0")
    late = double()
    pool.add_replica("replica-2", late)
    until(lambda: is_ready(pool, "replica-2"))
    assert same(late.base, weights(Model(5)))


def test_a_coordinator_that_was_restarted_asks_the_source_for_the_layout(
    pool: Pool, publisher: Publisher
) -> None:
    pool.add_replica("replica-0", double())
    publisher.push_base(Model(5))
    adapter = peft_of(Model(), 1)
    publisher.push_adapter(adapter, "math")
    publisher.close()
    pool.stop_coordinator()
    pool.start_coordinator()
    late = double()
    pool.add_replica("replica-1", late)
    until(lambda: is_ready(pool, "replica-1"))
    assert same(late.base, weights(Model(5)))
    assert same(late.adapter("math@1"), lora(adapter))


def test_the_source_dies_during_the_clone_and_another_one_takes_over(
    pool: Pool, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [double(), double()]
    for i, engine in enumerate(engines):
        pool.add_replica(f"replica-{i}", engine)
    publisher.push_base(Model(5))
    reached, go_on = threading.Event(), threading.Event()

    make = CopiedBuckets.make

    def slow(self: CopiedBuckets, index: int, on_progress: Callable[[], None]) -> int:
        if index == 3 and not reached.is_set():
            reached.set()
            go_on.wait(10)
        return make(self, index, on_progress)

    monkeypatch.setattr(CopiedBuckets, "make", slow)
    late = double()
    pool.add_replica("replica-9", late)
    assert reached.wait(10)
    assert replica(pool, "replica-9").state_reason == "lacks base@1, which comes from replica-0"
    pool.remove_replica("replica-0")
    go_on.set()
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, weights(Model(5)))
    assert late.store.usage().staging_bytes == engines[1].store.usage().staging_bytes


def test_a_push_ends_a_clone_which_goes_on_without_what_was_verified(
    pool: Pool, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.add_replica("replica-0", double())
    publisher.push_base(Model(5))
    reached, go_on = threading.Event(), threading.Event()
    landed: list[int] = []
    land = ReceiveRing.accept

    make = CopiedBuckets.make

    def slow(self: CopiedBuckets, index: int, on_progress: Callable[[], None]) -> int:
        if index == 3 and not reached.is_set():
            until(lambda: len(landed) == 3)
            reached.set()
            go_on.wait(10)
        return make(self, index, on_progress)

    def count(self, index, nonce, *rest):  # type: ignore[no-untyped-def]
        end = land(self, index, nonce, *rest)

        def counted() -> None:
            end()
            if threading.current_thread().name == "weft-receive-replica:replica-0":
                landed.append(index)

        return counted

    monkeypatch.setattr(CopiedBuckets, "make", slow)
    monkeypatch.setattr(ReceiveRing, "accept", count)
    late = double()
    pool.add_replica("replica-9", late)
    assert reached.wait(10)
    adapter = peft_of(Model(), 1)
    assert str(publisher.push_adapter(adapter, "math").version) == "math@1"
    assert same(late.adapter("math@1"), lora(adapter)), "it took part, since it was free"
    until(lambda: is_ready(pool, "replica-9"))
    go_on.set()
    assert same(late.base, weights(Model(5)))
    assert landed == list(range(len(landed))), "no bucket came twice"
    assert len(landed) > 4


def test_a_whole_pool_restarted_says_what_is_to_be_pushed_again(
    pool: Pool, publisher: Publisher
) -> None:
    pool.add_replica("replica-0", double())
    publisher.push_base(Model(5))
    publisher.push_adapter(peft_of(Model(), 1), "math")
    pool.remove_replica("replica-0")
    fresh = double()
    pool.add_replica("replica-0", fresh)
    asked = (
        "lacks base@1, math@1, which no replica in contact holds: its owner trainer-a is asked "
        "to publish it again"
    )
    until(lambda: replica(pool, "replica-0").state_reason == asked)
    publisher.push_base(Model(6))
    publisher.push_adapter(peft_of(Model(), 1), "math")
    until(lambda: is_ready(pool, "replica-0"))


def test_a_dirty_replica_is_repaired_by_the_next_push(pool: Pool, publisher: Publisher) -> None:
    engines = [double(base_copies=0), double(base_copies=0)]
    for i, engine in enumerate(engines):
        pool.add_replica(f"replica-{i}", engine)
    engines[0].fail_next_load = DIRTY
    publisher.push_base(Model(1))
    assert replica(pool, "replica-0").state == pb.REPLICA_STATE_QUARANTINED
    assert "which no replica in contact holds" in replica(pool, "replica-0").state_reason
    publisher.push_adapter(peft_of(Model()), "math")
    assert "math" not in pool.agents["replica-0"].serving.vector.adapters
    publisher.push_base(Model(2))
    assert pool.agents["replica-0"].serving.dirty_reason == ""
    assert same(engines[0].base, weights(Model(2)))
    until(lambda: is_ready(pool, "replica-0"))  # the adapter came as a clone
    assert pool.agents["replica-0"].serving.vector.adapters == {"math": AdapterVersions((1,), 1)}


def test_a_dirty_replica_is_repaired_by_a_clone(pool: Pool, publisher: Publisher) -> None:
    engines = [double(), double()]
    for i, engine in enumerate(engines):
        pool.add_replica(f"replica-{i}", engine)
    engines[0].fail_next_load = DIRTY
    publisher.push_base(Model(1))
    until(lambda: is_ready(pool, "replica-0"))
    assert same(engines[0].base, weights(Model(1)))
    until(lambda: engines[0].store.usage().staging_bytes == engines[1].store.usage().staging_bytes)


def test_a_replica_alone_is_repaired_from_its_own_copy(pool: Pool, publisher: Publisher) -> None:
    engine = double()
    agent = pool.add_replica("replica-0", engine)
    publisher.push_base(Model(1))
    engine.base = weights(Model(9))
    engine.dirty_reason = "a layer burned"
    until(lambda: not agent.serving.dirty_reason and is_ready(pool, "replica-0"))
    assert same(engine.base, weights(Model(1)))


def test_a_clone_that_fails_is_tried_again(pool: Pool, publisher: Publisher) -> None:
    pool.add_replica("replica-0", double())
    publisher.push_base(Model(1))
    late = double()
    late.fail_next_load = LoadFailedError("out of luck")
    pool.add_replica("replica-1", late)
    until(lambda: "out of luck" in replica(pool, "replica-1").state_reason)
    until(lambda: is_ready(pool, "replica-1"))
    assert same(late.base, weights(Model(1)))


def test_pushes_and_clones_take_turns(pool: Pool, publisher: Publisher) -> None:
    pool.add_replica("replica-0", double())
    publisher.push_base(Model(1))
    joiners = {f"replica-{i}": double() for i in range(1, 4)}
    for replica_id, engine in joiners.items():
        pool.add_replica(replica_id, engine)
        publisher.push_adapter(peft_of(Model(), 1), "math")
    publisher.push_base(Model(2))
    for replica_id, engine in joiners.items():
        until(lambda replica_id=replica_id: is_ready(pool, replica_id))  # type: ignore[misc]
        assert same(engine.base, weights(Model(2)))
        agents = (pool.agents[replica_id], pool.agents["replica-0"])
        until(lambda agents=agents: agents[0].serving.vector == agents[1].serving.vector)  # type: ignore[misc]


def test_copies_leave_with_what_the_bound_allows(pool: Pool, publisher: Publisher) -> None:
    engine = double(base_copies=3)
    pool.add_replica("replica-0", engine)
    for seed in range(1, 5):
        publisher.push_base(Model(seed))
    until(lambda: list(replica(pool, "replica-0").report.retained_base_versions) == [4, 3, 2])


def test_what_nobody_holds_or_owns_any_more_keeps_nobody_waiting(tmp_path: Path) -> None:
    with running_pool(tmp_path / "weft.db", publish_again_after_seconds=0.5) as pool:
        pool.add_replica("replica-0", double())
        with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as trainer:
            trainer.push_adapter(peft_of(Model(), 1), "math")
            trainer.push_adapter(peft_of(Model(), 2), "code")
        pool.remove_replica("replica-0")
        engine = double()
        agent = pool.add_replica("replica-0", engine)
        assert not is_ready(pool, "replica-0")
        until(lambda: is_ready(pool, "replica-0"))
        until(lambda: set(engine.absent) == {"code", "math"})
        with pytest.raises(NotFoundError, match="math@1 is lost") as refused:
            agent.requested("math")
        assert refused.value.reason == "POLICY_UNKNOWN"
        with open_channel(pool.target) as channel:
            request = admin_pb2.ForgetPolicyRequest(policy="code")
            AdminServiceStub(channel).ForgetPolicy(request, timeout=10)
        with Publisher(pool.target, trainer_id="trainer-b", timeout_seconds=20) as trainer:
            assert str(trainer.push_base(Model(5)).version) == "base@1"
            assert str(trainer.push_adapter(peft_of(Model(), 3), "math").version) == "math@2"
        assert str(agent.requested("math")) == "math@2"
        until(lambda: set(engine.absent) == {"code"})
        with pytest.raises(NotFoundError, match="an operator forgot code"):
            agent.requested("code@1")


def test_a_replica_that_lacks_what_the_pool_serves_answers_no_bare_name(pool: Pool) -> None:
    """Which nobody can bring it, and its trainer does not; by their numbers it has versions."""
    first = EngineDouble(weights(Model()))
    pool.add_replica("replica-0", first)
    with Publisher(pool.target, trainer_id="trainer-a") as publisher:
        publisher.push_base(Model(1))
        late = EngineDouble(weights(Model()))
        agent = pool.add_replica("replica-1", late)
        until(lambda: "the pool serves base@1" in late.refused_aliases.every)
        assert not agent.is_ready
        for asked in ("base", "math"):
            with pytest.raises(PeerUnavailableError, match="base@1") as refused:
                agent.requested(asked)
            assert refused.value.reason == "REFUSING"
        assert str(agent.requested("base@0")) == "base@0"
        assert str(pool.agents["replica-0"].requested("base")) == "base@1"
        publisher.push_base(Model(2))
        assert str(agent.requested("base")) == "base@2"
        until(lambda: agent.is_ready)
        assert not late.refused_aliases.every
