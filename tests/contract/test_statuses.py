"""Every status and reason that the protos list, provoked through the real stubs."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rich.console import Console

from tests.contract.conftest import Pool
from tests.doubles.replicas import (
    ADAPTER_MANIFEST,
    CAPABILITIES,
    REFERENCE,
    FakeRank,
    FakeReplica,
    FakeTrainer,
    adapter_spec,
)
from weft.contract import manifest as contract_manifest
from weft.contract.bucket_plan import plan_buckets
from weft.contract.errors import (
    BaseMismatchError,
    LeaseFencedError,
    NotAllowedError,
    NotFiniteError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    PolicyOwnedError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
)
from weft.contract.tensors import DataType, TensorMeta
from weft.coordinator.runtime import group_store
from weft.rpc.codec import duration_to_proto
from weft.rpc.manifest_codec import manifest_to_chunks, reference_to_chunks
from weft.rpc.status import error_from_rpc
from weft.v1 import (
    inspect_pb2,
    publish_pb2,
    registry_pb2,
    rendezvous_pb2,
    types_pb2,
)
from weft_cli.status import render


async def _fails(call: Any, code: str, reason: str) -> WeftError:
    """Await a call that must fail with this status and reason."""
    with pytest.raises(grpc.RpcError) as failed:
        await call
    error = error_from_rpc(failed.value)
    assert (failed.value.code().name, error.reason) == (code, reason)
    return error


# -- PublishService ------------------------------------------------------------


async def test_describe_target(pool: Pool) -> None:
    trainer = FakeTrainer(pool.target)
    pool.things.append(trainer)
    request = publish_pb2.DescribeTargetRequest()
    error = await _fails(
        trainer.stub.DescribeTarget(request, timeout=1.5), "UNAVAILABLE", "POOL_EMPTY"
    )
    assert isinstance(error, PeerUnavailableError)
    waiting = asyncio.ensure_future(trainer.stub.DescribeTarget(request, timeout=10))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await pool.replica()
    described = await waiting
    assert described.base_fingerprint == REFERENCE.fingerprint
    assert described.architecture == REFERENCE.architecture
    assert described.base_dtype == types_pb2.DATA_TYPE_BFLOAT16
    assert dict(described.base_dtype_exceptions) == {
        "model.norm.weight": types_pb2.DATA_TYPE_FLOAT32
    }
    assert described.num_replicas == 1


async def test_acquire_policy(pool: Pool) -> None:
    first = await pool.trainer("t1")
    second = FakeTrainer(pool.target, "t2")
    pool.things.append(second)
    error = await _fails(second.acquire(), "ALREADY_EXISTS", "POLICY_OWNED")
    assert isinstance(error, PolicyOwnedError)
    assert error.metadata["holder"] == "t1"
    assert 0 < float(error.metadata["expires_in_seconds"]) <= 10
    again = await first.acquire()
    assert again.fencing_token == 1
    for name in ("../up", "x" * 64, ""):
        second.policy = name
        await _fails(second.acquire(), "INVALID_ARGUMENT", "INVALID_NAME")
    unset = publish_pb2.AcquirePolicyRequest(trainer_id="t", session_id="s", policy="p")
    await _fails(second.stub.AcquirePolicy(unset), "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_renew_and_release(pool: Pool) -> None:
    trainer = await pool.trainer()
    renew = publish_pb2.RenewLeaseRequest(policy="math", fencing_token=1)
    lease = (await trainer.stub.RenewLease(renew)).lease
    assert lease.time_to_live.ToTimedelta().total_seconds() == 10
    release = publish_pb2.ReleasePolicyRequest(policy="math", fencing_token=1)
    await trainer.stub.ReleasePolicy(release)
    await trainer.stub.ReleasePolicy(release)
    error = await _fails(trainer.stub.RenewLease(renew), "ABORTED", "LEASE_FENCED")
    assert isinstance(error, LeaseFencedError)


async def _put(trainer: FakeTrainer, *chunks: types_pb2.ManifestChunk) -> Any:
    async def requests() -> AsyncIterator[publish_pb2.PutManifestRequest]:
        for chunk in chunks:
            yield publish_pb2.PutManifestRequest(chunk=chunk)

    return await trainer.stub.PutManifest(requests())


async def test_put_manifest_refuses_what_cannot_be(pool: Pool) -> None:
    trainer = await pool.trainer()
    header, buckets, tensors = manifest_to_chunks(ADAPTER_MANIFEST)

    def tensors_with(**changes: Any) -> types_pb2.ManifestChunk:
        copy = types_pb2.ManifestChunk()
        copy.CopyFrom(tensors)
        for name, value in changes.items():
            setattr(copy.tensors[1], name, value)
        return copy

    wrong_digest = types_pb2.ManifestChunk()
    wrong_digest.CopyFrom(header)
    wrong_digest.header.layout_digest = b"\0" * 32
    for chunks in (
        (),
        (buckets, tensors),
        (header, header),
        (header, buckets),
        (header, buckets, tensors, tensors),
        (wrong_digest, buckets, tensors),
        (header, buckets, tensors_with(name=tensors.tensors[0].name)),
        (header, buckets, tensors_with(offset_bytes=0)),
        (header, buckets, tensors_with(offset_bytes=3)),
        (header, buckets, tensors_with(bucket=4)),
        (header, buckets, tensors_with(dtype=0)),
    ):
        await _fails(_put(trainer, *chunks), "INVALID_ARGUMENT", "INVALID_MANIFEST")


async def test_ten_million_tensors_are_refused_at_the_header(pool: Pool) -> None:
    trainer = await pool.trainer()
    header = types_pb2.ManifestHeader(num_tensors=10_000_000, num_buckets=1)

    async def unfinished() -> AsyncIterator[publish_pb2.PutManifestRequest]:
        yield publish_pb2.PutManifestRequest(chunk=types_pb2.ManifestChunk(header=header))
        await asyncio.sleep(60)  # the refusal comes before the stream ends

    call = trainer.stub.PutManifest(unfinished(), timeout=5)
    await _fails(call, "RESOURCE_EXHAUSTED", "MANIFEST_TOO_LARGE")


async def test_a_hundred_thousand_tensors_pass(pool: Pool) -> None:
    trainer = await pool.trainer()
    metas = [
        TensorMeta(f"model.layers.{i // 9}.mlp.experts.{i % 9}.up_proj.weight", DataType.INT8, (8,))
        for i in range(100_000)
    ]
    trainer.manifest = plan_buckets(metas, 2**20)
    assert await trainer.put_manifest() == trainer.manifest.layout_digest
    assert await trainer.put_manifest() == trainer.manifest.layout_digest


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"layout_digest": b"?"}, "FAILED_PRECONDITION", "MANIFEST_UNKNOWN"),
        ({"fencing_token": 99}, "ABORTED", "LEASE_FENCED"),
        ({"policy": "no way"}, "INVALID_ARGUMENT", "INVALID_NAME"),
        ({"adapter": None}, "INVALID_ARGUMENT", "INVALID_ADAPTER"),
        ({"adapter": adapter_spec(use_dora=True)}, "INVALID_ARGUMENT", "INVALID_ADAPTER"),
        ({"adapter": adapter_spec(r=8)}, "INVALID_ARGUMENT", "INVALID_ADAPTER"),
        ({"adapter": adapter_spec(target_modules="(.*.*)*x")}, "INVALID_ARGUMENT",
         "INVALID_ADAPTER"),
        ({"adapter": adapter_spec(alpha_pattern={"(.*.*)*x": 1})}, "INVALID_ARGUMENT",
         "INVALID_ADAPTER"),
        ({"adapter": types_pb2.AdapterSpec(config_json="{" * 70_000)}, "INVALID_ARGUMENT",
         "INVALID_ADAPTER"),
        ({"backend": "nccl"}, "FAILED_PRECONDITION", "BACKEND_MISMATCH"),
        ({"require": publish_pb2.Requirement(min_replicas=2),
          "timeout": duration_to_proto(0.2)}, "UNAVAILABLE", "POOL_EMPTY"),
    ],
)  # fmt: skip
async def test_begin_transfer(pool: Pool, changes: dict[str, Any], code: str, reason: str) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    await _fails(trainer.begin(**changes), code, reason)
    listed = await trainer.inspect.ListTransfers(inspect_pb2.ListTransfersRequest())
    assert not listed.transfers
    assert (await trainer.push()).version.version == 1  # nothing was burnt


async def test_begin_transfer_for_another_base(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    spec = adapter_spec()
    spec.base_fingerprint = "0" * 64
    error = await _fails(trainer.begin(adapter=spec), "FAILED_PRECONDITION", "BASE_MISMATCH")
    assert isinstance(error, BaseMismatchError)


async def test_begin_transfer_of_a_wrong_base(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer(policy="base")
    trainer.manifest = plan_buckets(REFERENCE.tensors[:-1])
    await trainer.put_manifest()
    error = await _fails(trainer.begin(), "INVALID_ARGUMENT", "INVALID_MANIFEST")
    assert "model.norm.weight" in error.message


async def test_begin_transfer_without_lora(pool: Pool) -> None:
    await pool.replica(lora_enabled=False)
    trainer = await pool.trainer()
    await _fails(trainer.begin(), "FAILED_PRECONDITION", "LORA_DISABLED")


async def test_begin_transfer_without_room_says_where_and_when_to_retry(pool: Pool) -> None:
    await pool.replica("r0")
    await pool.replica("r1", adapter_capacity_bytes=8)
    trainer = await pool.trainer()
    with pytest.raises(grpc.RpcError) as failed:
        await trainer.begin()
    assert error_from_rpc(failed.value).metadata["replica"] == "r1"
    details = dict(failed.value.trailing_metadata())["grpc-status-details-bin"]
    assert b"google.rpc.RetryInfo" in details


async def test_a_push_that_is_checked_is_not_loaded_as_it_arrives(pool: Pool) -> None:
    await pool.replica(loads_in_place=True)
    trainer = await pool.trainer(policy="base")
    error = await _fails(trainer.begin(check_finite=True), "UNIMPLEMENTED", "UNSUPPORTED")
    assert error.metadata["replica"] == "r0"


async def test_what_the_sender_found_is_the_outcome(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    begun = await trainer.begin(check_finite=True)
    sender = await trainer.attend(begun)
    failed = rendezvous_pb2.RankFailed(
        transfer_id=begun.transfer_id, reason="NOT_FINITE", message="tensor 'w' holds NaN"
    )
    await sender.say(failed=failed)
    error = await _fails(trainer.wait(begun.transfer_id), "INVALID_ARGUMENT", "NOT_FINITE")
    assert isinstance(error, NotFiniteError)


async def test_begin_transfer_with_a_used_request_id(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    await trainer.push(request_id="once")
    trainer.manifest = plan_buckets([*(s.meta for s in ADAPTER_MANIFEST.tensors)][::-1])
    await trainer.put_manifest()
    await _fails(trainer.begin(request_id="once"), "ALREADY_EXISTS", "REQUEST_CONFLICT")


async def test_unknown_transfers(pool: Pool) -> None:
    trainer = await pool.trainer()
    for call in (
        trainer.wait("t-nope"),
        trainer.stub.AbortTransfer(publish_pb2.AbortTransferRequest(transfer_id="t-nope")),
        trainer.inspect.GetTransfer(inspect_pb2.GetTransferRequest(transfer_id="t-nope")),
    ):
        error = await _fails(call, "NOT_FOUND", "TRANSFER_UNKNOWN")
        assert isinstance(error, NotFoundError)


async def test_abort_transfer(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    done = await trainer.push()
    ask = publish_pb2.AbortTransferRequest
    request = ask(transfer_id=done.transfer_id, policy="math", fencing_token=1)
    call = trainer.stub.AbortTransfer(request)
    await _fails(call, "FAILED_PRECONDITION", "ALREADY_COMMITTED")
    begun = await trainer.begin()
    # Every policy counts its tokens from 1: another's owner has the same.
    for other in ({"policy": "code", "fencing_token": 1}, {"policy": "math", "fencing_token": 9}):
        request = ask(transfer_id=begun.transfer_id, **other)
        await _fails(trainer.stub.AbortTransfer(request), "ABORTED", "LEASE_FENCED")
    found = await trainer.inspect.GetTransfer(
        inspect_pb2.GetTransferRequest(transfer_id=begun.transfer_id)
    )
    assert found.transfer.state in (
        publish_pb2.TRANSFER_STATE_FORMING,
        publish_pb2.TRANSFER_STATE_STAGING,
    )


# -- RegistryService -----------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "code", "reason"),
    [
        ({"base_fingerprint": "0" * 64}, "FAILED_PRECONDITION", "BASE_MISMATCH"),
        ({"backends": ("nccl",)}, "FAILED_PRECONDITION", "BACKEND_MISMATCH"),
        ({"num_receivers": 0}, "INVALID_ARGUMENT", "INVALID_REQUEST"),
    ],
)
async def test_register(pool: Pool, capabilities: dict[str, Any], code: str, reason: str) -> None:
    await pool.replica("r0")
    other = FakeReplica(pool.target, "r1", dataclasses.replace(CAPABILITIES, **capabilities))
    pool.things.append(await other.start(register=False))
    await _fails(other.register(), code, reason)


async def test_register_names(pool: Pool) -> None:
    first = await pool.replica("r0")
    second = FakeReplica(pool.target, "r0")
    pool.things.append(await second.start(register=False))
    await _fails(second.register(), "ALREADY_EXISTS", "REQUEST_CONFLICT")
    second.replica_id = "../r"
    await _fails(second.register(), "INVALID_ARGUMENT", "INVALID_NAME")
    answer = await first.register()
    assert answer.heartbeat_interval.ToTimedelta().total_seconds() == 2
    assert not answer.reference_wanted
    assert answer.coordinator_generation == 1
    leave = registry_pb2.LeaveRequest(replica_id="r0", incarnation=first.incarnation)
    await first.registry.Leave(leave)
    await first.registry.Leave(leave)
    await _fails(first.heartbeat(), "NOT_FOUND", "REPLICA_UNKNOWN")
    second.replica_id = "r0"
    await second.register()


async def test_no_adapter_has_a_name_that_a_server_has(pool: Pool) -> None:
    """Such a push would commit, and every replica refuse it."""
    await pool.replica("r0")
    named = await pool.replica("r1", served_names=("tiny", "math"))
    trainer = await pool.trainer()
    error = await _fails(trainer.begin(), "INVALID_ARGUMENT", "INVALID_NAME")
    assert error.metadata == {"replica": "r1", "name": "math"}
    leave = registry_pb2.LeaveRequest(replica_id="r1", incarnation=named.incarnation)
    await named.registry.Leave(leave)
    await trainer.push()
    error = await _fails(named.register(), "INVALID_ARGUMENT", "INVALID_NAME")
    assert error.metadata == {"policy": "math", "name": "math"}
    named.capabilities = dataclasses.replace(CAPABILITIES, served_names=("x",) * 5000)
    await _fails(named.register(), "INVALID_ARGUMENT", "INVALID_REQUEST")


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
    error = await _fails(_report(two, _checkpoint(), "i9"), "NOT_FOUND", "REPLICA_UNKNOWN")
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
    await _fails(call, "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_an_adapter_says_which_base_it_was_trained_on(pool: Pool) -> None:
    await pool.replica()
    trainer, base = await pool.trainer(), await pool.trainer("base-trainer", "base")
    unknown = await trainer.push()
    assert unknown.served_over_base_version == 0
    spec = adapter_spec()
    spec.trained_on_base_version = 0
    await trainer.push(adapter=spec, refuse_other_base=True)
    await base.push()
    error = await _fails(
        trainer.begin(adapter=spec, refuse_other_base=True), "FAILED_PRECONDITION", "BASE_MISMATCH"
    )
    assert "was trained on base@0, the pool serves base@1" in error.message
    assert (await trainer.push(adapter=spec)).served_over_base_version == 1
    request = inspect_pb2.ListVersionsRequest(policy="math")
    newest, before, first = (await trainer.inspect.ListVersions(request)).versions
    assert newest.HasField("trained_on_base_version")
    assert (newest.trained_on_base_version, newest.served_over_base_version) == (0, 1)
    assert before.served_over_base_version == 1
    assert not first.HasField("trained_on_base_version")
    got = await trainer.inspect.GetPool(inspect_pb2.GetPoolRequest())
    math = next(policy for policy in got.policies if policy.policy == "math")
    assert math.HasField("trained_on_base_version")
    assert "math@3 (trained on base@0, served over base@1)" in _shown(got)
    spec.trained_on_base_version = -1
    await _fails(trainer.begin(adapter=spec), "INVALID_ARGUMENT", "INVALID_REQUEST")
    spec.ClearField("trained_on_base_version")
    error = await _fails(
        trainer.begin(adapter=spec, refuse_other_base=True), "FAILED_PRECONDITION", "BASE_MISMATCH"
    )
    assert "base@?" in error.message
    await trainer.push(adapter=spec)
    got = await trainer.inspect.GetPool(inspect_pb2.GetPoolRequest())
    assert "math@4 (trained on base@?, served over base@1)" in _shown(got)


def _shown(pool: inspect_pb2.GetPoolResponse) -> str:
    """What ``weft status`` prints, its lines joined."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(pool))
    return " ".join(console.export_text().split())


async def test_put_reference(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await pool.replica()
    (chunk,) = reference_to_chunks(REFERENCE)
    chunk.fingerprint = "0" * 64
    requests = iter([registry_pb2.PutReferenceRequest(chunk=chunk)])
    await _fails(replica.registry.PutReference(requests), "INVALID_ARGUMENT", "INVALID_MANIFEST")

    monkeypatch.setattr(contract_manifest, "MAX_TENSORS", 5_000)

    async def flood() -> AsyncIterator[registry_pb2.PutReferenceRequest]:
        tensor = types_pb2.ReferenceTensor(name="x", dtype=types_pb2.DATA_TYPE_INT8)
        many = types_pb2.ReferenceChunk(tensors=[tensor] * 4096)
        while True:
            yield registry_pb2.PutReferenceRequest(chunk=many)

    call = replica.registry.PutReference(flood(), timeout=20)
    await _fails(call, "RESOURCE_EXHAUSTED", "MANIFEST_TOO_LARGE")


# -- RendezvousService ---------------------------------------------------------


async def _rank(pool: Pool, rank: int = 0, token: str = "") -> FakeRank:
    """A rank of a group that forms and never completes."""
    replica = await pool.replica()
    replica.attends = False
    trainer = await pool.trainer()
    begun = await trainer.begin()
    if token:
        begun.group.token = token
    made = FakeRank(pool.target, begun.group, rank)
    pool.things.append(_Closing(made))
    return made


class _Closing:
    def __init__(self, rank: FakeRank) -> None:
        self.rank = rank

    async def stop(self) -> None:
        await self.rank.close()


def _store(rank: FakeRank, **operation: Any) -> Any:
    request = rendezvous_pb2.CallStoreRequest(credential=rank.credential, **operation)
    return rank.stub.CallStore(request)


async def test_call_store(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = await _rank(pool)
    keys = rendezvous_pb2.StoreKeys
    await _store(rank, set=rendezvous_pb2.StoreSet(keys=["a"], values=[b"1"]))
    got = await _store(rank, get=keys(keys=["a"], timeout=duration_to_proto(1)))
    assert list(got.values) == [b"1"]
    assert (await _store(rank, add=rendezvous_pb2.StoreAdd(key="n", amount=3))).number == 3
    assert (await _store(rank, check=keys(keys=["a", "b"]))).number == 0
    await _store(rank, append=rendezvous_pb2.StoreSet(keys=["a"], values=[b"2"]))
    swap = rendezvous_pb2.StoreCompareSet(key="a", expected=b"12", desired=b"3")
    assert list((await _store(rank, compare_set=swap)).values) == [b"3"]
    await _store(rank, wait=keys(keys=["a"], timeout=duration_to_proto(1)))
    assert (await _store(rank, count=rendezvous_pb2.StoreCount())).number == 2
    assert (await _store(rank, delete=keys(keys=["a", "z"]))).number == 1
    late = _store(rank, wait=keys(keys=["z"], timeout=duration_to_proto(0.02)))
    error = await _fails(late, "DEADLINE_EXCEEDED", "DEADLINE")
    assert isinstance(error, TransferTimeoutError)
    await _fails(_store(rank), "INVALID_ARGUMENT", "PROTOCOL")
    monkeypatch.setattr(group_store, "MAX_STORE_BYTES", 10)
    full = _store(rank, set=rendezvous_pb2.StoreSet(keys=["b"], values=[b"x" * 11]))
    await _fails(full, "RESOURCE_EXHAUSTED", "STORE_FULL")


async def test_a_wait_in_the_store_wakes_when_the_group_is_dropped(pool: Pool) -> None:
    rank = await _rank(pool)
    await rank.hello()
    await rank.hear()
    keys = rendezvous_pb2.StoreKeys(keys=["never"], timeout=duration_to_proto(30))
    waiting = asyncio.ensure_future(_store(rank, wait=keys))
    await asyncio.sleep(0.02)
    rank.call.cancel()  # the group loses a rank before it has formed
    error = await _fails(waiting, "ABORTED", "EPOCH_FENCED")
    assert isinstance(error, StaleEpochError)
    await _fails(_store(rank, count=rendezvous_pb2.StoreCount()), "ABORTED", "EPOCH_FENCED")


async def test_attend(pool: Pool) -> None:
    rank = await _rank(pool)
    await rank.hello()
    assert (await rank.hear()).welcome.num_attending == 1
    twin = FakeRank(pool.target, rank.group, 0)
    pool.things.append(_Closing(twin))
    await twin.hello()
    await _fails(twin.hear(), "ALREADY_EXISTS", "REQUEST_CONFLICT")
    for message in ({"prepared": rendezvous_pb2.Prepared()}, {}):
        rude = FakeRank(pool.target, rank.group, 1)
        pool.things.append(_Closing(rude))
        await rude.say(**message)
        await _fails(rude.hear(), "INVALID_ARGUMENT", "PROTOCOL")
    stranger = FakeRank(pool.target, rank.group, 7)
    pool.things.append(_Closing(stranger))
    await stranger.hello()
    await _fails(stranger.hear(), "INVALID_ARGUMENT", "PROTOCOL")


async def test_a_rank_may_close_its_stream(pool: Pool) -> None:
    rank = await _rank(pool)
    await rank.hello()
    await rank.hear()
    await rank.call.done_writing()
    with pytest.raises(EOFError):
        await rank.hear()
    assert await rank.call.code() is grpc.StatusCode.OK


async def test_attend_a_dropped_group(pool: Pool) -> None:
    rank = await _rank(pool)
    rank.credential.group_id = "g-gone"
    await rank.hello()
    await _fails(rank.hear(), "ABORTED", "EPOCH_FENCED")


async def test_a_wrong_token_opens_nothing(pool: Pool) -> None:
    rank = await _rank(pool, token="guess")
    await rank.hello()
    error = await _fails(rank.hear(), "PERMISSION_DENIED", "BAD_TOKEN")
    assert isinstance(error, NotAllowedError)
    call = _store(rank, count=rendezvous_pb2.StoreCount())
    await _fails(call, "PERMISSION_DENIED", "BAD_TOKEN")
    request = rendezvous_pb2.GetManifestRequest(credential=rank.credential)
    await _fails(rank.stub.GetManifest(request).read(), "PERMISSION_DENIED", "BAD_TOKEN")


async def test_a_rank_speaks_for_itself_alone(pool: Pool) -> None:
    """The sender once attended as every rank, and committed what nobody had staged."""
    replica = await pool.replica("r0", num_receivers=2)
    replica.attends = False
    trainer = await pool.trainer()
    begun = await trainer.begin()
    async with asyncio.timeout(5):
        while not replica.joins:
            await asyncio.sleep(0.005)
    plan = replica.joins[-1].group
    tokens = [begun.group.token, plan.token, *plan.further_tokens]
    assert len(set(tokens)) == 3
    assert not begun.group.further_tokens
    ranks = [FakeRank(pool.target, begun.group, rank) for rank in (1, 2)]
    for rank in ranks:
        pool.things.append(_Closing(rank))
        await rank.hello()  # with the sender's token
        error = await _fails(rank.hear(), "PERMISSION_DENIED", "BAD_TOKEN")
        assert isinstance(error, NotAllowedError)
    own = [FakeRank(pool.target, plan, rank) for rank in (1, 2)]
    for rank in (*own, FakeRank(pool.target, begun.group, 0)):
        pool.things.append(_Closing(rank))
        # Of the group's store and manifests each is a member.
        assert not (await _store(rank, count=rendezvous_pb2.StoreCount())).number
        await rank.hello()
        assert (await rank.hear()).HasField("welcome")
    swapped = FakeRank(pool.target, plan, 1)
    pool.things.append(_Closing(swapped))
    swapped.credential.token = tokens[2]
    await swapped.hello()
    await _fails(swapped.hear(), "PERMISSION_DENIED", "BAD_TOKEN")


async def test_get_manifest_of_no_transfer(pool: Pool) -> None:
    rank = await _rank(pool)
    request = rendezvous_pb2.GetManifestRequest(credential=rank.credential, layout_digest=b"?")
    error = await _fails(rank.stub.GetManifest(request).read(), "NOT_FOUND", "MANIFEST_UNKNOWN")
    assert isinstance(error, NotReadyError | NotFoundError)


# -- InspectService ------------------------------------------------------------


async def test_lists_in_pages(pool: Pool) -> None:
    for name in ("r2", "r0", "r1"):
        await pool.replica(name)
    trainer = await pool.trainer()
    await trainer.push()
    inspect = trainer.inspect
    replicas = inspect_pb2.ListReplicasRequest
    first = await inspect.ListReplicas(replicas(page_size=2))
    second = await inspect.ListReplicas(replicas(page_token=first.next_page_token))
    listed = [*first.replicas, *second.replicas]
    assert [r.replica_id for r in listed] == ["r0", "r1", "r2"]
    assert not second.next_page_token
    assert all(r.version_vector.adapters for r in listed)
    one = await inspect.ListReplicas(replicas(replica_ids=["r1", "r9"], share_version_vectors=True))
    (replica,), (vector,) = one.replicas, one.version_vectors
    assert (replica.replica_id, replica.version_vector_index) == ("r1", 0)
    assert not replica.HasField("version_vector")
    assert vector == listed[0].version_vector
    policies = inspect_pb2.ListPoliciesRequest
    names = []
    page = await inspect.ListPolicies(policies(page_size=1))
    while page.next_page_token:
        names += [policy.policy for policy in page.policies]
        page = await inspect.ListPolicies(policies(page_size=1, page_token=page.next_page_token))
    assert [*names, *(policy.policy for policy in page.policies)][-1] == "math"
    transfers = inspect_pb2.ListTransfersRequest
    (ended,) = (await inspect.ListTransfers(transfers(page_size=1))).transfers
    after = await inspect.ListTransfers(transfers(page_token=ended.transfer_id))
    assert not after.transfers


@pytest.mark.parametrize("method", ["ListReplicas", "ListPolicies", "ListTransfers"])
async def test_pages_that_nobody_told(pool: Pool, method: str) -> None:
    inspect = (await pool.trainer()).inspect
    request = getattr(inspect_pb2, f"{method}Request")
    for wrong in (request(page_size=-1), request(page_token="x" * 5000)):
        await _fails(getattr(inspect, method)(wrong), "INVALID_ARGUMENT", "INVALID_PAGE")


async def test_a_page_after_a_transfer_that_is_forgotten(pool: Pool) -> None:
    inspect = (await pool.trainer()).inspect
    request = inspect_pb2.ListTransfersRequest(page_token="t-gone")
    await _fails(inspect.ListTransfers(request), "INVALID_ARGUMENT", "INVALID_PAGE")


async def test_list_versions(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    inspect = trainer.inspect
    for _ in range(3):
        await trainer.push()
    ask = inspect_pb2.ListVersionsRequest
    first = await inspect.ListVersions(ask(policy="math", page_size=2))
    second = await inspect.ListVersions(
        ask(policy="math", page_size=2, page_token=first.next_page_token)
    )
    assert [v.version.version for v in (*first.versions, *second.versions)] == [3, 2, 1]
    assert not second.next_page_token
    assert first.versions[0].content_digest.size_bytes == trainer.manifest.total_bytes
    assert first.versions[0].commit_time.seconds >= first.versions[0].create_time.seconds > 1e9
    await _fails(inspect.ListVersions(ask(policy="nope")), "NOT_FOUND", "POLICY_UNKNOWN")
    for page in ({"page_token": "x"}, {"page_size": -1}):
        call = inspect.ListVersions(ask(policy="math", **page))
        await _fails(call, "INVALID_ARGUMENT", "INVALID_PAGE")


async def test_inspecting_a_push(pool: Pool) -> None:
    replica = await pool.replica()
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer()
    begun = await trainer.begin()
    got = await trainer.inspect.GetPool(inspect_pb2.GetPoolRequest())
    assert got.weft_version
    assert got.base_fingerprint == REFERENCE.fingerprint
    assert [t.transfer_id for t in got.active_transfers] == [begun.transfer_id]
    assert not got.HasField("last_transfer")
    assert got.policies[0].lease.trainer_id == "trainer"
    assert got.replicas[0].model_name == "tiny"
    listed = await trainer.inspect.ListTransfers(inspect_pb2.ListTransfersRequest())
    assert listed.transfers[0].state == publish_pb2.TRANSFER_STATE_FORMING


async def test_watch_events(pool: Pool) -> None:
    trainer = await pool.trainer()
    watch = trainer.inspect.WatchEvents(inspect_pb2.WatchEventsRequest())
    await watch.initial_metadata()
    await pool.replica()
    await trainer.push()
    kinds = []
    async with asyncio.timeout(5):
        while "transfer_committed" not in kinds:
            event = await watch.read()
            assert event.time.seconds > 1e9
            kinds.append(event.kind)
    assert kinds == ["replica_ready", "transfer_begun", "transfer_staged", "transfer_committed"]
    watch.cancel()


async def test_a_slow_watcher_is_cut_off(pool: Pool) -> None:
    trainer = await pool.trainer()
    watch = trainer.inspect.WatchEvents(inspect_pb2.WatchEventsRequest())
    await watch.initial_metadata()
    assert pool.coordinator is not None
    feed = pool.coordinator._driver._feed  # type: ignore[union-attr]
    for i in range(1200):
        feed.publish(0.0, "replica_ready", f"r{i}", "")

    async def read_all() -> None:
        while True:
            await watch.read()

    await _fails(asyncio.wait_for(read_all(), 5), "RESOURCE_EXHAUSTED", "TOO_SLOW")
