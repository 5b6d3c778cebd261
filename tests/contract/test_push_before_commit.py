"""Pushes that fail before the commit point: who is named, and what is left behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.calls import error_of
from tests.contract.conftest import Pool
from tests.waits import eventually
from weft_rl.contract.errors import CapacityError, WeftError
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.v1 import admin_pb2, admin_pb2_grpc, publish_pb2


@pytest.mark.parametrize("where", ["prepare", "stage"])
async def test_dead_receiver_is_named(pool: Pool, where: str) -> None:
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    trainer = await pool.trainer()
    replicas[1].breaks_at = where
    begun = await trainer.begin()
    sending = asyncio.create_task(trainer.send(begun))
    error = await error_of(trainer.wait(begun.transfer_id))
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "r1")
    await sending
    healthy = replicas[0].ranks[begun.group.group_id, 1]
    await eventually(lambda: healthy.log[-1] == "abort")
    replicas[1].breaks_at = ""
    transfer = await trainer.push()
    assert (transfer.version.version, transfer.epoch) == (2, 2)
    assert replicas[0].calls.count("discard") == 1


async def test_dead_sender_is_named(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    replica.breaks_at = "never-staged"
    begun = await trainer.begin()
    sender = await trainer.attend(begun)
    waiting = asyncio.create_task(trainer.wait(begun.transfer_id))
    while (await sender.hear()).WhichOneof("message") != "start":
        pass
    await sender.close()
    error = await error_of(waiting)
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "trainer")


async def test_a_receivers_own_reason(pool: Pool) -> None:
    replica = await pool.replica()
    replica.stage_failure = ("STAGING_FULL", "no room for it")
    trainer = await pool.trainer()
    error = await error_of(trainer.push())
    assert isinstance(error, CapacityError)
    assert "no room for it" in error.message


async def test_replica_that_refuses_to_join(pool: Pool) -> None:
    replica = await pool.replica()
    replica.join_error = WeftError("no")
    trainer = await pool.trainer()
    begun = await trainer.begin()
    error = await error_of(trainer.wait(begun.transfer_id))
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "r0")


async def test_deadline_names_who_did_not_come(pool: Pool) -> None:
    replica = await pool.replica()
    replica.attends = False
    trainer = await pool.trainer()
    begun = await trainer.begin(timeout=duration_to_proto(0.3))
    await trainer.attend(begun)
    error = await error_of(trainer.wait(begun.transfer_id))
    assert error.reason == "DEADLINE"
    assert "r0 did not join" in error.message


@pytest.mark.parametrize("who", ["trainer", "operator"])
async def test_abort_wakes_everyone(pool: Pool, who: str) -> None:
    replica = await pool.replica()
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer()
    begun = await trainer.begin()
    waiting = asyncio.create_task(trainer.wait(begun.transfer_id))
    sender = await trainer.attend(begun)
    while (await sender.hear()).WhichOneof("message") != "start":
        pass
    for _ in range(2):
        if who == "operator":
            cancel = admin_pb2.CancelTransferRequest(transfer_id=begun.transfer_id, reason="enough")
            async with open_aio_channel(pool.target) as channel:
                await admin_pb2_grpc.AdminServiceStub(channel).CancelTransfer(cancel)
            continue
        abort = publish_pb2.AbortTransferRequest(
            transfer_id=begun.transfer_id,
            policy="math",
            fencing_token=trainer.token,
            message="enough",
        )
        await trainer.stub.AbortTransfer(abort)
    error = await error_of(waiting)
    assert error.reason == "TRANSFER_ABORTED"
    says = {"operator": "cancelled by an operator", "trainer": "given up by its trainer"}
    assert f"{says[who]}: enough" in str(error)

    async def hear_all() -> None:
        while True:
            await sender.hear()

    assert (await error_of(hear_all())).reason == "EPOCH_FENCED"
    assert sender.log[-1] == "abort"


async def test_lost_replica_aborts_the_push(pool: Pool) -> None:
    await pool.restart(heartbeat_seconds=0.1, lost_after_seconds=1.0)
    replica = await pool.replica()
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer()
    begun = await trainer.begin()
    sending = asyncio.create_task(trainer.send(begun))
    error = await error_of(trainer.wait(begun.transfer_id))
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "r0")
    await sending
    assert (await error_of(replica.heartbeat())).reason == "REPLICA_UNKNOWN"
