"""Members that are alive and silent, and those that say that they work; on real streams."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.calls import error_of
from tests.contract.conftest import Pool
from tests.waits import eventually
from weft_rl.contract.errors import LoadFailedError, StalledError, WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.v1 import inspect_pb2, registry_pb2, rendezvous_pb2

#: What the coordinator allows here.
STALL_SECONDS = 0.6


async def _state(pool: Pool, replica_id: str) -> int:
    return next(r.state for r in (await pool.seen()).replicas if r.replica_id == replica_id)


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_a_replica_that_does_not_switch_keeps_nobody_waiting(
    pool: Pool, num_replicas: int
) -> None:
    await pool.restart(stall_seconds=STALL_SECONDS)
    stuck = await pool.replica("r0")
    others = [await pool.replica("r1")] if num_replicas > 1 else []
    trainer, other = await pool.trainer(), await pool.trainer("t2", policy="code")
    stuck.commit_gate.clear()
    pushing = asyncio.create_task(trainer.push())
    async with asyncio.timeout(10):
        await eventually(lambda: "commit" in stuck.calls)
        stuck.join_error = WeftError("its engine hangs")
        if others:
            assert list((await other.push()).replica_ids) == ["r1"]
            transfer = await pushing
            assert list(transfer.serving_replica_ids) == ["r1"]
        else:
            error = await error_of(pushing)
            assert isinstance(error, LoadFailedError)
            assert error.metadata["cause"] == "STALLED"
        assert await _state(pool, "r0") == inspect_pb2.REPLICA_STATE_SUSPECT
        stuck.join_error = None
        stuck.commit_gate.set()  # it does in the end what it was told
        while await _state(pool, "r0") == inspect_pb2.REPLICA_STATE_SUSPECT:
            await stuck.heartbeat()
            await asyncio.sleep(0.05)
    assert stuck.vector.holds(PolicyVersion("math", 1))


async def test_a_replica_that_says_that_it_gets_on_is_waited_for(pool: Pool) -> None:
    await pool.restart(stall_seconds=STALL_SECONDS)
    slow = await pool.replica("r0")
    trainer = await pool.trainer()
    slow.commit_gate.clear()
    pushing = asyncio.create_task(trainer.push())
    for _ in range(12):
        slow.work = registry_pb2.Work(what="loading", silence=duration_to_proto(0.05))
        await slow.heartbeat()
        await asyncio.sleep(STALL_SECONDS / 4)
    assert not pushing.done()
    for step in range(12):
        slow.work = registry_pb2.Work(what="loading", silence=duration_to_proto(step * 0.15))
        await slow.heartbeat()
        await asyncio.sleep(STALL_SECONDS / 4)
    error = await error_of(pushing)
    assert isinstance(error, LoadFailedError)
    assert "last said that it was at work (loading)" in error.message


async def test_a_receiver_that_says_that_it_works_is_waited_for(pool: Pool) -> None:
    await pool.restart(stall_seconds=STALL_SECONDS)
    slow = await pool.replica("r0")
    trainer = await pool.trainer()
    slow.prepares = False
    begun = await trainer.begin()
    pushing = asyncio.create_task(trainer.send(begun))
    outcome = asyncio.create_task(trainer.wait(begun.transfer_id))
    async with asyncio.timeout(10):
        await eventually(lambda: (begun.group.group_id, 1) in slow.ranks)
        rank = slow.ranks[begun.group.group_id, 1]
        await eventually(lambda: "prepare" in rank.log)
    for step in range(12):
        progress = rendezvous_pb2.Progress(
            transfer_id=begun.transfer_id,
            activity=rendezvous_pb2.ACTIVITY_ALLOCATING,
            done=step,
            total=12,
        )
        await rank.say(progress=progress)
        await asyncio.sleep(STALL_SECONDS / 4)
    assert not outcome.done()
    error = await error_of(outcome)
    assert isinstance(error, StalledError)
    assert "last said that it was allocating 11 of 12 bytes" in error.message
    await asyncio.gather(pushing, return_exceptions=True)
