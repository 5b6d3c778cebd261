"""AdminService: every documented status, over real stubs."""

from __future__ import annotations

from typing import Any

from tests.contract.calls import refusal, refused
from tests.contract.conftest import Pool
from tests.doubles.replicas import LOAD_FAILED
from tests.doubles.tiny_model import CAPABILITIES
from weft_rl.rpc.codec import duration_from_proto, duration_to_proto, vector_to_proto
from weft_rl.v1 import (
    admin_pb2,
    inspect_pb2,
    publish_pb2,
    registry_pb2,
    types_pb2,
)


def _rollback(pool: Pool, policy: str, to: int, timeout: float = 10.0) -> Any:
    request = admin_pb2.RollbackRequest(policy=policy, to_version=to)
    return pool.order("Rollback", request, timeout)


def _pin(pool: Pool, policy: str, version: int, *, pinned: bool = True) -> Any:
    wanted = types_pb2.PolicyVersion(policy=policy, version=version)
    return pool.order("Pin", admin_pb2.PinRequest(version=wanted, pinned=pinned))


async def _policy(pool: Pool, name: str) -> inspect_pb2.Policy:
    return next(policy for policy in (await pool.seen()).policies if policy.policy == name)


async def test_rollback_of_an_adapter(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    await trainer.push()
    await trainer.push()
    response = await _rollback(pool, "math", 1)
    assert (response.version.version, response.replaced_version) == (1, 2)
    assert list(response.replica_ids) == ["r0"]
    assert replica.vector.adapters["math"].alias == 1
    assert (await _policy(pool, "math")).served_version == 1
    again = await _rollback(pool, "math", 1)
    assert (again.replaced_version, list(again.replica_ids)) == (1, [])
    listed = await trainer.inspect.ListTransfers(inspect_pb2.ListTransfersRequest())
    purposes = [publish_pb2.TransferPurpose.Name(t.purpose) for t in listed.transfers]
    assert purposes == ["TRANSFER_PURPOSE_ROLLBACK", *["TRANSFER_PURPOSE_PUSH"] * 2]
    assert (await trainer.push()).version.version == 3


async def test_rollback_of_a_base(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer(policy="base")
    for _ in range(3):
        await trainer.push()
    response = await _rollback(pool, "base", 2)
    assert duration_from_proto(response.pause) == 0.25
    status, error = await refused(_rollback(pool, "base", 1))
    assert (status, error.metadata["member"]) == ("FAILED_PRECONDITION/NOT_RETAINED", "r0")


async def test_what_cannot_be_gone_back_to(pool: Pool) -> None:
    await pool.replica()
    await (await pool.trainer()).push()
    assert await refusal(_rollback(pool, "no", 1)) == "NOT_FOUND/POLICY_UNKNOWN"
    assert await refusal(_rollback(pool, "math", 9)) == "NOT_FOUND/VERSION_UNKNOWN"


async def test_a_rollback_that_no_replica_can_carry_out(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    await trainer.push()
    await trainer.push()
    replica.commit_error = LOAD_FAILED
    assert await refusal(_rollback(pool, "math", 1)) == "INTERNAL/LOAD_FAILED"
    assert (await _policy(pool, "math")).served_version == 2


async def test_a_rollback_whose_turn_does_not_come(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    await trainer.push()
    await trainer.push()
    await trainer.begin()
    status = await refusal(_rollback(pool, "math", 1, timeout=1.0))
    assert status == "DEADLINE_EXCEEDED/DEADLINE"
    assert (await _policy(pool, "math")).served_version == 2


async def test_pin(pool: Pool) -> None:
    await pool.replica()
    await (await pool.trainer()).push()
    await _pin(pool, "math", 1)
    await _pin(pool, "math", 1)
    assert list((await _policy(pool, "math")).pinned_versions) == [1]
    await pool.restart()
    assert list((await _policy(pool, "math")).pinned_versions) == [1]
    await _pin(pool, "math", 1, pinned=False)
    await _pin(pool, "math", 1, pinned=False)
    assert list((await _policy(pool, "math")).pinned_versions) == []


async def test_a_pin_of_the_base_is_told_with_each_heartbeat(pool: Pool) -> None:
    replica = await pool.replica()
    base = await pool.trainer(policy="base")
    await base.push()
    await _pin(pool, "base", 1)
    request = registry_pb2.HeartbeatRequest(
        replica_id="r0",
        incarnation=replica.incarnation,
        report=registry_pb2.ReplicaReport(
            version_vector=vector_to_proto(replica.vector),
            retained_base_versions=replica.retained,
        ),
    )
    assert list((await replica.registry.Heartbeat(request)).pinned_base_versions) == [1]
    status = await refusal(base.begin(timeout=duration_to_proto(1.0)))
    assert status == "DEADLINE_EXCEEDED/DEADLINE"
    request.report.pinned_base_versions.append(1)
    request.report.pinned_base_bytes = CAPABILITIES.staging_capacity_bytes
    await replica.registry.Heartbeat(request)
    assert await refusal(base.begin()) == "RESOURCE_EXHAUSTED/STAGING_FULL"
    request.report.pinned_base_bytes = 0
    await replica.registry.Heartbeat(request)
    await base.push()


async def test_what_cannot_be_pinned(pool: Pool) -> None:
    await pool.replica()
    base = await pool.trainer(policy="base")
    await base.push()
    for _ in range(2):
        await base.push()
    assert await refusal(_pin(pool, "base", 1)) == "FAILED_PRECONDITION/NOT_RETAINED"
    begun = await base.begin()
    assert await refusal(_pin(pool, "base", 2)) == "FAILED_PRECONDITION/TRANSFER_UNDER_WAY"
    await base.send(begun)
    await base.wait(begun.transfer_id)
    assert await refusal(_pin(pool, "no", 1)) == "NOT_FOUND/POLICY_UNKNOWN"
    assert await refusal(_pin(pool, "base", 9)) == "NOT_FOUND/VERSION_UNKNOWN"


async def test_a_version_that_was_retired_can_be_neither(pool: Pool) -> None:
    await pool.restart(retain_versions=1)
    await pool.replica()
    trainer = await pool.trainer()
    await trainer.push()
    await trainer.push()
    for call in (_rollback(pool, "math", 1), _pin(pool, "math", 1)):
        assert await refusal(call) == "FAILED_PRECONDITION/NOT_RETAINED"
