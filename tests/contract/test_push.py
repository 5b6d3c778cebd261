"""Whole pushes through the real stubs: what is told, when, and in what order."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.contract.conftest import Pool
from tests.doubles.replicas import BASE_MANIFEST, LEFT_DIRTY, LOAD_FAILED
from trainer_side.outcome import missing_replicas
from weft.contract.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidNameError,
    NotReadyError,
    WeftError,
)
from weft.rpc.codec import duration_to_proto
from weft.rpc.status import error_from_rpc
from weft.v1 import inspect_pb2, publish_pb2


async def _fails(call: object) -> WeftError:
    with pytest.raises(grpc.RpcError) as failed:
        await call  # type: ignore[misc]
    return error_from_rpc(failed.value)


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
    listed = await trainer.inspect.ListVersions(inspect_pb2.ListVersionsRequest(policy="base"))
    assert [(v.version.version, v.state) for v in listed.versions] == [
        (3, inspect_pb2.VERSION_STATE_COMMITTED),
        (2, inspect_pb2.VERSION_STATE_RETIRED),
        (1, inspect_pb2.VERSION_STATE_RETIRED),
    ]


async def test_trainers_alternate_on_one_pool(pool: Pool) -> None:
    replica = await pool.replica()
    trainers = [await pool.trainer(f"t{i}", f"policy-{i}") for i in range(3)]

    async def three(trainer: object) -> None:
        for _ in range(3):
            await trainer.push()  # type: ignore[attr-defined]

    await asyncio.gather(*map(three, trainers))
    assert {p: e.alias for p, e in replica.vector.adapters.items()} == {
        f"policy-{i}": 3 for i in range(3)
    }


async def test_push_into_an_empty_pool_waits_for_a_replica(pool: Pool) -> None:
    trainer = await pool.trainer()
    pushing = asyncio.create_task(trainer.push())
    await asyncio.sleep(0.05)
    assert not pushing.done()
    await pool.replica()
    assert (await pushing).version.version == 1


async def test_late_replica_is_pending_until_the_next_push(pool: Pool) -> None:
    await pool.replica("r0")
    trainer = await pool.trainer()
    await trainer.push()
    late = await pool.replica("r1")
    assert not await late.heartbeat()
    got = await trainer.inspect.GetPool(inspect_pb2.GetPoolRequest())
    assert [(r.state, r.state_reason) for r in got.replicas] == [
        (inspect_pb2.REPLICA_STATE_READY, ""),
        (inspect_pb2.REPLICA_STATE_PENDING_WEIGHTS, "lacks math@1"),
    ]
    assert (await trainer.push()).epoch == 2
    assert await late.heartbeat()


async def test_retention_reaches_replicas_and_catalog(pool: Pool) -> None:
    await pool.restart(retain=2)
    replica = await pool.replica()
    trainer = await pool.trainer()
    for _ in range(4):
        await trainer.push()
    async with asyncio.timeout(8):
        while replica.vector.adapters["math"].versions != (3, 4):
            await asyncio.sleep(0.02)
        while True:
            policies = await trainer.inspect.ListPolicies(inspect_pb2.ListPoliciesRequest())
            if list(policies.policies[0].versions) == [3, 4]:
                break
            await asyncio.sleep(0.02)
    assert replica.vector.adapters["math"].alias == 4


# -- failures before the commit point ------------------------------------------


@pytest.mark.parametrize("where", ["prepare", "stage"])
async def test_dead_receiver_is_named(pool: Pool, where: str) -> None:
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    trainer = await pool.trainer()
    replicas[1].breaks_at = where
    begun = await trainer.begin()
    sending = asyncio.create_task(trainer.send(begun))
    error = await _fails(trainer.wait(begun.transfer_id))
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "r1")
    await sending
    healthy = replicas[0].ranks[begun.group.group_id, 1]
    async with asyncio.timeout(5):
        while healthy.log[-1] != "abort":
            await asyncio.sleep(0.01)
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
    error = await _fails(waiting)
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "trainer")


async def test_digest_mismatch(pool: Pool) -> None:
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    replicas[1].digest = b"\7" * 8
    trainer = await pool.trainer()
    error = await _fails(trainer.push())
    assert error.reason == "DIGEST_MISMATCH"
    assert error.status == "DATA_LOSS"
    assert all("commit" not in r.calls for r in replicas)


async def test_a_receivers_own_reason(pool: Pool) -> None:
    replica = await pool.replica()
    replica.stage_failure = ("STAGING_FULL", "no room for it")
    trainer = await pool.trainer()
    error = await _fails(trainer.push())
    assert isinstance(error, CapacityError)
    assert "no room for it" in error.message


async def test_replica_that_refuses_to_join(pool: Pool) -> None:
    replica = await pool.replica()
    replica.join_error = WeftError("no")
    trainer = await pool.trainer()
    begun = await trainer.begin()
    error = await _fails(trainer.wait(begun.transfer_id))
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "r0")


async def test_deadline_names_who_did_not_come(pool: Pool) -> None:
    replica = await pool.replica()
    replica.attends = False
    trainer = await pool.trainer()
    begun = await trainer.begin(timeout=duration_to_proto(0.3))
    await trainer.attend(begun)
    error = await _fails(trainer.wait(begun.transfer_id))
    assert error.reason == "DEADLINE"
    assert "r0 did not join" in error.message


async def test_abort_wakes_everyone(pool: Pool) -> None:
    replica = await pool.replica()
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer()
    begun = await trainer.begin()
    waiting = asyncio.create_task(trainer.wait(begun.transfer_id))
    sender = await trainer.attend(begun)
    while (await sender.hear()).WhichOneof("message") != "start":
        pass
    request = publish_pb2.AbortTransferRequest(
        transfer_id=begun.transfer_id,
        policy="math",
        fencing_token=trainer.token,
        message="enough",
    )
    await trainer.stub.AbortTransfer(request)
    await trainer.stub.AbortTransfer(request)
    assert (await _fails(waiting)).reason == "TRANSFER_ABORTED"

    async def hear_all() -> None:
        while True:
            await sender.hear()

    assert (await _fails(hear_all())).reason == "EPOCH_FENCED"
    assert sender.log[-1] == "abort"


async def test_lost_replica_aborts_the_push(pool: Pool) -> None:
    await pool.restart(heartbeat_seconds=0.1, lost_after_seconds=0.3)
    replica = await pool.replica()
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer()
    begun = await trainer.begin()
    sending = asyncio.create_task(trainer.send(begun))
    error = await _fails(trainer.wait(begun.transfer_id))
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", "r0")
    await sending
    assert (await _fails(replica.heartbeat())).reason == "REPLICA_UNKNOWN"


# -- failures after the commit point -------------------------------------------


async def test_who_serves_it_is_counted_and_the_others_named(pool: Pool) -> None:
    """A replica is lost in the commit, another one refuses."""
    await pool.restart(heartbeat_seconds=0.1, lost_after_seconds=0.3)
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
    again = await pool.trainer("other")
    transfer = await again.wait(pushed.transfer_id)
    assert not transfer.serving_replica_ids
    (remark,) = missing_replicas(transfer)
    assert "0 of the replicas in contact by then served it" in remark
    joined = await pool.replica("r1")
    joined.vector = replica.vector
    await joined.register()
    transfer = await again.wait(pushed.transfer_id)
    assert list(transfer.serving_replica_ids) == ["r1"]


async def test_one_replica_that_cannot_load_leaves_service(pool: Pool) -> None:
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    trainer = await pool.trainer()
    replicas[1].commit_error = LEFT_DIRTY
    assert (await trainer.push()).state == publish_pb2.TRANSFER_STATE_COMMITTED
    listed = await trainer.inspect.ListReplicas(inspect_pb2.ListReplicasRequest())
    assert [r.state for r in listed.replicas] == [
        inspect_pb2.REPLICA_STATE_READY,
        inspect_pb2.REPLICA_STATE_QUARANTINED,
    ]


async def test_when_none_can_load_the_trainer_is_told_and_the_pool_goes_on(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    await trainer.push()
    replica.commit_error = LOAD_FAILED
    error = await _fails(trainer.push())
    assert error.reason == "LOAD_FAILED"
    assert "the engine said no" in error.message
    assert await replica.heartbeat()
    listed = await trainer.inspect.ListVersions(inspect_pb2.ListVersionsRequest(policy="math"))
    assert [v.state for v in listed.versions] == [
        inspect_pb2.VERSION_STATE_FAILED,
        inspect_pb2.VERSION_STATE_COMMITTED,
    ]
    replica.commit_error = None
    assert (await trainer.push()).version.version == 3


async def test_a_switch_that_takes_too_long_is_not_waited_for(pool: Pool) -> None:
    await pool.restart(commit_timeout_seconds=0.2)
    fast, slow = [await pool.replica(f"r{i}") for i in range(2)]
    slow.commit_gate.clear()
    trainer = await pool.trainer()
    assert (await trainer.push()).state == publish_pb2.TRANSFER_STATE_COMMITTED
    assert await fast.heartbeat()
    assert not await slow.heartbeat()


# -- restarts ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["math", "base"])
@pytest.mark.parametrize(
    "refusal",
    [
        NotReadyError("nothing is staged"),
        InvalidNameError("'math' is the name of the base model here"),
        DigestMismatchError("other bytes are staged"),
        CapacityError("no memory"),
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
        error = await _fails(trainer.wait(begun.transfer_id))
        assert error.reason == "LOAD_FAILED"
        assert error.metadata["cause"] == refusal.reason
        assert error.metadata["withdrawn"] == "true"
        assert f"{refusal.message} [{refusal.reason}]" in error.message
    listed = await trainer.inspect.ListVersions(inspect_pb2.ListVersionsRequest(policy=policy))
    failed, before = listed.versions
    assert failed.state == inspect_pb2.VERSION_STATE_FAILED
    assert (failed.failure_reason, failed.failure_message) == (error.reason, error.message)
    assert before.state == inspect_pb2.VERSION_STATE_COMMITTED
    assert not before.failure_reason
    pooled = await trainer.inspect.GetPool(inspect_pb2.GetPoolRequest())
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


async def test_what_may_be_served_is_withdrawn_when_every_target_has_reported(pool: Pool) -> None:
    await pool.restart(heartbeat_seconds=0.1, lost_after_seconds=0.4)
    replicas = [await pool.replica(f"r{i}") for i in range(2)]
    trainer = await pool.trainer()
    await trainer.push()
    replicas[0].commit_error = LOAD_FAILED
    replicas[1].commit_gate.clear()
    pushing = asyncio.create_task(trainer.push())
    while not pushing.done():
        await replicas[0].heartbeat()
        await asyncio.sleep(0.05)
    error = await _fails(pushing)
    assert error.metadata["withdrawn"] == "false"

    async def states() -> list[int]:
        listed = await trainer.inspect.ListVersions(inspect_pb2.ListVersionsRequest(policy="math"))
        return [version.state for version in listed.versions]

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


async def test_request_ids_and_versions_survive_a_restart(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    first = await trainer.push(request_id="one")
    replica.breaks_at = "never-staged"
    cut = await trainer.begin(request_id="two")
    await pool.restart()
    replica.breaks_at = ""
    replica.target = trainer.target = pool.target
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
    error = await _fails(after.wait(cut.transfer_id))
    assert error.reason == "TRANSFER_ABORTED"
    assert "restarted" in error.message
    abort = publish_pb2.AbortTransferRequest(transfer_id=cut.transfer_id, policy="math")
    await after.stub.AbortTransfer(abort)
    abort = publish_pb2.AbortTransferRequest(transfer_id=first.transfer_id, policy="math")
    assert (await _fails(after.stub.AbortTransfer(abort))).reason == "ALREADY_COMMITTED"
    abort.policy = "code"
    assert (await _fails(after.stub.AbortTransfer(abort))).reason == "LEASE_FENCED"
    transfer = await after.push()
    assert transfer.version.version == 3
    assert transfer.epoch == 2
    assert again.vector.adapters["math"].alias == 3
    got_pool = await after.inspect.GetPool(inspect_pb2.GetPoolRequest())
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
    replica.load_error = CapacityError("the engine does not hold still")
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer(policy="base")
    error = await _fails(trainer.push())
    assert "r0 does not load in place: the engine does not hold still" in error.message
    assert error.metadata["dirty"] == "true"
    assert not await replica.heartbeat()
    status = await trainer.inspect.ListReplicas(inspect_pb2.ListReplicasRequest())
    assert "base@1 was not loaded whole" in status.replicas[0].state_reason
