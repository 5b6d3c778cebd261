"""RegistryService: every status and reason that its protos list, through the real stubs."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.calls import fails
from tests.contract.conftest import Pool
from tests.doubles.replicas import FakeReplica
from tests.doubles.tiny_model import CAPABILITIES, REFERENCE
from weft_rl.contract import manifest as contract_manifest
from weft_rl.rpc.manifest_codec import reference_to_chunks
from weft_rl.v1 import inspect_pb2, publish_pb2, registry_pb2, types_pb2


@pytest.mark.parametrize(
    ("capabilities", "code", "reason"),
    [
        ({"base_fingerprint": "0" * 64}, "FAILED_PRECONDITION", "BASE_MISMATCH"),
        ({"backends": ("nccl",)}, "FAILED_PRECONDITION", "BACKEND_MISMATCH"),
    ],
)
async def test_register(pool: Pool, capabilities: dict[str, Any], code: str, reason: str) -> None:
    await pool.replica("r0")
    other = FakeReplica(pool.target, "r1", dataclasses.replace(CAPABILITIES, **capabilities))
    pool.things.append(await other.start(register=False))
    await fails(other.register(), code, reason)


async def test_register_names(pool: Pool) -> None:
    first = await pool.replica("r0")
    second = FakeReplica(pool.target, "r0")
    pool.things.append(await second.start(register=False))
    await fails(second.register(), "ALREADY_EXISTS", "REQUEST_CONFLICT")
    second.replica_id = "../r"
    await fails(second.register(), "INVALID_ARGUMENT", "INVALID_NAME")
    answer = await first.register()
    assert answer.heartbeat_interval.ToTimedelta().total_seconds() == 2
    assert not answer.reference_wanted
    assert answer.coordinator_generation == 1
    await first.leave()
    await first.leave()
    await fails(first.heartbeat(), "NOT_FOUND", "REPLICA_UNKNOWN")
    second.replica_id = "r0"
    await second.register()


async def test_no_adapter_has_a_name_that_a_server_has(pool: Pool) -> None:
    """Such a push would commit, and every replica refuse it."""
    await pool.replica("r0")
    named = await pool.replica("r1", served_names=("tiny", "math"))
    trainer = await pool.trainer()
    error = await fails(trainer.begin(), "INVALID_ARGUMENT", "INVALID_NAME")
    assert error.metadata == {"replica": "r1", "name": "math"}
    await named.leave()
    await trainer.push()
    error = await fails(named.register(), "INVALID_ARGUMENT", "INVALID_NAME")
    assert error.metadata == {"policy": "math", "name": "math"}
    named.capabilities = dataclasses.replace(CAPABILITIES, served_names=("x",) * 5000)
    await fails(named.register(), "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_a_heartbeat_is_answered_with_what_is_lacking(pool: Pool) -> None:
    await pool.replica("r0")
    trainer = await pool.trainer()
    await trainer.push()
    late = await pool.replica("r1")
    assert not await late.heartbeat()
    assert [(v.policy, v.version) for v in late.heard.lacking] == [("math", 1)]
    assert not late.heard.lacking_more


def _checkpoint(**changes: Any) -> registry_pb2.Checkpoint:
    fields: dict[str, Any] = {
        "state": registry_pb2.CHECKPOINT_STATE_DIGESTED,
        "digest": b"1" * 32,
        "files": [registry_pb2.CheckpointFile(name="model.safetensors", digest=b"2" * 32)],
    }
    return registry_pb2.Checkpoint(**fields | changes)


async def _report(
    replica: FakeReplica, checkpoint: registry_pb2.Checkpoint, incarnation: str = ""
) -> None:
    request = registry_pb2.ReportCheckpointRequest(
        replica_id=replica.replica_id,
        incarnation=incarnation or replica.incarnation,
        checkpoint=checkpoint,
    )
    await replica.registry.ReportCheckpoint(request)


async def test_report_checkpoint(pool: Pool) -> None:
    one, two = await pool.replica("r0"), await pool.replica("r1")
    await _report(one, _checkpoint())
    assert await one.heartbeat()
    await _report(two, _checkpoint(state=registry_pb2.CHECKPOINT_STATE_READING))
    assert not await two.heartbeat()
    await _report(two, _checkpoint(digest=b"3" * 32, files=[]))
    assert not await two.heartbeat()
    assert "model.safetensors differ from those of r0" in two.heard.base_doubt
    trainer = await pool.trainer()
    got = await trainer.inspect.GetPool(inspect_pb2.GetPoolRequest())
    assert got.base_checkpoint.replica_id == "r0"
    assert got.base_checkpoint.files[0].name == "model.safetensors"
    assert got.replicas[1].checkpoint_digest == b"3" * 32
    assert "model.safetensors differ from those of r0" in got.replicas[1].state_reason
    described = await trainer.stub.DescribeTarget(publish_pb2.DescribeTargetRequest())
    assert described.base_checkpoint_digest == b"1" * 32
    await _report(two, _checkpoint(digest=b"1" * 32))
    assert await two.heartbeat()
    error = await fails(_report(two, _checkpoint(), "i9"), "NOT_FOUND", "REPLICA_UNKNOWN")
    assert "register again" in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"state": 0},
        {"state": 99},
        {"digest": b""},
        {"digest": b"1" * 31},
        {"files": [registry_pb2.CheckpointFile(name="x", digest=b"")]},
        {"files": [registry_pb2.CheckpointFile(name="x", digest=b"1" * 32)] * 257},
    ],
)
async def test_a_checkpoint_that_is_none(pool: Pool, changes: dict[str, Any]) -> None:
    replica = await pool.replica("r0")
    call = _report(replica, _checkpoint(**changes))
    await fails(call, "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_put_reference(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await pool.replica()
    (chunk,) = reference_to_chunks(REFERENCE)
    chunk.fingerprint = "0" * 64
    requests = iter([registry_pb2.PutReferenceRequest(chunk=chunk)])
    await fails(replica.registry.PutReference(requests), "INVALID_ARGUMENT", "INVALID_MANIFEST")

    monkeypatch.setattr(contract_manifest, "MAX_TENSORS", 5_000)

    async def flood() -> AsyncIterator[registry_pb2.PutReferenceRequest]:
        tensor = types_pb2.ReferenceTensor(name="x", dtype=types_pb2.DATA_TYPE_INT8)
        many = types_pb2.ReferenceChunk(tensors=[tensor] * 4096)
        while True:
            yield registry_pb2.PutReferenceRequest(chunk=many)

    call = replica.registry.PutReference(flood(), timeout=20)
    await fails(call, "RESOURCE_EXHAUSTED", "MANIFEST_TOO_LARGE")
