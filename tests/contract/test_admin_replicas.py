"""AdminService on replicas, and Retire: every documented status, over real stubs."""

from __future__ import annotations

import asyncio

from google.protobuf.duration_pb2 import Duration

from tests.contract.calls import refusal, refused
from tests.contract.conftest import Pool
from tests.waits import eventually
from weft_rl.rpc.codec import duration_from_proto, duration_to_proto
from weft_rl.v1 import admin_pb2 as pb
from weft_rl.v1 import inspect_pb2, registry_pb2, types_pb2


async def _state(pool: Pool, replica_id: str = "r0") -> tuple[str, str]:
    for replica in (await pool.seen()).replicas:
        if replica.replica_id == replica_id:
            state = inspect_pb2.ReplicaState.Name(replica.state)
            return state.removeprefix("REPLICA_STATE_"), replica.state_reason
    return "ABSENT", ""


async def test_a_cordon_outlives_both_sides(pool: Pool) -> None:
    replica = await pool.replica()
    request = pb.CordonRequest(replica_id="r0", reason="new disk")
    for _ in range(2):
        await pool.order("Cordon", request)
    assert await _state(pool) == ("OUT_OF_SERVICE", "by an operator: new disk")
    assert not await replica.heartbeat()
    await (await pool.trainer()).push()
    assert replica.vector.adapters["math"].alias == 1
    await pool.restart()
    order = (await pool.seen()).problems[-1]
    assert order.message == "r0 is not in the pool, and out of service by an operator: new disk"
    await pool.order("Uncordon", pb.UncordonRequest(replica_id="r0"))  # it is not back yet
    assert "r0" not in str((await pool.seen()).problems)


async def test_one_that_is_kept_out_is_told_to_refuse(pool: Pool) -> None:
    replica = await pool.replica()
    request = pb.CordonRequest(replica_id="r0", no_pushes=True, reason="x" * 600)
    await pool.order("Cordon", request)
    state, reason = await _state(pool)
    assert state == "OUT_OF_SERVICE"
    assert len(reason.partition(";")[0]) == len("by an operator: ") + 500
    await eventually(lambda: "refuse" in replica.calls)  # without a heartbeat
    assert replica.refusing.startswith("an operator took this replica out of service: xxx")
    response = await replica.registry.Heartbeat(
        registry_pb2.HeartbeatRequest(replica_id="r0", incarnation=replica.incarnation)
    )
    assert response.out_of_service.reason.startswith("xxx")
    assert response.out_of_service.no_pushes
    for _ in range(2):
        await pool.order("Uncordon", pb.UncordonRequest(replica_id="r0"))
    async with asyncio.timeout(10):
        while (await _state(pool))[0] != "READY":
            await asyncio.sleep(0.01)
    assert replica.refusing == ""


async def test_a_drain_is_told_with_the_next_heartbeat(pool: Pool) -> None:
    replica = await pool.replica()
    drain = pb.DrainRequest(replica_id="r0", reason="old card")
    await pool.order("Drain", drain)
    (seen,) = (await pool.seen()).replicas
    assert seen.state == inspect_pb2.REPLICA_STATE_DRAINING
    assert 200 < duration_from_proto(seen.report.drain.time_left) <= 300
    drain.timeout.CopyFrom(duration_to_proto(20.0))
    await pool.order("Drain", drain)
    beat = registry_pb2.HeartbeatRequest(replica_id="r0", incarnation=replica.incarnation)
    response = await replica.registry.Heartbeat(beat)
    assert response.drain.reason == "by an operator: old card"
    assert 0 < duration_from_proto(response.drain.time_left) <= 20
    assert not response.in_transfer
    beat.report.drain.time_left.CopyFrom(duration_to_proto(5.0))
    assert duration_from_proto((await replica.registry.Heartbeat(beat)).drain.time_left) <= 5
    await replica.leave()
    assert (await _state(pool))[0] == "ABSENT"


async def test_a_replica_in_a_transfer_is_told_to_stay(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    begun = await trainer.begin()
    beat = registry_pb2.HeartbeatRequest(replica_id="r0", incarnation=replica.incarnation)
    beat.report.drain.time_left.CopyFrom(duration_to_proto(30.0))
    beat.report.drain.reason = "told to stop"
    assert (await replica.registry.Heartbeat(beat)).in_transfer
    assert await _state(pool) == ("DRAINING", "told to stop")
    await trainer.send(begun)
    await trainer.wait(begun.transfer_id)
    assert replica.vector.adapters["math"].alias == 1
    assert not (await replica.registry.Heartbeat(beat)).in_transfer


async def test_orders_that_cannot_be_given(pool: Pool) -> None:
    await pool.replica()
    for method, request in (
        ("Cordon", pb.CordonRequest(replica_id="r9")),
        ("Uncordon", pb.UncordonRequest(replica_id="r9")),
        ("Drain", pb.DrainRequest(replica_id="r9")),
    ):
        assert await refusal(pool.order(method, request)) == "NOT_FOUND/REPLICA_UNKNOWN"
    for seconds in (-1, 1_000_000):
        request = pb.DrainRequest(replica_id="r0", timeout=Duration(seconds=seconds))
        assert await refusal(pool.order("Drain", request)) == "INVALID_ARGUMENT/INVALID_REQUEST"


async def test_retire(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    base = await pool.trainer("base-trainer", policy="base")
    for pusher in (trainer, trainer, base):
        await pusher.push()

    async def retire(policy: str, version: int) -> None:
        wanted = types_pb2.PolicyVersion(policy=policy, version=version)
        await pool.order("Retire", pb.RetireRequest(version=wanted))

    assert await refusal(retire("math", 2)) == "FAILED_PRECONDITION/VERSION_IN_USE"
    assert await refusal(retire("math", 9)) == "NOT_FOUND/VERSION_UNKNOWN"
    assert await refusal(retire("no", 1)) == "NOT_FOUND/POLICY_UNKNOWN"
    assert await refusal(retire("base", 1)) == "UNIMPLEMENTED/UNSUPPORTED"
    for _ in range(2):
        await retire("math", 1)
    math = next(p for p in (await pool.seen()).policies if p.policy == "math")
    assert list(math.versions) == [2]
    listed = await pool.versions()
    assert [v.state for v in listed] == [
        inspect_pb2.VERSION_STATE_COMMITTED,
        inspect_pb2.VERSION_STATE_RETIRED,
    ]
    assert "retire" in replica.calls


async def test_forget(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    base = await pool.trainer("base-trainer", policy="base")
    for pusher in (trainer, trainer, base):
        await pusher.push()

    async def forget(policy: str, *, force: bool = False) -> list[int]:
        request = pb.ForgetPolicyRequest(policy=policy, force=force)
        answer = await pool.order("ForgetPolicy", request)
        return [v.version for v in answer.retired_versions]

    assert await refusal(forget("no")) == "NOT_FOUND/POLICY_UNKNOWN"
    assert await refusal(forget("base")) == "UNIMPLEMENTED/UNSUPPORTED"
    status, error = await refused(forget("math"))
    assert (status, error.metadata["holder"]) == ("ALREADY_EXISTS/POLICY_OWNED", "trainer")
    assert all(part in error.message for part in ("lease expires in", "--force", "End the trainer"))
    assert await forget("math", force=True) == [1, 2]
    assert await forget("math") == [], "idempotent"

    async def is_dropped() -> bool:
        return replica.ended == ["math"] and not replica.vector.adapters

    await eventually(is_dropped)
    assert await replica.heartbeat()
    await pool.restart()
    await replica.follow(pool.target)
    await replica.register()
    assert [p.policy for p in (await pool.seen()).policies] == ["base"]
    listed = await pool.versions()
    assert [v.state for v in listed] == [inspect_pb2.VERSION_STATE_RETIRED] * 2
    again = await pool.trainer("another")
    assert (await again.push()).version.version == 3
    assert [p.policy for p in (await pool.seen()).policies] == ["base", "math"]


async def test_what_replicas_switch_to_is_not_forgotten(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    replica.commit_gate.clear()
    push = asyncio.create_task(trainer.push())

    async def is_committing() -> bool:
        return "commit" in replica.calls

    await eventually(is_committing)
    request = pb.ForgetPolicyRequest(policy="math", force=True)
    status = await refusal(pool.order("ForgetPolicy", request))
    assert status == "FAILED_PRECONDITION/TRANSFER_UNDER_WAY"
    replica.commit_gate.set()
    await push


async def test_retention(pool: Pool) -> None:
    await pool.restart(retain_versions=1)
    await pool.replica()
    trainer = await pool.trainer()
    await (await pool.trainer("base-trainer", policy="base")).push()
    await trainer.push()

    async def retain(policy: str, num_versions: int) -> int:
        request = pb.SetRetentionRequest(policy=policy, num_versions=num_versions)
        return (await pool.order("SetRetention", request)).num_versions

    assert await refusal(retain("no", 2)) == "NOT_FOUND/POLICY_UNKNOWN"
    assert await refusal(retain("base", 2)) == "UNIMPLEMENTED/UNSUPPORTED"
    for number in (-1, 1001):
        assert await refusal(retain("math", number)) == "INVALID_ARGUMENT/INVALID_REQUEST"
    for _ in range(2):
        assert await retain("math", 2) == 2
    await trainer.push()
    base, math = (await pool.seen()).policies
    assert (math.num_retained, math.has_own_retention, list(math.versions)) == (2, True, [1, 2])
    assert base.num_retained == 0
    await pool.restart(retain_versions=1)
    base, math = (await pool.seen()).policies
    assert (math.num_retained, math.has_own_retention, list(math.versions)) == (2, True, [1, 2])
    assert await retain("math", 0) == 1
    assert not (await pool.seen()).policies[1].has_own_retention
