"""Orders and answers of coordinators that a replica, or a trainer, has nothing to do with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, peft_of, until, weights
from trainer_side import Publisher
from weft_rl.contract.errors import WeftError
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2, publish_pb2, registry_pb2, replica_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub
from weft_rl.v1.replica_pb2_grpc import ReplicaServiceStub

_ORDER = registry_pb2.OutOfService(reason="by a stranger", no_pushes=True)

LARGEST = 2**53 - 1


@pytest.fixture
def replica(pool: Pool) -> Iterator[ReplicaServiceStub]:
    """Of replica-0, which is ready."""
    pool.add_replica("replica-0", EngineDouble(weights(Model())))
    agent = pool.agents["replica-0"]
    until(lambda: agent.is_ready)
    with open_channel(agent.address) as channel:
        yield ReplicaServiceStub(channel)


def _refusal(method: Any, request: Any) -> WeftError:
    with pytest.raises(grpc.RpcError) as refused:
        method(request, timeout=10)
    return error_from_rpc(refused.value)


def _generation(pool: Pool) -> int:
    registration = pool.agents["replica-0"].registration
    assert registration is not None
    return registration.coordinator_generation


@pytest.mark.parametrize("generation", [LARGEST, 2**52, 2**40, 2])
def test_a_generation_that_its_coordinator_has_not_is_refused_and_leaves_nothing(
    pool: Pool, replica: ReplicaServiceStub, publisher: Publisher, generation: int
) -> None:
    order = replica_pb2.RefuseRequestsRequest(
        coordinator_generation=generation, order_number=7, out_of_service=_ORDER
    )
    error = _refusal(replica.RefuseRequests, order)
    is_possible = generation <= 2**52
    assert error.reason == ("EPOCH_FENCED" if is_possible else "INVALID_REQUEST")
    assert str(generation) in error.message
    assert pool.agents["replica-0"].refusing == ""
    assert pool.agents["replica-0"].is_ready
    assert str(publisher.push_base(Model(1)).version) == "base@1"
    until(lambda: pool.agents["replica-0"].is_ready)


@pytest.mark.parametrize("number", [LARGEST, 2**50])
def test_so_are_an_order_number_and_an_epoch(
    pool: Pool, replica: ReplicaServiceStub, publisher: Publisher, number: int
) -> None:
    reason = "INVALID_REQUEST" if number == LARGEST else "EPOCH_FENCED"
    generation = _generation(pool)
    refuse = replica_pb2.RefuseRequestsRequest(
        coordinator_generation=generation, order_number=number, out_of_service=_ORDER
    )
    assert _refusal(replica.RefuseRequests, refuse).reason == reason
    group = publish_pb2.GroupPlan(
        group_id="g", epoch=number, rank=1, size=2, backend="gloo", token="t"
    )
    join = replica_pb2.JoinGroupRequest(
        coordinator_generation=generation, trainer_id="trainer-a", group=group
    )
    assert _refusal(replica.JoinGroup, join).reason == reason
    assert pool.agents["replica-0"].is_ready
    assert str(publisher.push_base(Model(1)).version) == "base@1"


def test_an_order_of_another_pool_is_refused_by_name(
    pool: Pool, replica: ReplicaServiceStub
) -> None:
    order = replica_pb2.RetireVersionsRequest(
        coordinator_generation=_generation(pool), pool_id="0123456789abcdef"
    )
    error = _refusal(replica.RetireVersions, order)
    assert error.reason == "POOL_MISMATCH"
    assert "0123456789abcdef" in error.message
    own = replica_pb2.RetireVersionsRequest(
        coordinator_generation=_generation(pool), pool_id=_seen(pool.target).pool_id
    )
    replica.RetireVersions(own, timeout=10)


def _seen(target: str) -> inspect_pb2.GetPoolResponse:
    with open_channel(target) as channel:
        return InspectServiceStub(channel).GetPool(inspect_pb2.GetPoolRequest(), timeout=10)


def _exchange(pools: list[Pool]) -> None:
    """Each coordinator is at the other's address from now on."""
    for pool in pools:
        pool.stop_coordinator()
    catalogs = [pool.config["catalog"] for pool in pools]
    for pool, catalog in zip(pools, reversed(catalogs), strict=True):
        pool.config["catalog"] = catalog
        pool.start_coordinator()


@pytest.mark.parametrize("both_pushed", [True, False])
def test_pools_whose_addresses_are_exchanged_keep_their_replicas_trainers_and_versions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, both_pushed: bool
) -> None:
    with running_pool(tmp_path / "a.db") as first, running_pool(tmp_path / "b.db") as second:
        pools = [first, second]
        for pool in pools:
            pool.add_replica("replica-0", EngineDouble(weights(Model()), base_copies=1))
            until(lambda pool=pool: pool.agents["replica-0"].is_ready)  # type: ignore[misc]
        with (
            Publisher(first.target, trainer_id="trainer-a", timeout_seconds=20) as publisher,
            Publisher(second.target, trainer_id="trainer-b", timeout_seconds=20) as other,
        ):
            adapter = peft_of(Model())
            for _ in range(3):
                publisher.push_adapter(adapter, "math")
            if both_pushed:
                other.push_adapter(adapter, "math")
            before = [_seen(pool.target) for pool in pools]
            assert before[0].pool_id != before[1].pool_id
            _exchange(pools)
            for pool in pools:
                registration = pool.agents["replica-0"].registration
                assert registration is not None
                until(lambda r=registration: "belongs to pool" in r.trouble)  # type: ignore[misc]
            with pytest.raises(WeftError) as refused:
                publisher.push_adapter(adapter, "math", timeout_seconds=3)
            assert refused.value.reason in ("POOL_EMPTY", "POOL_MISMATCH")
            until(lambda: "could not renew math yet" in caplog.text)
            for pool, known in zip(pools, reversed(before), strict=True):
                now = _seen(pool.target)
                assert now.pool_id == known.pool_id
                assert [p.served_version for p in now.policies] == [
                    p.served_version for p in known.policies
                ]
            _exchange(pools)
            for pool in pools:
                until(lambda pool=pool: pool.agents["replica-0"].is_ready)  # type: ignore[misc]
            assert str(publisher.push_adapter(adapter, "math").version) == "math@4"


def test_a_replica_that_is_restarted_goes_to_the_pool_that_it_is_told(tmp_path: Path) -> None:
    with running_pool(tmp_path / "a.db") as first, running_pool(tmp_path / "b.db") as second:
        for pool in (first, second):
            pool.add_replica("replica-0", EngineDouble(weights(Model())))
        first.remove_replica("replica-0")
        second.add_replica("replica-1", EngineDouble(weights(Model())))
        until(lambda: second.agents["replica-1"].is_ready)
