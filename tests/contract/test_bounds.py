"""Messages that no honest peer sends, over the wire: refused where they come in, in both
directions, and whoever else uses the pool notices nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.contract.calls import fails
from tests.contract.conftest import Pool
from tests.contract.served_replica import Served
from tests.doubles.replicas import FakeReplica
from weft_rl.coordinator.decisions.transfers import preflight
from weft_rl.coordinator.runtime import manifests
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.server import bind
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import (
    admin_pb2,
    inspect_pb2,
    inspect_pb2_grpc,
    publish_pb2,
    registry_pb2,
    rendezvous_pb2,
    replica_pb2,
    types_pb2,
)

_MODULES = (admin_pb2, inspect_pb2, publish_pb2, registry_pb2, rendezvous_pb2, replica_pb2)
_METHODS = [
    method
    for module in _MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_YEARS = Duration(seconds=10**14)


async def _listings(pool: Pool) -> inspect_pb2.GetPoolResponse:
    """GetPool, once every other listing has answered too."""
    async with open_aio_channel(pool.target) as channel:
        stub = inspect_pb2_grpc.InspectServiceStub(channel)
        await stub.ListReplicas(inspect_pb2.ListReplicasRequest())
        await stub.ListPolicies(inspect_pb2.ListPoliciesRequest())
        await stub.ListTransfers(inspect_pb2.ListTransfersRequest())
        routes = stub.WatchRoutes(inspect_pb2.WatchRoutesRequest())
        assert await routes.read() is not grpc.aio.EOF
        return await stub.GetPool(inspect_pb2.GetPoolRequest())


# -- to the coordinator --------------------------------------------------------


async def test_a_drain_of_three_million_years_is_not_taken(pool: Pool) -> None:
    replica = await pool.replica()
    drain = registry_pb2.Drain(time_left=_YEARS)
    report = registry_pb2.ReplicaReport(drain=drain)
    fields: dict[str, Any] = {
        "replica_id": "r0",
        "incarnation": replica.incarnation,
        "report": report,
    }
    for call in (
        replica.registry.Heartbeat(registry_pb2.HeartbeatRequest(**fields)),
        replica.registry.Register(registry_pb2.RegisterRequest(**fields)),
    ):
        error = await fails(call, "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert error.metadata["field"] == "Drain.time_left"
    (shown,) = (await _listings(pool)).replicas
    assert shown.state == inspect_pb2.REPLICA_STATE_READY
    assert not shown.report.HasField("drain")


def _raw(channel: grpc.aio.Channel, method: Any) -> Callable[[bytes], Any]:
    """Sends bytes as a request of ``method``, whatever they are."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    call = kind(path)

    def send(data: bytes) -> Any:
        made = call(iter([data]), timeout=10) if method.client_streaming else call(data, timeout=10)
        return made.read() if method.server_streaming else made

    return send


async def test_bytes_that_are_no_message_are_refused_everywhere(
    pool: Pool, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_aio_channel(pool.target) as coordinator,
        open_aio_channel(served.agent.address) as replica,
    ):
        for method in _METHODS:
            is_replicas = method.containing_service.name == "ReplicaService"
            send = _raw(replica if is_replicas else coordinator, method)
            for data in (b"\xff\xff", b"\x0a\x7f"):
                await fails(send(data), "INVALID_ARGUMENT", "INVALID_REQUEST")
    assert len(_METHODS) > 30
    assert not [record for record in caplog.records if record.exc_info]


async def test_no_listing_fails_for_one_entrys_sake(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    await pool.replica("r0")
    await pool.replica("r1")
    await (await pool.trainer()).push()
    assert pool.coordinator is not None
    driver = pool.coordinator.driver
    assert driver is not None
    known = driver.state.replicas["r0"]
    report = dataclasses.replace(known.report, adapter_used_bytes=2**70)
    odd = dataclasses.replace(known, report=report)
    transfers = {
        name: dataclasses.replace(transfer, epoch=2**70)
        for name, transfer in driver.state.history.items()
    }
    policies = {"math": dataclasses.replace(driver.state.policies["math"], last_version=2**70)}
    driver.state = dataclasses.replace(
        driver.state,
        replicas={**driver.state.replicas, "r0": odd},
        history=transfers,
        policies=policies,
    )
    shown = await _listings(pool)
    assert [replica.replica_id for replica in shown.replicas] == ["r0", "r1"]
    assert "log says why" in shown.replicas[0].state_reason
    assert shown.replicas[1].state == inspect_pb2.REPLICA_STATE_READY
    assert [policy.policy for policy in shown.policies] == ["math"]
    assert shown.last_transfer.transfer_id in transfers
    assert "cannot be shown" in caplog.text


async def test_a_manifest_is_refused_at_the_first_name_that_is_too_long(pool: Pool) -> None:
    trainer = await pool.trainer()
    header = types_pb2.ManifestHeader(num_tensors=1_000_000, num_buckets=1)
    tensor = types_pb2.TensorSpec(name="n" * 3_000_000, dtype=types_pb2.DATA_TYPE_INT8)

    async def unfinished() -> AsyncIterator[publish_pb2.PutManifestRequest]:
        for chunk in ({"header": header}, {"tensors": [tensor]}):
            yield publish_pb2.PutManifestRequest(chunk=types_pb2.ManifestChunk(**chunk))
        await asyncio.sleep(60)  # the refusal comes before the stream ends

    await fails(trainer.stub.PutManifest(unfinished()), "INVALID_ARGUMENT", "INVALID_MANIFEST")


async def test_a_manifest_that_does_not_go_on_is_given_up(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await pool.trainer()
    monkeypatch.setattr(manifests, "MAX_PAUSE_SECONDS", 0.02)
    header = types_pb2.ManifestHeader(num_tensors=2, num_buckets=1)

    async def hangs() -> AsyncIterator[publish_pb2.PutManifestRequest]:
        yield publish_pb2.PutManifestRequest(chunk=types_pb2.ManifestChunk(header=header))
        await asyncio.sleep(60)

    hanging = [trainer.stub.PutManifest(hangs()) for _ in range(manifests.MAX_AT_ONCE * 2)]
    for call in hanging:
        await fails(call, "DEADLINE_EXCEEDED", "DEADLINE")
    assert await trainer.put_manifest()


async def test_more_receivers_than_a_group_holds(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "MAX_GROUP_SIZE", 3)
    await pool.replica("r0", num_receivers=2)
    trainer = await pool.trainer()
    await trainer.push()
    await pool.replica("r1")
    await fails(trainer.begin(), "RESOURCE_EXHAUSTED", "GROUP_TOO_LARGE")


# -- to a coordinator, from a replica that it called ---------------------------


class _OddReplica(FakeReplica):
    """Says that it has paused for longer than there is time."""

    async def CommitTransfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = await super().CommitTransfer(request, context)
        response.pause.seconds = 2**62
        return response


async def test_a_pause_that_cannot_be_is_that_replicas_failure(pool: Pool) -> None:
    odd = _OddReplica(pool.target, "odd")
    pool.things.append(odd)
    await odd.start()
    good = await pool.replica("r0")
    trainer = await pool.trainer()
    pushed = await trainer.push()
    assert pushed.pause.ToTimedelta().total_seconds() == 0.25
    by_name = {replica.replica_id: replica for replica in (await _listings(pool)).replicas}
    assert by_name["r0"].state == inspect_pb2.REPLICA_STATE_READY
    assert by_name["odd"].state == inspect_pb2.REPLICA_STATE_PENDING_WEIGHTS
    assert "CommitTransferResponse.pause" in by_name["odd"].state_reason
    assert good.calls.count("commit") == 1


@asynccontextmanager
async def _answering(service: str, names: list[str], answer: Any) -> AsyncIterator[str]:
    """A server that is none of ours; yields its address."""
    server = grpc.aio.server()
    handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name in names}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_replica_that_answers_gibberish_fails_its_push_alone(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await pool.replica("r0")
    trainer = await pool.trainer()

    async def gibberish(request: bytes, context: Any) -> bytes:
        return b"\xff\xff"

    names = [m.name for m in _METHODS if m.containing_service.name == "ReplicaService"]
    async with _answering("weft.v1.ReplicaService", names, gibberish) as address:
        ours, replica.address = replica.address, address
        await replica.register()
        begun = await trainer.begin()
        error = await fails(trainer.wait(begun.transfer_id), "UNAVAILABLE", "PEER_GONE")
        assert error.metadata["member"] == "r0"
        assert "answered JoinGroup with an invalid message" in error.message
        replica.address = ours
        await replica.register()
        await replica.heartbeat()
        assert (await trainer.push()).version.version == 2
    assert not [record for record in caplog.records if record.exc_info]


async def test_details_that_are_no_status_are_no_traceback() -> None:
    async def fails(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        trailers = (("grpc-status-details-bin", b"\xff\xff"),)
        await context.abort(grpc.StatusCode.ABORTED, "no", trailers)

    async with (
        _answering("weft.v1.InspectService", ["GetPool"], fails) as address,
        open_aio_channel(address) as channel,
    ):
        stub = inspect_pb2_grpc.InspectServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            await stub.GetPool(inspect_pb2.GetPoolRequest())
    assert "ABORTED" in error_from_rpc(failed.value).message
