"""PublishService: every status and reason that its protos list, through the real stubs.

One file: its cases are the rows of one service, over the same pool.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from rich.console import Console

from tests.contract.calls import fails
from tests.contract.conftest import Pool
from tests.doubles.halves import in_halves
from tests.doubles.tiny_model import ADAPTER_MANIFEST, BASE_MANIFEST, REFERENCE, adapter_spec
from tests.doubles.trainer import FakeTrainer
from tests.waits import eventually
from trainer_side.pool.coordinator_client import CoordinatorClient
from weft_rl.cli.status import render
from weft_rl.contract.errors import (
    LeaseFencedError,
    NotFiniteError,
    NotReadyError,
    PeerUnavailableError,
    PolicyOwnedError,
)
from weft_rl.contract.manifest import (
    ALIGN_BYTES,
    Bucket,
    WireBucket,
    make_manifest,
    make_send_plan,
    mixed_plan,
    plan_buckets,
    whole_plan,
)
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.coordinator.runtime import manifests
from weft_rl.rpc.codec import duration_to_proto, send_plan_to_proto
from weft_rl.rpc.manifest_codec import manifest_to_chunks, reference_from_chunks
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2, publish_pb2, rendezvous_pb2, types_pb2


async def test_describe_target(pool: Pool) -> None:
    trainer = pool.newcomer()
    request = publish_pb2.DescribeTargetRequest()
    error = await fails(
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


async def test_a_replica_started_again_with_other_dtypes_is_asked_for_them(pool: Pool) -> None:
    """The coordinator was not. While both kinds are there, the wider dtype is sent."""
    trainer = pool.newcomer()

    async def sent_as_float32() -> set[str]:
        described = await trainer.stub.DescribeTarget(
            publish_pb2.DescribeTargetRequest(), timeout=9
        )
        (chunk,) = [
            part.chunk
            async for part in trainer.stub.GetReference(
                publish_pb2.GetReferenceRequest(fingerprint=described.base_fingerprint)
            )
        ]
        found = reference_from_chunks([chunk]).dtype_exceptions(DataType.BFLOAT16)
        names = {*described.base_dtype_exceptions}
        assert names == found.keys()
        assert {*found.values()} == {DataType.FLOAT32}
        return names

    digest = REFERENCE.details_digest
    started = [await pool.replica(name, reference_digest=digest) for name in ("r0", "r1")]
    assert await sent_as_float32() == {"model.norm.weight"}
    other = REFERENCE.sent_as_float32({"model.embed_tokens.weight"})
    metas = [
        replace(meta, dtype=DataType.BFLOAT16) if meta.name == "model.norm.weight" else meta
        for meta in other.tensors
    ]
    other = replace(other, tensors=tuple(metas))
    assert other.fingerprint == REFERENCE.fingerprint
    for replica, expected in zip(
        started,
        ({"model.norm.weight", "model.embed_tokens.weight"}, {"model.embed_tokens.weight"}),
        strict=True,
    ):
        await replica.leave()
        replica.incarnation += "again"
        replica.reference = other
        replica.capabilities = replace(replica.capabilities, reference_digest=other.details_digest)
        await replica.register()
        assert await sent_as_float32() == expected


async def test_dtypes_that_are_too_many_to_tell(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales of DeepSeek-V3 in FP8 would make an answer of more than gRPC takes."""
    monkeypatch.setattr(manifests, "_MAX_EXCEPTIONS_BYTES", len("model.norm.weight") - 1)
    await pool.replica()
    client = CoordinatorClient(pool.target, "trainer-a", connect_seconds=10.0)
    try:
        deadline = time.monotonic() + 20
        described = await asyncio.to_thread(client.describe, deadline)
        assert len(described.base_dtype_exceptions_digest) == 32
        assert not described.base_dtype_exceptions
        for _ in range(2):
            target = publish_pb2.DescribeTargetResponse()
            target.CopyFrom(described)
            await asyncio.to_thread(client.add_dtypes, target, deadline)
            assert dict(target.base_dtype_exceptions) == {
                "model.norm.weight": types_pb2.DATA_TYPE_FLOAT32
            }
            # It is asked for once, with the dtypes and without.
            assert client.reference(target, 0) == client.reference(described, 0) == REFERENCE
    finally:
        await asyncio.to_thread(client.close)


async def test_get_reference(pool: Pool) -> None:
    trainer = pool.newcomer()

    async def read(fingerprint: str) -> list[types_pb2.ReferenceChunk]:
        request = publish_pb2.GetReferenceRequest(fingerprint=fingerprint)
        return [part.chunk async for part in trainer.stub.GetReference(request)]

    await fails(read(REFERENCE.fingerprint), "FAILED_PRECONDITION", "MANIFEST_UNKNOWN")
    await pool.replica()
    assert reference_from_chunks(await read(REFERENCE.fingerprint)) == REFERENCE
    await fails(read("another"), "FAILED_PRECONDITION", "MANIFEST_UNKNOWN")


async def test_acquire_policy(pool: Pool) -> None:
    first = await pool.trainer("t1")
    second = pool.newcomer("t2")
    error = await fails(second.acquire(), "ALREADY_EXISTS", "POLICY_OWNED")
    assert isinstance(error, PolicyOwnedError)
    assert error.metadata["holder"] == "t1"
    assert 0 < float(error.metadata["expires_in_seconds"]) <= 10
    assert "owned by trainer 't1'" in error.message
    assert "its lease expires in" in error.message
    assert error.message.endswith(
        "end that trainer, wait until its lease has expired, or push under another name"
    )
    twin = pool.newcomer("t1")
    error = await fails(twin.acquire(), "ALREADY_EXISTS", "POLICY_OWNED")
    assert error.message.endswith("wait for that, or take it over")
    again = await first.acquire()
    assert again.fencing_token == 1
    for name in ("../up", "x" * 64, ""):
        second.policy = name
        await fails(second.acquire(), "INVALID_ARGUMENT", "INVALID_NAME")
    unset = publish_pb2.AcquirePolicyRequest(trainer_id="t", session_id="s", policy="p")
    await fails(second.stub.AcquirePolicy(unset), "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_renew_and_release(pool: Pool) -> None:
    trainer = await pool.trainer()
    renew = publish_pb2.RenewLeaseRequest(policy="math", fencing_token=1)
    lease = (await trainer.stub.RenewLease(renew)).lease
    assert lease.time_to_live.ToTimedelta().total_seconds() == 10
    release = publish_pb2.ReleasePolicyRequest(policy="math", fencing_token=1)
    await trainer.stub.ReleasePolicy(release)
    await trainer.stub.ReleasePolicy(release)
    error = await fails(trainer.stub.RenewLease(renew), "ABORTED", "LEASE_FENCED")
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
        await fails(_put(trainer, *chunks), "INVALID_ARGUMENT", "INVALID_MANIFEST")


async def test_ten_million_tensors_are_refused_at_the_header(pool: Pool) -> None:
    trainer = await pool.trainer()
    header = types_pb2.ManifestHeader(num_tensors=10_000_000, num_buckets=1)

    async def unfinished() -> AsyncIterator[publish_pb2.PutManifestRequest]:
        yield publish_pb2.PutManifestRequest(chunk=types_pb2.ManifestChunk(header=header))
        await asyncio.sleep(60)  # the refusal comes before the stream ends

    call = trainer.stub.PutManifest(unfinished(), timeout=5)
    await fails(call, "RESOURCE_EXHAUSTED", "MANIFEST_TOO_LARGE")


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
    await fails(trainer.begin(**changes), code, reason)
    listed = await trainer.inspect.ListTransfers(inspect_pb2.ListTransfersRequest())
    assert not listed.transfers
    assert (await trainer.push()).version.version == 1  # nothing was burnt


_OF_ANOTHER_BASE = adapter_spec()
_OF_ANOTHER_BASE.base_fingerprint = "0" * 64


@pytest.mark.parametrize(
    ("replica", "policy", "changes", "how", "names"),
    [
        ({}, "math", {"adapter": _OF_ANOTHER_BASE},
         "FAILED_PRECONDITION/BASE_MISMATCH", ""),
        ({"lora_enabled": False}, "math", {}, "FAILED_PRECONDITION/LORA_DISABLED", ""),
        ({"lora_unapplied": ("model.layers.0",)}, "math", {},
         "INVALID_ARGUMENT/INVALID_ADAPTER", "model.layers.0."),
        ({}, "base", {}, "INVALID_ARGUMENT/INVALID_MANIFEST", "model.norm.weight"),
        ({"loads_in_place": True}, "base", {"check_finite": True},
         "UNIMPLEMENTED/UNSUPPORTED", "r0"),
    ],
)  # fmt: skip
async def test_begin_transfer_of_what_replicas_cannot_take(
    pool: Pool,
    replica: dict[str, Any],
    policy: str,
    changes: dict[str, Any],
    how: str,
    names: str,
) -> None:
    await pool.replica(**replica)
    trainer = await pool.trainer(policy=policy)
    if policy == "base" and not changes:
        trainer.manifest = plan_buckets(REFERENCE.tensors[:-1])
        await trainer.put_manifest()
    error = await fails(trainer.begin(**changes), *how.split("/"))
    assert names in f"{error.message} {error.metadata}"


async def test_begin_transfer_without_room_says_where_and_when_to_retry(pool: Pool) -> None:
    await pool.replica("r0")
    await pool.replica("r1", adapter_capacity_bytes=8)
    trainer = await pool.trainer()
    with pytest.raises(grpc.RpcError) as failed:
        await trainer.begin()
    assert error_from_rpc(failed.value).metadata["replica"] == "r1"
    details = dict(failed.value.trailing_metadata())["grpc-status-details-bin"]
    assert b"google.rpc.RetryInfo" in details


async def test_whoever_says_nothing_requires_one_replica(pool: Pool) -> None:
    await pool.replica("r0")
    await pool.replica("r1", adapter_capacity_bytes=8)
    trainer = await pool.trainer()
    begun = await trainer.begin(require=None)
    assert list(begun.replica_ids) == ["r0"]


async def test_a_base_is_refused_where_one_replica_cannot_load_it(pool: Pool) -> None:
    await pool.replica("r0")
    await pool.replica("r1", base_refusal="its reload would leave mixed weights" + "." * 1000)
    trainer = await pool.trainer(policy="base")
    error = await fails(trainer.begin(), "UNIMPLEMENTED", "UNSUPPORTED")
    assert error.metadata == {"replica": "r1"}
    assert "its reload would leave mixed weights." in error.message
    assert len(error.message) < 700
    other = await pool.trainer("t2")
    await other.push()


async def test_buckets_that_carry_runs_do_not_go_everywhere(pool: Pool) -> None:
    replica = await pool.replica(loads_in_place=True)
    trainer = await pool.trainer(policy="base")
    slots, last = BASE_MANIFEST.tensors, BASE_MANIFEST.buckets[-1]
    moved = replace(slots[-1], offset_bytes=slots[-1].offset_bytes + ALIGN_BYTES)
    longer = Bucket(last.payload_bytes + ALIGN_BYTES, last.num_tensors)
    trainer.manifest = make_manifest([*slots[:-1], moved], [*BASE_MANIFEST.buckets[:-1], longer])
    await trainer.put_manifest()
    refused = trainer.begin(carries_runs=True)
    await fails(refused, "INVALID_ARGUMENT", "INVALID_MANIFEST")  # there is a gap in it
    trainer.manifest = BASE_MANIFEST
    await trainer.put_manifest()
    error = await fails(trainer.begin(carries_runs=True), "UNIMPLEMENTED", "UNSUPPORTED")
    assert error.metadata["replica"] == replica.replica_id
    other = await pool.trainer("t2", policy="math")
    await fails(other.begin(carries_runs=True), "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_a_send_plan_is_refused_where_it_does_not_fit(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer(policy="base")
    trainer.manifest = plan_buckets(REFERENCE.tensors, 2048)
    await trainer.put_manifest()
    plan = send_plan_to_proto(in_halves(trainer.manifest))
    begun = await trainer.begin(send_plan=plan)
    assert (begun.group.rank, begun.group.num_senders) == (0, 2)
    assert len({begun.group.token, *begun.group.further_tokens}) == 2
    shorter, idle, unlike, twice = (types_pb2.SendPlan() for _ in range(4))
    for odd in (shorter, idle, unlike, twice):
        odd.CopyFrom(plan)
    shorter.num_runs.pop()
    idle.num_senders = 3
    unlike.payload_bytes[0] += 2**20
    twice.senders[1] = 0
    for odd in (shorter, idle, unlike, twice, types_pb2.SendPlan(), types_pb2.SendPlan(
        num_senders=1
    )):  # fmt: skip
        await fails(trainer.begin(send_plan=odd), "INVALID_ARGUMENT", "INVALID_REQUEST")
    both = trainer.begin(send_plan=plan, carries_runs=True)
    await fails(both, "INVALID_ARGUMENT", "INVALID_REQUEST")
    plan.num_senders = 257
    error = await fails(trainer.begin(send_plan=plan), "INVALID_ARGUMENT", "INVALID_REQUEST")
    assert error.metadata["field"] == "SendPlan.num_senders"


async def test_a_delta_goes_to_those_that_can_take_it_and_all_to_the_others(pool: Pool) -> None:
    replicas = [await pool.replica(name) for name in ("r0", "r1")]
    trainer = await pool.trainer(policy="base")
    request = publish_pb2.DescribeTargetRequest()
    await trainer.push()
    told = await trainer.stub.DescribeTarget(request, timeout=9)
    assert (told.delta_refusal, told.num_delta_replicas) == ("", 0), "nothing need be said"
    replicas[1].retained.clear()

    async def takers() -> int:
        await replicas[1].heartbeat()
        told = await trainer.stub.DescribeTarget(request, timeout=9)
        return told.num_delta_replicas

    await eventually(takers)  # a heartbeat is not believed right after a switch
    assert await takers() == 1
    buckets = trainer.manifest.buckets
    changes = [WireBucket(0, index, ALIGN_BYTES, 1) for index in range(len(buckets))]
    plan = mixed_plan(make_send_plan(1, changes, b"\1" * 8), whole_plan(trainer.manifest))
    pushed = await trainer.push(send_plan=send_plan_to_proto(plan))
    assert (pushed.version.version, pushed.delta_from) == (2, b"\1" * 8)
    assert pushed.whole_replica_ids == [replicas[1].replica_id]
    assert pushed.num_buckets == 2 * len(buckets)
    assert [replica.prepare.takes_whole for replica in replicas] == [False, True]
    odd = send_plan_to_proto(plan)
    odd.num_whole += 1
    await fails(trainer.begin(send_plan=odd), "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_a_delta_is_from_the_base_that_the_pool_serves(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer(policy="base")

    async def described() -> publish_pb2.DescribeTargetResponse:
        request = publish_pb2.DescribeTargetRequest()
        return await trainer.stub.DescribeTarget(request, timeout=9)

    def plan(delta_from: bytes) -> types_pb2.SendPlan:
        buckets = trainer.manifest.buckets
        wires = [WireBucket(0, index, ALIGN_BYTES, 1) for index in range(len(buckets))]
        return send_plan_to_proto(make_send_plan(1, wires, delta_from))

    told = await described()
    assert (told.base_content_digest, told.base_layout_digest) == (b"", b"")
    assert told.delta_refusal == "the pool serves base@0, which was not pushed"
    await trainer.push()
    told = await described()
    assert told.base_content_digest == b"\1" * 8
    assert told.base_layout_digest == trainer.manifest.layout_digest
    assert told.delta_refusal == ""
    error = await fails(
        trainer.begin(send_plan=plan(b"\2" * 8)), "FAILED_PRECONDITION", "DELTA_REFUSED"
    )
    assert isinstance(error, NotReadyError)
    pushed = await trainer.push(send_plan=plan(told.base_content_digest))
    assert (pushed.version.version, pushed.delta_from) == (2, b"\1" * 8)
    assert pushed.sent_bytes == ALIGN_BYTES * len(trainer.manifest.buckets)
    assert pushed.total_bytes == trainer.manifest.total_bytes
    replica.retained.clear()

    async def told_of() -> str:
        await replica.heartbeat()
        return (await described()).delta_refusal

    await eventually(told_of)  # a heartbeat is not believed right after a switch
    assert await told_of() == f"{replica.replica_id} holds no copy of base@2"
    error = await fails(
        trainer.begin(send_plan=plan(b"\1" * 8)), "FAILED_PRECONDITION", "DELTA_REFUSED"
    )
    assert replica.replica_id in error.message
    assert (await described()).num_delta_replicas == 0
    adapters = await pool.trainer("t2")
    refused = adapters.begin(send_plan=plan(b"\1" * 8))
    await fails(refused, "INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_a_delta_that_a_replica_cannot_apply_is_refused_to_its_trainer(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer(policy="base")
    await trainer.push()
    wires = [WireBucket(0, i, ALIGN_BYTES, 1) for i in range(len(trainer.manifest.buckets))]
    plan = send_plan_to_proto(make_send_plan(1, wires, b"\1" * 8))
    begun = await trainer.begin(send_plan=plan)
    await trainer.attend(begun)
    key = begun.group.group_id, 1
    await eventually(lambda: key in replica.ranks)
    failed = rendezvous_pb2.RankFailed(
        transfer_id=begun.transfer_id, reason="NOT_RETAINED", message="the copy is gone"
    )
    await replica.ranks[key].say(failed=failed)
    error = await fails(trainer.wait(begun.transfer_id), "FAILED_PRECONDITION", "DELTA_REFUSED")
    assert error.metadata == {"member": replica.replica_id, "cause": "NOT_RETAINED"}
    assert (await trainer.push()).version.version == 3


async def test_what_the_sender_found_is_the_outcome(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    begun = await trainer.begin(check_finite=True)
    sender = await trainer.attend(begun)
    failed = rendezvous_pb2.RankFailed(
        transfer_id=begun.transfer_id, reason="NOT_FINITE", message="tensor 'w' holds NaN"
    )
    await sender.say(failed=failed)
    error = await fails(trainer.wait(begun.transfer_id), "INVALID_ARGUMENT", "NOT_FINITE")
    assert isinstance(error, NotFiniteError)


async def test_begin_transfer_with_a_used_request_id(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    await trainer.push(request_id="once")
    trainer.manifest = plan_buckets([*(s.meta for s in ADAPTER_MANIFEST.tensors)][::-1])
    await trainer.put_manifest()
    await fails(trainer.begin(request_id="once"), "ALREADY_EXISTS", "REQUEST_CONFLICT")


@pytest.mark.parametrize("waits", [False, True])
async def test_a_push_whose_begin_was_not_answered_is_given_up_by_its_request_id(
    pool: Pool, waits: bool
) -> None:
    trainer = await pool.trainer()
    if not waits:
        await pool.replica()
    request = trainer.begin_request()
    begin = trainer.stub.BeginTransfer(request, timeout=15)
    if waits:
        await asyncio.sleep(0.1)  # it is on its way, or waits for a replica
    else:
        await begin
    abort = publish_pb2.AbortTransferRequest(
        policy="math", fencing_token=trainer.token, request_id=request.request_id
    )
    others = publish_pb2.AbortTransferRequest(
        policy="math", fencing_token=trainer.token + 1, request_id=request.request_id
    )
    await fails(trainer.stub.AbortTransfer(others), "NOT_FOUND", "TRANSFER_UNKNOWN")
    await trainer.stub.AbortTransfer(abort)
    if waits:
        await fails(begin, "ABORTED", "TRANSFER_ABORTED")
        await pool.replica()
    else:
        await trainer.stub.AbortTransfer(abort)  # again
    assert (await trainer.begin()).version.version == (1 if waits else 2)


async def test_abort_transfer(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    for call in (
        trainer.wait("t-nope"),
        trainer.stub.AbortTransfer(publish_pb2.AbortTransferRequest(transfer_id="t-nope")),
        trainer.inspect.GetTransfer(inspect_pb2.GetTransferRequest(transfer_id="t-nope")),
    ):
        await fails(call, "NOT_FOUND", "TRANSFER_UNKNOWN")
    done = await trainer.push()
    ask = publish_pb2.AbortTransferRequest
    request = ask(transfer_id=done.transfer_id, policy="math", fencing_token=1)
    call = trainer.stub.AbortTransfer(request)
    await fails(call, "FAILED_PRECONDITION", "ALREADY_COMMITTED")
    begun = await trainer.begin()
    # Every policy counts its tokens from 1: another's owner has the same.
    for other in ({"policy": "code", "fencing_token": 1}, {"policy": "math", "fencing_token": 9}):
        request = ask(transfer_id=begun.transfer_id, **other)
        await fails(trainer.stub.AbortTransfer(request), "ABORTED", "LEASE_FENCED")
    found = await trainer.inspect.GetTransfer(
        inspect_pb2.GetTransferRequest(transfer_id=begun.transfer_id)
    )
    assert found.transfer.state in (
        publish_pb2.TRANSFER_STATE_FORMING,
        publish_pb2.TRANSFER_STATE_STAGING,
    )


async def test_an_adapter_says_which_base_it_was_trained_on(pool: Pool) -> None:
    await pool.replica()
    trainer, base = await pool.trainer(), await pool.trainer("base-trainer", "base")
    unknown = await trainer.push()
    assert unknown.served_over_base_version == 0
    spec = adapter_spec()
    spec.trained_on_base_version = 0
    await trainer.push(adapter=spec, refuse_other_base=True)
    await base.push()
    error = await fails(
        trainer.begin(adapter=spec, refuse_other_base=True), "FAILED_PRECONDITION", "BASE_MISMATCH"
    )
    assert "was trained on base@0, the pool serves base@1" in error.message
    assert (await trainer.push(adapter=spec)).served_over_base_version == 1
    newest, before, first = await pool.versions()
    assert newest.HasField("trained_on_base_version")
    assert (newest.trained_on_base_version, newest.served_over_base_version) == (0, 1)
    assert before.served_over_base_version == 1
    assert not first.HasField("trained_on_base_version")
    got = await pool.seen()
    math = next(policy for policy in got.policies if policy.policy == "math")
    assert math.HasField("trained_on_base_version")
    assert "math@3 (trained on base@0, served over base@1)" in _shown(got)
    spec.trained_on_base_version = -1
    await fails(trainer.begin(adapter=spec), "INVALID_ARGUMENT", "INVALID_REQUEST")
    spec.ClearField("trained_on_base_version")
    error = await fails(
        trainer.begin(adapter=spec, refuse_other_base=True), "FAILED_PRECONDITION", "BASE_MISMATCH"
    )
    assert "base@?" in error.message
    await trainer.push(adapter=spec)
    got = await pool.seen()
    assert "math@4 (trained on base@?, served over base@1)" in _shown(got)


def _shown(pool: inspect_pb2.GetPoolResponse) -> str:
    """What ``weft status`` prints, its lines joined."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(pool))
    return " ".join(console.export_text().split())


async def test_a_trainer_has_only_so_many_policies(pool: Pool) -> None:
    await pool.restart(max_policies_per_trainer=2)
    await pool.replica()
    await pool.trainer(policy="a")
    second = await pool.trainer(policy="b")
    assert (await second.push()).version.version == 1
    third = pool.newcomer("trainer", "c")
    await fails(third.acquire(), "RESOURCE_EXHAUSTED", "TOO_MANY_POLICIES")
