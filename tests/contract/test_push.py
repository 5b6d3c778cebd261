"""Whole pushes through the real stubs: what is told, when, and in what order."""

from __future__ import annotations

import asyncio

from tests.contract.calls import error_of
from tests.contract.conftest import Pool
from tests.doubles.tiny_model import BASE_MANIFEST
from weft_rl.contract.errors import LoadFailedError
from weft_rl.v1 import inspect_pb2, publish_pb2


async def test_adapter_push_is_served_by_every_replica(pool: Pool) -> None:
    replicas = [await pool.replica(f"r{i}", num_receivers=2) for i in range(2)]
    trainer = await pool.trainer()
    transfer = await trainer.push()
    assert transfer.state == publish_pb2.TRANSFER_STATE_COMMITTED
    assert str(transfer.version.policy) == "math"
    assert transfer.version.version == 1
    assert transfer.num_buckets_verified == transfer.num_buckets == 1
    assert transfer.pause.ToTimedelta().total_seconds() == 0.25
    assert transfer.epoch == 1
    for field in ("forming", "staging", "committing"):
        assert getattr(transfer, field).ToTimedelta().total_seconds() > 0
    for replica in replicas:
        assert replica.vector.adapters["math"].alias == 1
        assert await replica.heartbeat()


async def test_base_push_releases_every_bucket_and_keeps_the_group(pool: Pool) -> None:
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    trainer = await pool.trainer(policy="base")
    for version in (1, 2, 3):
        transfer = await trainer.push()
        assert (transfer.version.version, transfer.epoch) == (version, 1)
    assert [r.calls for r in replicas] == [["join", "commit", "commit", "commit"]] * 2
    assert trainer.sender is not None
    while trainer.sender.released < len(BASE_MANIFEST.buckets):
        await asyncio.wait_for(trainer.sender.hear(), 5)
    assert "prepare" not in trainer.sender.log
    assert [(v.version.version, v.state) for v in await pool.versions("base")] == [
        (3, inspect_pb2.VERSION_STATE_COMMITTED),
        (2, inspect_pb2.VERSION_STATE_RETIRED),
        (1, inspect_pb2.VERSION_STATE_RETIRED),
    ]


async def test_request_ids_and_versions_survive_a_restart(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    first = await trainer.push(request_id="one")
    replica.breaks_at = "never-staged"
    cut = await trainer.begin(request_id="two")
    await pool.restart()
    replica.breaks_at = ""
    replica.target = pool.target
    await replica.channel.close()
    await replica.server.stop(0)
    again = await pool.replica()
    after = await pool.trainer()
    got = await after.begin(request_id="one")
    assert (got.transfer_id, got.version.version) == (first.transfer_id, 1)
    assert not got.HasField("group")
    assert (await after.wait(first.transfer_id)).version.version == 1
    got = await after.begin(request_id="two")
    assert got.transfer_id == cut.transfer_id
    error = await error_of(after.wait(cut.transfer_id))
    assert error.reason == "TRANSFER_ABORTED"
    assert "restarted" in error.message
    abort = publish_pb2.AbortTransferRequest(transfer_id=cut.transfer_id, policy="math")
    await after.stub.AbortTransfer(abort)
    abort = publish_pb2.AbortTransferRequest(transfer_id=first.transfer_id, policy="math")
    assert (await error_of(after.stub.AbortTransfer(abort))).reason == "ALREADY_COMMITTED"
    abort.policy = "code"
    assert (await error_of(after.stub.AbortTransfer(abort))).reason == "LEASE_FENCED"
    transfer = await after.push()
    assert transfer.version.version == 3
    assert transfer.epoch == 2
    assert again.vector.adapters["math"].alias == 3
    got_pool = await pool.seen()
    assert got_pool.coordinator_generation == 2
    fetched = await after.inspect.GetTransfer(
        inspect_pb2.GetTransferRequest(transfer_id=first.transfer_id)
    )
    assert fetched.transfer.state == publish_pb2.TRANSFER_STATE_COMMITTED


async def test_replicas_that_load_in_place_are_told_to(pool: Pool) -> None:
    replicas = [await pool.replica("r0", loads_in_place=True), await pool.replica("r1")]
    trainer = await pool.trainer(policy="base")
    transfer = await trainer.push()
    assert transfer.state == publish_pb2.TRANSFER_STATE_COMMITTED
    assert [sorted(r.calls) for r in replicas] == [["commit", "join", "load"], ["commit", "join"]]
    (order,) = replicas[0].loads
    assert order.transfer_id == transfer.transfer_id
    assert (order.version.policy, order.version.version) == ("base", 1)
    assert order.coordinator_generation > 0
    assert 0 < order.timeout.ToTimedelta().total_seconds() < 3600


async def test_one_that_cannot_load_in_place_is_named(pool: Pool) -> None:
    replica = await pool.replica("r0", loads_in_place=True)
    replica.load_error = LoadFailedError("the engine does not pause")
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer(policy="base")
    error = await error_of(trainer.push())
    assert "r0 does not load in place: the engine does not pause" in error.message
    assert error.metadata["dirty"] == "true"
    assert not await replica.heartbeat()
    status = await trainer.inspect.ListReplicas(inspect_pb2.ListReplicasRequest())
    assert "base@1 was not loaded whole" in status.replicas[0].state_reason
