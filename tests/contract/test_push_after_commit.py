"""What becomes of a push once its commit is decided: who serves it, and when it is withdrawn."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.calls import error_of
from tests.contract.conftest import Pool
from tests.doubles.replicas import LOAD_FAILED
from trainer_side.push_result import missing_replicas
from weft_rl.contract.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidNameError,
    NotReadyError,
    WeftError,
)
from weft_rl.v1 import inspect_pb2, publish_pb2


async def test_who_serves_it_is_counted_and_the_others_named(pool: Pool) -> None:
    """A replica is lost in the commit, another one refuses."""
    await pool.restart(heartbeat_seconds=0.1, lost_after_seconds=1.0)
    replicas = [await pool.replica(f"r{i}") for i in range(3)]
    trainer = await pool.trainer()
    replicas[1].commit_error = LOAD_FAILED
    replicas[2].commit_gate.clear()
    pushing = asyncio.create_task(trainer.push())
    while not pushing.done():
        await asyncio.sleep(0.05)
        await asyncio.gather(*(r.heartbeat() for r in replicas[:2]))
    transfer = await pushing
    assert list(transfer.replica_ids) == ["r0", "r1", "r2"]
    assert list(transfer.serving_replica_ids) == ["r0"]
    assert [(r.replica_id, r.reason) for r in transfer.refusals] == [
        ("r1", "LOAD_FAILED"),
        ("r2", "PEER_GONE"),
    ]
    refused, lost = missing_replicas(transfer)
    assert refused.startswith("r1 does not serve it: it did not switch at the commit")
    assert "the engine said no [LOAD_FAILED]" in refused
    assert lost.startswith("r2 does not serve it: it did not switch at the commit")
    assert "no heartbeat" in lost
    replicas[2].commit_gate.set()


async def test_a_restarted_coordinator_counts_who_is_there(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    pushed = await trainer.push()
    await pool.restart()
    replica.target = pool.target
    again = await pool.trainer()
    transfer = await again.wait(pushed.transfer_id)
    assert not transfer.serving_replica_ids
    (remark,) = missing_replicas(transfer)
    assert "0 of the replicas in contact by then served it" in remark
    joined = await pool.replica("r1")
    joined.vector = replica.vector
    await joined.register()
    transfer = await again.wait(pushed.transfer_id)
    assert list(transfer.serving_replica_ids) == ["r1"]


async def test_a_switch_that_takes_too_long_is_not_waited_for(pool: Pool) -> None:
    await pool.restart(commit_timeout_seconds=0.2)
    fast, slow = [await pool.replica(f"r{i}") for i in range(2)]
    slow.commit_gate.clear()
    trainer = await pool.trainer()
    assert (await trainer.push()).state == publish_pb2.TRANSFER_STATE_COMMITTED
    assert await fast.heartbeat()
    assert not await slow.heartbeat()


@pytest.mark.parametrize("policy", ["math", "base"])
@pytest.mark.parametrize(
    "refusal",
    [
        NotReadyError("nothing is staged"),
        InvalidNameError("'math' is the name of the base model here"),
        DigestMismatchError("other bytes are staged"),
        CapacityError("no memory"),
        LOAD_FAILED,
    ],
    ids=lambda error: error.reason,
)
async def test_what_every_replica_refuses_has_failed(
    pool: Pool, policy: str, refusal: WeftError
) -> None:
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    trainer = await pool.trainer(policy=policy)
    await trainer.push()
    for replica in replicas:
        replica.commit_error = refusal
    begun = await trainer.begin()
    await trainer.send(begun)
    for _ in range(2):  # idempotent
        error = await error_of(trainer.wait(begun.transfer_id))
        assert error.reason == "LOAD_FAILED"
        assert error.metadata["cause"] == refusal.reason
        assert error.metadata["withdrawn"] == "true"
        assert f"{refusal.message} [{refusal.reason}]" in error.message
    failed, before = await pool.versions(policy)
    assert failed.state == inspect_pb2.VERSION_STATE_FAILED
    assert (failed.failure_reason, failed.failure_message) == (error.reason, error.message)
    assert before.state == inspect_pb2.VERSION_STATE_COMMITTED
    assert not before.failure_reason
    pooled = await pool.seen()
    (served,) = [p.served_version for p in pooled.policies if p.policy == policy]
    assert served == 1
    assert {r.state for r in pooled.replicas} == {inspect_pb2.REPLICA_STATE_READY}
    abort = publish_pb2.AbortTransferRequest(
        transfer_id=begun.transfer_id, policy=trainer.policy, fencing_token=trainer.token
    )
    await trainer.stub.AbortTransfer(abort)
    for replica in replicas:
        replica.commit_error = None
    assert (await trainer.push()).version.version == 3


async def test_what_may_be_served_is_undone_when_every_target_has_reported(pool: Pool) -> None:
    await pool.restart(heartbeat_seconds=0.1, lost_after_seconds=1.5)
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    trainer = await pool.trainer()
    await trainer.push()
    replicas[0].commit_error = LOAD_FAILED
    replicas[1].commit_gate.clear()
    pushing = asyncio.create_task(trainer.push())
    while not pushing.done():
        await replicas[0].heartbeat()
        await asyncio.sleep(0.05)
    error = await error_of(pushing)
    assert error.metadata["withdrawn"] == "false"

    async def states() -> list[int]:
        return [version.state for version in await pool.versions()]

    assert await states() == [inspect_pb2.VERSION_STATE_COMMITTED] * 2
    await replicas[1].register()  # the same process: its order may still be carried out
    async with asyncio.timeout(10):
        while await states() != [
            inspect_pb2.VERSION_STATE_FAILED,
            inspect_pb2.VERSION_STATE_COMMITTED,
        ]:
            await asyncio.gather(*(replica.heartbeat() for replica in replicas))
            await asyncio.sleep(0.05)
    assert "discard" in replicas[1].calls
    assert await replicas[1].heartbeat()
    replicas[1].commit_gate.set()
