"""A coordinator whose catalog was lost, over real stubs: replicas stay, and the pool serves
what they hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from rich.console import Console

from rollout_side.agent.heartbeat import Holdings, Identity
from rollout_side.agent.registration import Registration
from rollout_side.config import AgentConfig
from rollout_side.engine import MemoryUse
from tests.contract.calls import eventually
from tests.contract.conftest import Pool
from tests.doubles.replicas import FakeReplica
from tests.doubles.tiny_model import CAPABILITIES, REFERENCE
from tests.doubles.trainer import FakeTrainer
from weft.contract.errors import BaseMismatchError, CapacityError, WeftError
from weft.contract.names import PolicyVersion, VersionVector
from weft.coordinator.decisions.policies.numbering import LEAP
from weft.rpc.channel import open_aio_channel
from weft.rpc.codec import duration_to_proto
from weft.rpc.status import status_from_error
from weft.v1 import inspect_pb2, inspect_pb2_grpc, registry_pb2, registry_pb2_grpc, types_pb2
from weft_cli.status import render

MATH_1 = types_pb2.PolicyVersion(policy="math", version=1)
OTHER = b"\2" * 8


async def _lose(pool: Pool, *replicas: FakeReplica) -> None:
    """Another coordinator at another catalog; replicas go on with what they have."""
    pool.catalog = pool.catalog.with_name(f"{pool.catalog.stem}-anew.db")
    await pool.restart(publish_again_after_seconds=0.2)
    for replica in replicas:
        await replica.follow(pool.target)


async def _serves_math(pool: Pool, *replicas: FakeReplica) -> None:
    async def are_ready() -> bool:
        return all([await replica.heartbeat() for replica in replicas])

    async def is_served() -> bool:
        return "math" in {entry.policy for entry in (await pool.seen()).version_vector.adapters}

    for condition in (is_served, are_ready):
        await eventually(condition)


async def test_replicas_stay_and_what_they_hold_is_served(pool: Pool) -> None:
    replicas = [await pool.replica(name) for name in ("r0", "r1")]
    trainer = await pool.trainer()
    pushed = await trainer.push()
    await _lose(pool, *replicas)
    answers = [await replica.register() for replica in replicas]
    assert [answer.coordinator_generation for answer in answers] == [2, 2], "it was 1 before"
    await _serves_math(pool, *replicas)
    async with open_aio_channel(pool.target) as channel:
        stub = inspect_pb2_grpc.InspectServiceStub(channel)
        listed = await stub.ListVersions(inspect_pb2.ListVersionsRequest(policy="math"))
    (version,) = listed.versions
    assert version.state == inspect_pb2.VERSION_STATE_COMMITTED
    assert version.content_digest == pushed.content_digest
    assert version.layout_digest == pushed.layout_digest
    again = FakeTrainer(pool.target)
    pool.things.append(again)
    lease = await again.acquire(last_version=1, last_fencing_token=5)
    assert lease.fencing_token > 5
    await again.put_manifest()
    assert (await again.push()).version.version == LEAP + 2, "above 1, by a leap"
    late = await pool.replica("r2")
    assert late.registered.coordinator_generation == 2


async def test_other_bytes_under_one_number_are_named_and_served_by_nobody(pool: Pool) -> None:
    replicas = [await pool.replica(name) for name in ("r0", "r1")]
    trainer = await pool.trainer()
    await trainer.push()
    replicas[1].digests[PolicyVersion("math", 1)] = OTHER
    await _lose(pool, *replicas)
    for replica in replicas:
        await replica.register()

    async def is_found() -> bool:
        for replica in replicas:
            await replica.heartbeat()
        return any(policy.conflicts for policy in (await pool.seen()).policies)

    await eventually(is_found)
    found = await pool.seen()
    (policy,) = found.policies
    assert (policy.served_version, policy.publish_again_version) == (0, 1)
    (conflict,) = policy.conflicts
    assert {c.content_digest: list(c.replica_ids) for c in conflict.contents} == {
        b"\1" * 8: ["r0"],
        OTHER: ["r1"],
    }
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(found))
    assert "math@1 is not served" in capture.get()
    assert "0101010101010101 at r0; 0202020202020202 at r1" in capture.get()

    async def are_dropped() -> bool:
        for replica in replicas:
            await replica.heartbeat()
        return not any(replica.vector.adapters for replica in replicas)

    await eventually(are_dropped)


# -- a replica whose coordinator cannot answer -------------------------------------------


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Fails as often as it is told to, then takes the replica in."""

    def __init__(self, errors: list[WeftError]) -> None:
        self.errors = errors
        self.registered = threading.Event()
        self.requests: list[Any] = []

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        if self.errors:
            _abort(context, self.errors.pop(0))
        self.registered.set()
        return registry_pb2.RegisterResponse(
            heartbeat_interval=duration_to_proto(0.05), coordinator_generation=3
        )

    def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        return registry_pb2.HeartbeatResponse()

    def Leave(self, request: Any, context: Any) -> Any:  # noqa: N802
        return registry_pb2.LeaveResponse()


def _abort(context: Any, error: WeftError) -> None:
    from grpc_status import rpc_status

    context.abort_with_status(rpc_status.to_status(status_from_error(error)))


@pytest.fixture
def server() -> Iterator[grpc.Server]:
    made = grpc.server(futures.ThreadPoolExecutor(4))
    yield made
    made.stop(None).wait()


def _registration(server: grpc.Server, registry: Registry, failed: list[WeftError]) -> Registration:
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    identity = Identity(
        address="127.0.0.1:1", capabilities=CAPABILITIES, reference=REFERENCE, model_name="tiny"
    )
    memory = MemoryUse(adapter_bytes=0, staging_bytes=0)
    return Registration(
        AgentConfig(coordinator=f"127.0.0.1:{port}", replica_id="r0"),
        identity,
        current=lambda: Holdings(VersionVector(), memory, ""),
        on_failed=failed.append,
        on_answer=lambda told: None,
    )


def test_a_replica_outlives_a_coordinator_that_fails(
    server: grpc.Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout_side.agent.registration._RETRY_SECONDS", 0.01)
    failed: list[WeftError] = []
    error = WeftError("the coordinator failed on this call; read its log")
    registry = Registry([error, error, CapacityError("too many calls", reason="TOO_SLOW")])
    registration = _registration(server, registry, failed)
    registration.start()
    try:
        assert registry.registered.wait(10)
    finally:
        registration.stop()
    assert not failed
    assert len(registry.requests) == 4
    told = [record.message for record in caplog.records if "asks again" in record.message]
    assert len(told) == 2, "once for each reason"
    assert "the coordinator failed on this call" in told[0]


def test_a_refusal_of_the_replica_itself_is_for_good(server: grpc.Server) -> None:
    failed: list[WeftError] = []
    done = threading.Event()
    registry = Registry([BaseMismatchError("another base model")])
    registration = _registration(server, registry, failed)
    registration._on_failed = lambda error: (failed.append(error), done.set())  # type: ignore[assignment]
    registration.start()
    try:
        assert done.wait(10)
    finally:
        registration.stop()
    assert [error.reason for error in failed] == ["BASE_MISMATCH"]
