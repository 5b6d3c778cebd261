"""ReplicaService as a replica serves it: what it holds, sends and switches to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.duration_pb2 import Duration

from rollout_side.engine import MemoryUsage
from rollout_side.memory.handoff import HandoffQueue
from tests.contract.calls import error_of, refusal
from tests.contract.served_replica import BASE_1, MANIFEST, Served
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.waits import until
from weft_rl.contract.checkpoint import StoredTensor, checkpoint_digest
from weft_rl.contract.errors import TransferTimeoutError
from weft_rl.contract.names import AdapterVersions, PolicyVersion
from weft_rl.contract.replica_report import HeldVersion
from weft_rl.rpc.codec import TENSOR, vector_from_proto
from weft_rl.rpc.manifest_codec import ManifestDecoder
from weft_rl.rpc.status import error_from_rpc
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest
from weft_rl.v1 import publish_pb2, replica_pb2, types_pb2


def _switch(policy: str, version: int, **fields: int) -> replica_pb2.SwitchVersionRequest:
    wanted = types_pb2.PolicyVersion(policy=policy, version=version)
    return replica_pb2.SwitchVersionRequest(version=wanted, **fields)


async def test_a_base_is_retained_and_switched_back_to(served: Served) -> None:
    assert list((await served.commit("base@1")).retained_base_versions) == [1]
    assert list((await served.commit("base@2")).retained_base_versions) == [2, 1]
    for _ in range(2):  # idempotent
        response = await served.stub.SwitchVersion(_switch("base", 1))
        assert list(response.retained_base_versions) == [1, 2]
        assert vector_from_proto(response.version_vector).base == 1
    assert served.engine.base["w"].view(torch.uint8).eq(1).all()
    status = await served.stub.GetStatus(replica_pb2.GetStatusRequest())
    assert list(status.report.retained_base_versions) == [1, 2]
    assert list((await served.commit("base@3")).retained_base_versions) == [3, 1]


async def test_an_alias_goes_down_and_up(served: Served) -> None:
    await served.commit("math@1")
    await served.commit("math@2")
    response = await served.stub.SwitchVersion(_switch("math", 1))
    vector = vector_from_proto(response.version_vector)
    assert vector.adapters == {"math": AdapterVersions((1, 2), 1)}
    response = await served.commit("math@3", alias=1)
    vector = vector_from_proto(response.version_vector)
    assert vector.adapters == {"math": AdapterVersions((1, 2, 3), 1)}
    response = await served.commit("math@4", alias=9)  # which is not here
    assert vector_from_proto(response.version_vector).adapters["math"].alias == 4


async def test_switching_to_what_is_not_held(served: Served) -> None:
    for policy in ("base", "math"):
        refused = await refusal(served.stub.SwitchVersion(_switch(policy, 7)))
        assert refused == "FAILED_PRECONDITION/NOT_RETAINED"
    assert served.agent.serving.vector.base == 0


async def test_the_manifest_of_what_is_held(served: Served) -> None:
    await served.commit("base@1")
    decoder = ManifestDecoder()
    request = replica_pb2.DescribeVersionRequest(version=BASE_1)
    async for response in served.stub.DescribeVersion(request):
        decoder.add(response.chunk)
    assert decoder.finish() == MANIFEST
    request.version.version = 9
    assert await refusal(served.stub.DescribeVersion(request)) == "NOT_FOUND/VERSION_UNKNOWN"


def _plan(rank: int, **fields: Any) -> publish_pb2.GroupPlan:
    return publish_pb2.GroupPlan(
        **{"group_id": "g", "backend": "gloo", "rank": rank, "size": 2, **fields}
    )


async def test_sending_what_is_not_held(served: Served) -> None:
    request = replica_pb2.SendVersionRequest(transfer_id="t", version=BASE_1, group=_plan(0))
    assert await refusal(served.stub.SendVersion(request)) == "NOT_FOUND/VERSION_UNKNOWN"


@pytest.mark.parametrize(
    "place",
    [
        {"size": 10_000_000},  # a worker grew by 700 MB for it
        {"size": 1},
        {"rank": 2},
        {"rank": 0},
        {"group_id": ""},
        {"backend": "carrier-pigeon"},
    ],
)
async def test_a_place_in_a_group_that_cannot_be(served: Served, place: dict[str, Any]) -> None:
    place = dict(place)
    plan = _plan(**{"rank": 1, **place})
    joining = served.stub.JoinGroup(replica_pb2.JoinGroupRequest(trainer_id="t", group=plan))
    assert await refusal(joining) == "INVALID_ARGUMENT/INVALID_REQUEST"
    assert not served.engine.receiver.groups
    place["rank"] = place.get("rank", 0) + 1  # nor is it a sender's
    plan = _plan(**place)
    sending = served.stub.SendVersion(replica_pb2.SendVersionRequest(version=BASE_1, group=plan))
    assert await refusal(sending) == "INVALID_ARGUMENT/INVALID_REQUEST"


async def test_a_place_at_an_address_that_no_interface_has(served: Served) -> None:
    served.agent.address = "192.0.2.77:50061"  # as behind a router that translates addresses
    joining = replica_pb2.JoinGroupRequest(trainer_id="t", group=_plan(1))
    with pytest.raises(grpc.RpcError, match=r"192\.0\.2\.77.*--advertise-host"):
        await served.stub.JoinGroup(joining)
    assert await refusal(served.stub.JoinGroup(joining)) == "INVALID_ARGUMENT/INVALID_REQUEST"
    assert not served.engine.receiver.groups


def _load(transfer_id: str = "t1", **fields: Any) -> replica_pb2.LoadTransferRequest:
    return replica_pb2.LoadTransferRequest(
        transfer_id=transfer_id, version=BASE_1, timeout=Duration(seconds=60), **fields
    )


_NAMELESS = types_pb2.PolicyVersion(version=1)


@pytest.mark.parametrize(
    ("method", "fields", "reason"),
    [
        ("DiscardTransfer", {}, "INVALID_REQUEST"),
        ("LoadTransfer", {"version": BASE_1}, "INVALID_REQUEST"),
        ("CommitTransfer", {"version": BASE_1}, "INVALID_REQUEST"),
        ("CommitTransfer", {"transfer_id": "t"}, "INVALID_NAME"),
        ("CommitTransfer", {"transfer_id": "t", "version": _NAMELESS}, "INVALID_NAME"),
        ("SwitchVersion", {}, "INVALID_NAME"),
        ("SwitchVersion", {"version": {"policy": "base", "version": 2**63 - 1}}, "INVALID_REQUEST"),
        ("SwitchVersion", {"version": BASE_1, "spilled": {}}, "INVALID_REQUEST"),
        ("DescribeVersion", {"version": {"policy": "../up"}}, "INVALID_NAME"),
        ("RetireVersions", {"versions": [BASE_1, _NAMELESS]}, "INVALID_NAME"),
    ],
)
async def test_an_order_that_names_nothing(
    served: Served, method: str, fields: dict[str, Any], reason: str
) -> None:
    await served.commit("base@1")
    request = getattr(replica_pb2, f"{method}Request")(**fields)
    refused = await refusal(getattr(served.stub, method)(request))
    assert refused == f"INVALID_ARGUMENT/{reason}"
    assert served.agent.serving.vector.base == 1
    assert not served.agent.serving.retiring


async def _arrive(served: Served, value: int = 0) -> None:
    """A base comes to a load in place, and ends, with 99 for its digest."""
    arriving = HandoffQueue("t1", PolicyVersion("base", 1), MANIFEST, time.monotonic() + 20)
    served.engine.store.put_handoff(arriving)
    for _ in range(2):  # idempotent
        await served.stub.LoadTransfer(_load())
    wire = torch.full((MANIFEST.wire_bytes,), value, dtype=torch.uint8)
    arriving.put(0, wire, [99])
    await asyncio.to_thread(arriving.wait_complete, lambda: None)


def _commit_of(digest: int) -> replica_pb2.CommitTransferRequest:
    commit = replica_pb2.CommitTransferRequest(transfer_id="t1", version=BASE_1)
    commit.content_digest.value = content_digest([digest])
    return commit


@pytest.mark.parametrize("served", [True], indirect=True)
async def test_a_base_is_loaded_as_it_arrives(served: Served) -> None:
    assert await refusal(served.stub.LoadTransfer(_load())) == "FAILED_PRECONDITION/NOT_STAGED"
    await _arrive(served, 7)
    response = await served.stub.CommitTransfer(_commit_of(99))
    assert vector_from_proto(response.version_vector).base == 1
    assert list(response.retained_base_versions) == []
    assert response.pause.ToTimedelta() >= response.load.ToTimedelta()
    assert served.engine.base["w"].view(torch.uint8).eq(7).all()
    assert await refusal(served.stub.LoadTransfer(_load())) == "FAILED_PRECONDITION/NOT_STAGED"


@pytest.mark.parametrize("served", [True], indirect=True)
async def test_what_was_loaded_and_discarded_is_dirty(served: Served) -> None:
    await _arrive(served)
    for _ in range(2):  # idempotent
        await served.stub.DiscardTransfer(replica_pb2.DiscardTransferRequest(transfer_id="t1"))
    status = await served.stub.GetStatus(replica_pb2.GetStatusRequest())
    assert "in place" in status.report.dirty_reason
    assert vector_from_proto(status.report.version_vector).base == 0
    assert await refusal(served.stub.LoadTransfer(_load())) == "FAILED_PRECONDITION/NOT_STAGED"


@pytest.mark.parametrize("served", [True], indirect=True)
async def test_other_bytes_than_those_to_be_committed_are_dirty(served: Served) -> None:
    await _arrive(served)
    error = await error_of(served.stub.CommitTransfer(_commit_of(98)))
    assert (error.reason, error.metadata["dirty"]) == ("LOAD_FAILED", "true")
    status = await served.stub.GetStatus(replica_pb2.GetStatusRequest())
    assert status.report.dirty_reason == error.message


async def test_orders_of_an_older_coordinator_are_fenced(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Registered:
        coordinator_generation = 5

    monkeypatch.setattr(served.agent, "registration", Registered())
    for call in (
        served.stub.SwitchVersion(_switch("base", 1, coordinator_generation=4)),
        served.stub.SendVersion(replica_pb2.SendVersionRequest(coordinator_generation=4)),
        served.stub.LoadTransfer(_load(coordinator_generation=4)),
    ):
        assert await refusal(call) == "ABORTED/EPOCH_FENCED"


def _facts_request(digest: bytes, policy: str = "math") -> replica_pb2.DescribeVersionRequest:
    version = types_pb2.PolicyVersion(policy=policy, version=1)
    return replica_pb2.DescribeVersionRequest(version=version, facts_of_digest=digest)


async def test_what_a_catalog_is_to_record_of_a_version(served: Served) -> None:
    spec = types_pb2.AdapterSpec(config_json="{}", base_fingerprint="f")
    layout = MANIFEST.layout_digest
    await served.commit("math@1", layout_digest=layout, adapter=spec)
    await served.commit("base@1", layout_digest=layout)
    response = await served.stub.DescribeVersion(_facts_request(b"math@1")).read()
    assert response.facts == types_pb2.VersionFacts(
        content_digest=types_pb2.ContentDigest(value=b"math@1"), layout_digest=layout, adapter=spec
    )
    held = {(str(one.version), one.content_digest) for one in served.agent.serving.held()}
    assert held == {("math@1", b"math@1"), ("base@1", b"base@1")}
    refused = await refusal(served.stub.DescribeVersion(_facts_request(b"other")))
    assert refused == "NOT_FOUND/VERSION_UNKNOWN"


async def test_a_number_never_stands_for_other_bytes(served: Served) -> None:
    layout = MANIFEST.layout_digest
    for version in ("math@1", "base@1"):
        await served.commit(version, layout_digest=layout)
        await served.commit(version, layout_digest=layout)  # idempotent
    served.stage("math@2")
    other = replica_pb2.CommitTransferRequest(
        transfer_id="t-math@2",
        version=types_pb2.PolicyVersion(policy="math", version=1),
        content_digest=types_pb2.ContentDigest(value=b"math@2"),
    )
    assert await refusal(served.stub.CommitTransfer(other)) == "DATA_LOSS/DIGEST_MISMATCH"
    served.stage("base@2")
    other = replica_pb2.CommitTransferRequest(
        transfer_id="t-base@2",
        version=BASE_1,
        content_digest=types_pb2.ContentDigest(value=b"base@2"),
        layout_digest=layout,
    )
    await served.stub.CommitTransfer(other)
    assert served.engine.base["w"].view(torch.uint8).eq(2).all(), "a base is replaced"
    assert HeldVersion(PolicyVersion("base", 1), b"base@2") in set(served.agent.serving.held())


async def test_mistaken_bytes_are_dropped_with_their_name(served: Served) -> None:
    await served.commit("math@1", layout_digest=MANIFEST.layout_digest)
    served.engine.in_use.add(PolicyVersion("math", 1))

    async def drop(digest: bytes) -> replica_pb2.RetireVersionsResponse:
        version = types_pb2.PolicyVersion(policy="math", version=1)
        mistaken = types_pb2.HeldVersion(version=version, content_digest=digest)
        request = replica_pb2.RetireVersionsRequest(mistaken_versions=[mistaken])
        return await served.stub.RetireVersions(request)

    left = vector_from_proto((await drop(b"other")).version_vector)
    assert left.adapters == {"math": AdapterVersions((1,), 1)}, "it is another one by now"
    for _ in range(2):  # idempotent
        response = await drop(b"math@1")
        assert vector_from_proto(response.version_vector).adapters == {}
        assert [v.version for v in response.draining] == [1]
    assert served.engine.aliases == {}
    assert await refusal(served.commit("math@1")) == "FAILED_PRECONDITION/NOT_STAGED"
    served.engine.in_use.clear()
    await served.agent.serving.drop_unused()
    assert not served.agent.serving.retiring
    assert served.engine.store.adapter(PolicyVersion("math", 1)) is None


async def test_a_policy_that_has_ended_goes_with_its_name(served: Served) -> None:
    for version in ("math@1", "math@2", "math@3"):
        await served.commit(version)

    async def end(*numbers: int) -> dict[str, AdapterVersions]:
        versions = [types_pb2.PolicyVersion(policy="math", version=n) for n in numbers]
        request = replica_pb2.RetireVersionsRequest(versions=versions, ended_policies=["math"])
        response = await served.stub.RetireVersions(request)
        return dict(vector_from_proto(response.version_vector).adapters)

    assert await end(1) == {"math": AdapterVersions((2, 3), 3)}, "the name stands for a later one"
    for _ in range(2):  # idempotent
        assert await end(2, 3) == {}
    assert served.engine.aliases == {}
    await served.commit("math@4")
    assert await end(2, 3) == {"math": AdapterVersions((4,), 4)}, "an order that comes late"
    assert served.engine.aliases == {"math": 4}


async def test_workers_that_do_not_answer_for_a_while_do_not_end_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen for two minutes: what is due each second fails, and is done once they are back."""
    weights = {"w": torch.zeros(8, 8)}
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(weights, base_copies=2)
        away, asked = [True], []
        memory = engine.memory

        async def ask() -> MemoryUsage:
            asked.append(1)
            if away and len(asked) > 1:  # the first time is before it registers
                raise TransferTimeoutError("the engine did not finish its work in time")
            return await memory()

        monkeypatch.setattr(engine, "memory", ask)
        agent = pool.add_replica("r0", engine)
        engine.store.reserve("t", 64, adapter=False)
        until(lambda: len(asked) >= 2)
        away.clear()
        until(lambda: agent.serving.memory.staging_bytes == 64)
    assert "asked again each second" in caplog.text


async def test_a_refusal_is_signed_and_what_was_refused_once_is_refused_again(
    served: Served,
) -> None:
    commit = replica_pb2.CommitTransferRequest(
        transfer_id=served.stage("math@1"),
        version=types_pb2.PolicyVersion(policy="math", version=1),
        content_digest=types_pb2.ContentDigest(value=b"other"),
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.CommitTransfer(commit)
    error = error_from_rpc(refused.value)
    assert error.reason == "DIGEST_MISMATCH"
    assert error.metadata["incarnation"] == served.agent.config.incarnation
    commit.content_digest.value = b"math@1"
    assert await refusal(served.stub.CommitTransfer(commit)) == "FAILED_PRECONDITION/NOT_STAGED"
    assert not served.agent.serving.vector.adapters


async def test_orders_for_another_process_are_fenced(served: Served) -> None:
    commit = replica_pb2.CommitTransferRequest(
        transfer_id=served.stage("base@1"), version=BASE_1, incarnation="the former one"
    )
    assert await refusal(served.stub.CommitTransfer(commit)) == "ABORTED/EPOCH_FENCED"
    switch = _switch("base", 1)
    switch.incarnation = "the former one"
    assert await refusal(served.stub.SwitchVersion(switch)) == "ABORTED/EPOCH_FENCED"
    mine = await served.commit("base@2", incarnation=served.agent.config.incarnation)
    assert vector_from_proto(mine.version_vector).base == 2


async def test_a_discard_waits_for_its_turn_and_says_what_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a commit that is under way could be served after its transfer was discarded."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    load_adapter = served.engine.load_adapter

    async def slow(*args: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await load_adapter(*args)

    monkeypatch.setattr(served.engine, "load_adapter", slow)
    committing = asyncio.create_task(served.commit("math@1"))
    await begun.wait()
    request = replica_pb2.DiscardTransferRequest(transfer_id="t-math@1")
    assert await refusal(served.stub.DiscardTransfer(request, timeout=0.2)) == (
        "DEADLINE_EXCEEDED/DEADLINE"
    )
    discarding = asyncio.ensure_future(served.stub.DiscardTransfer(request))
    go_on.set()
    answer = await discarding
    assert vector_from_proto(answer.version_vector).adapters == {"math": AdapterVersions((1,), 1)}
    assert answer.incarnation == served.agent.config.incarnation
    await committing


async def _digests(served: Served, policy: str, version: int) -> list[types_pb2.TensorDigestChunk]:
    wanted = types_pb2.PolicyVersion(policy=policy, version=version)
    call = served.stub.DigestVersion(replica_pb2.DigestVersionRequest(version=wanted))
    return [response.chunk async for response in call]


async def test_what_is_held_is_digested_tensor_by_tensor(served: Served) -> None:
    spec = types_pb2.AdapterSpec(config_json='{"r": 4}', trained_on_base_version=1)
    await served.commit("base@1")
    await served.commit("base@2")
    await served.commit("math@3", adapter=spec, layout_digest=b"l" * 32)
    for policy, version in (("base", 1), ("base", 2), ("math", 3)):
        *parts, last = await _digests(served, policy, version)
        content = torch.full((256,), version, dtype=torch.uint8)
        expected = [StoredTensor("w", "F32", (8, 8), tensor_digest(content))]
        assert [TENSOR.decode(t) for part in parts for t in part.tensors] == expected
        assert last == types_pb2.TensorDigestChunk(digest=checkpoint_digest(expected))
        assert parts[0].adapter == (spec if policy == "math" else types_pb2.AdapterSpec())


async def test_what_is_not_held_is_not_digested(served: Served) -> None:
    wanted = types_pb2.PolicyVersion(policy="math", version=3)
    call = served.stub.DigestVersion(replica_pb2.DigestVersionRequest(version=wanted))
    assert await refusal(call) == "NOT_FOUND/VERSION_UNKNOWN"
    wanted = types_pb2.PolicyVersion(policy="base", version=0)
    call = served.stub.DigestVersion(replica_pb2.DigestVersionRequest(version=wanted))
    assert await refusal(call) == "FAILED_PRECONDITION/NOT_RETAINED"
    wanted = types_pb2.PolicyVersion(policy="no/name", version=1)
    call = served.stub.DigestVersion(replica_pb2.DigestVersionRequest(version=wanted))
    assert await refusal(call) == "INVALID_ARGUMENT/INVALID_NAME"
