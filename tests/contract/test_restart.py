"""A pool that was restarted, over real stubs: what a replica has spilled, what it is
ordered to read, and what an owner is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig
from rollout_side.engine import SpillOrder
from rollout_side.memory.versions import StagedVersion, tensors_in
from rollout_side.spill.folder import SpillSettings
from tests.contract.calls import refusal
from tests.contract.conftest import Pool
from tests.contract.served_replica import MANIFEST, Served, serving
from tests.doubles.engine import EngineDouble
from tests.waits import eventually
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.coordinator.runtime.catalog.database import CatalogError
from weft_rl.rpc.codec import vector_from_proto
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest
from weft_rl.v1 import publish_pb2, replica_pb2, types_pb2

MATH_1 = types_pb2.PolicyVersion(policy="math", version=1)


async def test_what_is_spilled_is_told_and_ordered_read(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    pushed = await trainer.push()
    replica.vector = VersionVector()
    replica.spilled = [MATH_1, types_pb2.PolicyVersion(policy="code", version=7)]
    await replica.leave()
    await replica.register()
    (told,) = (await pool.seen()).replicas
    assert [f"{v.policy}@{v.version}" for v in told.report.spilled_versions] == ["code@7", "math@1"]
    await eventually(replica.heartbeat)
    (request,) = replica.switches
    assert (request.version, request.spilled.alias) == (MATH_1, 1)
    assert request.spilled.content_digest == pushed.content_digest
    assert request.spilled.layout_digest == pushed.layout_digest
    assert request.spilled.adapter.config_json == trainer.spec.config_json
    assert request.spilled.transfer_id not in ("", pushed.transfer_id)
    replica.spilled = []
    await replica.heartbeat()
    assert not (await pool.seen()).replicas[0].report.spilled_versions


async def test_a_request_id_of_another_policy_conflicts_after_a_restart(pool: Pool) -> None:
    await pool.replica()
    pushed = await (await pool.trainer()).push(request_id="once")
    await pool.restart()
    await pool.replica()
    other = await pool.trainer(policy="code")
    refused = await refusal(other.begin(request_id="once"))
    assert refused == "ALREADY_EXISTS/REQUEST_CONFLICT"
    assert [v.version for v in await pool.versions()] == [pushed.version]


async def test_the_owner_is_asked_with_its_lease(pool: Pool) -> None:
    await pool.restart(publish_again_after_seconds=0.1)
    replica = await pool.replica("r0")
    trainer = await pool.trainer()

    async def renewed() -> int:
        request = publish_pb2.RenewLeaseRequest(policy="math", fencing_token=trainer.token)
        return int((await trainer.stub.RenewLease(request)).publish_again_version)

    await trainer.push()
    assert await renewed() == 0
    replica.vector = VersionVector()

    async def is_asked() -> bool:
        await replica.heartbeat()  # in the moment after a commit it is not believed
        return await renewed() == 1

    await eventually(is_asked)
    (policy,) = (await pool.seen()).policies
    assert policy.publish_again_version == 1
    answer = await trainer.stub.AcquirePolicy(
        publish_pb2.AcquirePolicyRequest(
            trainer_id=trainer.trainer_id,
            session_id=trainer.session_id,
            policy="math",
            kind=types_pb2.POLICY_KIND_ADAPTER,
        )
    )
    assert answer.publish_again_version == 1
    await trainer.push()

    async def is_settled() -> bool:
        return await renewed() == 0

    await eventually(is_settled)


@pytest_asyncio.fixture
async def spilling(tmp_path: Path) -> AsyncIterator[Served]:
    """A replica with a spill directory, in which base@1 and math@1 lie."""
    spill = SpillSettings(directory=str(tmp_path), capacity_bytes=2**26, owner="r0")
    weights = {"w": torch.zeros(8, 8)}
    engine = EngineDouble(weights, base_copies=1, spill=spill)
    assert engine.spiller is not None
    keep = tuple(map(PolicyVersion.parse, ("base@1", "math@1")))
    for version in keep:
        await _write(engine, version)
    engine.spiller.follow(SpillOrder())
    agent = Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine)

    async def is_listed() -> bool:
        agent.serving.memory = await engine.memory()
        return {c.version for c in agent.serving.memory.spilled} == set(keep)

    async with serving(agent, engine) as replica:
        await eventually(is_listed)
        yield replica


DATA = torch.full((MANIFEST.wire_bytes,), 9, dtype=torch.uint8)
DIGEST = content_digest(
    [
        tensor_digest(content.reshape(-1).view(torch.uint8))
        for _, content in tensors_in(MANIFEST, DATA)
    ]
)


async def _write(engine: EngineDouble, version: PolicyVersion) -> None:
    segment = engine.store.reserve("t", MANIFEST.wire_bytes, adapter=False)
    segment.data.copy_(DATA)
    copy = StagedVersion("t", version, MANIFEST, segment, DIGEST)
    assert engine.folder is not None
    assert engine.folder.write(copy, "{}", going_on=lambda: True)
    engine.store.release("t", None)


def _order(policy: str, **changes: Any) -> replica_pb2.SwitchVersionRequest:
    fields: dict[str, Any] = {
        "transfer_id": f"t-{policy}",
        "adapter": types_pb2.AdapterSpec(config_json="{}") if policy != "base" else None,
        "content_digest": types_pb2.ContentDigest(value=DIGEST),
        "layout_digest": MANIFEST.layout_digest,
    }
    return replica_pb2.SwitchVersionRequest(
        version=types_pb2.PolicyVersion(policy=policy, version=1),
        spilled=replica_pb2.SpilledCopy(**{**fields, **changes}),
    )


async def test_a_spilled_version_is_read_and_served(spilling: Served) -> None:
    for _ in range(2):  # idempotent
        response = await spilling.stub.SwitchVersion(_order("base"))
        assert list(response.retained_base_versions) == [1]
    assert spilling.engine.base["w"].view(torch.uint8).eq(9).all()
    response = await spilling.stub.SwitchVersion(_order("math"))
    vector = vector_from_proto(response.version_vector)
    assert vector == VersionVector(1, {"math": AdapterVersions((1,), 1)})
    await spilling.commit("math@2")
    response = await spilling.stub.SwitchVersion(_order("math"))  # a call that was repeated
    assert vector_from_proto(response.version_vector).adapters["math"].alias == 2
    status = await spilling.stub.GetStatus(replica_pb2.GetStatusRequest())
    assert {v.policy for v in status.report.spilled_versions} == {"base", "math"}


async def test_what_a_spill_directory_cannot_give(spilling: Served) -> None:
    stub = spilling.stub
    plain = replica_pb2.SwitchVersionRequest(version=MATH_1)
    assert await refusal(stub.SwitchVersion(plain)) == "FAILED_PRECONDITION/NOT_RETAINED"
    other = types_pb2.ContentDigest(value=b"\0" * 8)
    refused = await refusal(stub.SwitchVersion(_order("math", content_digest=other)))
    assert refused == "FAILED_PRECONDITION/NOT_RETAINED"
    refused = await refusal(stub.SwitchVersion(_order("base", layout_digest=b"other")))
    assert refused == "DATA_LOSS/DIGEST_MISMATCH"
    assert spilling.engine.spiller is not None
    assert spilling.engine.spiller.copies == (), "neither is told of again"
    assert spilling.agent.serving.vector == VersionVector()


async def test_no_memory_to_read_it_to(spilling: Served) -> None:
    spilling.engine.store.staging_capacity_bytes = 10
    refused = await refusal(spilling.stub.SwitchVersion(_order("base")))
    assert refused == "RESOURCE_EXHAUSTED/STAGING_FULL"
    assert spilling.agent.serving.vector == VersionVector()


async def test_a_coordinator_whose_catalog_was_removed_ends_and_acknowledges_nothing(
    pool: Pool,
) -> None:
    trainer = await pool.trainer()
    await pool.replica()
    assert pool.coordinator is not None
    pool.catalog.unlink()
    status = await refusal(trainer.push())
    assert status.startswith(("UNAVAILABLE/COORDINATOR_AWAY", "INTERNAL"))
    with pytest.raises(CatalogError, match="was removed") as ended:
        await asyncio.wait_for(pool.coordinator.wait(), 10)
    assert ended.value.reason == "CATALOG_GONE"


async def test_one_that_writes_nothing_notices_it_too(pool: Pool) -> None:
    assert pool.coordinator is not None
    pool.catalog.rename(pool.catalog.with_name("moved.db"))
    with pytest.raises(CatalogError, match="was removed"):
        await asyncio.wait_for(pool.coordinator.wait(), 10)
