"""InspectService: every status and reason that its protos list, through the real stubs."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.contract.calls import fails
from tests.contract.conftest import Pool
from tests.doubles.tiny_model import REFERENCE
from weft_rl.contract.errors import (
    LoadFailedError,
    NotReadyError,
    TransferTimeoutError,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.effects import Announce, EventKind
from weft_rl.v1 import admin_pb2, admin_pb2_grpc, inspect_pb2, publish_pb2, types_pb2


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


async def test_a_pool_without_a_base_model_serves_no_version(pool: Pool) -> None:
    trainer = await pool.trainer()
    inspect, admin = trainer.inspect, admin_pb2_grpc.AdminServiceStub(trainer.channel)
    for is_bound in (False, True):
        if is_bound:
            await pool.replica()
        found = await inspect.GetPool(inspect_pb2.GetPoolRequest())
        base = await admin.GetBase(admin_pb2.GetBaseRequest())
        assert found.HasField("version_vector") is base.HasField("version_vector") is is_bound


@pytest.mark.parametrize("method", ["ListReplicas", "ListPolicies", "ListTransfers", "ListEvents"])
async def test_pages_that_nobody_told(pool: Pool, method: str) -> None:
    inspect = (await pool.trainer()).inspect
    request = getattr(inspect_pb2, f"{method}Request")
    wrong = [request(page_size=-1), request(page_token="x" * 5000)]
    if method == "ListTransfers":
        wrong.append(request(page_token="t-gone"))
    for each in wrong:
        await fails(getattr(inspect, method)(each), "INVALID_ARGUMENT", "INVALID_PAGE")


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
    await fails(inspect.ListVersions(ask(policy="nope")), "NOT_FOUND", "POLICY_UNKNOWN")
    for page in ({"page_token": "x"}, {"page_size": -1}):
        call = inspect.ListVersions(ask(policy="math", **page))
        await fails(call, "INVALID_ARGUMENT", "INVALID_PAGE")


async def test_inspecting_a_push(pool: Pool) -> None:
    replica = await pool.replica()
    replica.breaks_at = "never-staged"
    trainer = await pool.trainer()
    begun = await trainer.begin()
    got = await pool.seen()
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
        while inspect_pb2.EVENT_KIND_TRANSFER_COMMITTED not in kinds:
            event = await watch.read()
            assert event.time.seconds > 1e9
            kinds.append(event.kind)
    assert kinds == [
        inspect_pb2.EVENT_KIND_REPLICA_READY,
        inspect_pb2.EVENT_KIND_TRANSFER_BEGUN,
        inspect_pb2.EVENT_KIND_TRANSFER_STAGED,
        inspect_pb2.EVENT_KIND_TRANSFER_COMMITTED,
    ]
    watch.cancel()


async def test_past_events_are_told_newest_first_in_pages(pool: Pool) -> None:
    before = time.time()
    trainer = await pool.trainer()
    watch = trainer.inspect.WatchEvents(inspect_pb2.WatchEventsRequest())
    await watch.initial_metadata()
    await pool.replica()
    await trainer.push()
    told = [await watch.read() for _ in range(4)]
    assert {(e.policy, e.version) for e in told[-1:]} == {("math", 1)}
    watch.cancel()
    request = inspect_pb2.ListEventsRequest(page_size=3)
    first = await trainer.inspect.ListEvents(request)
    request.page_token = first.next_page_token
    second = await trainer.inspect.ListEvents(request)
    listed = [*first.events, *second.events]
    assert len(first.events) == 3
    assert listed[: len(told)] == told[::-1]
    assert not second.next_page_token
    assert before - 5 < first.kept_since.ToNanoseconds() / 1e9 <= listed[-1].time.seconds + 1
    forgotten = inspect_pb2.ListEventsRequest(page_token="0")
    assert not (await trainer.inspect.ListEvents(forgotten)).events
    wrong = inspect_pb2.ListEventsRequest(page_token="yesterday")
    await fails(trainer.inspect.ListEvents(wrong), "INVALID_ARGUMENT", "INVALID_PAGE")


async def test_a_slow_watcher_is_cut_off(pool: Pool) -> None:
    trainer = await pool.trainer()
    watch = trainer.inspect.WatchEvents(inspect_pb2.WatchEventsRequest())
    await watch.initial_metadata()
    assert pool.coordinator is not None
    feed = pool.coordinator.driver.feed  # type: ignore[union-attr]
    for i in range(1200):
        feed.publish(0.0, Announce(EventKind.REPLICA_READY, f"r{i}", ""))

    async def read_all() -> None:
        while True:
            await watch.read()

    await fails(asyncio.wait_for(read_all(), 5), "RESOURCE_EXHAUSTED", "TOO_SLOW")


def _digests_of(replica_id: str, policy: str = "math") -> inspect_pb2.DigestTensorsRequest:
    wanted = types_pb2.PolicyVersion(policy=policy, version=1)
    return inspect_pb2.DigestTensorsRequest(replica_id=replica_id, version=wanted)


async def test_digests_are_those_that_a_replica_makes(pool: Pool) -> None:
    replica = await pool.replica("r0")
    inspect = (await pool.trainer()).inspect
    part = types_pb2.TensorDigest(name="w", dtype="BF16", dims=[2, 3], digest=2**64 - 1)
    chunks = [
        types_pb2.TensorDigestChunk(tensors=[part, part]),
        types_pb2.TensorDigestChunk(digest=b"d" * 32),
    ]
    replica.tensors = {PolicyVersion("math", 1): chunks}
    told = [response.chunk async for response in inspect.DigestTensors(_digests_of("r0"))]
    assert told == chunks
    replica.tensors = {}
    await fails(inspect.DigestTensors(_digests_of("r0")), "NOT_FOUND", "VERSION_UNKNOWN")


async def test_digests_that_cannot_be_had(pool: Pool) -> None:
    replica = await pool.replica("r0")
    inspect = (await pool.trainer()).inspect
    await fails(inspect.DigestTensors(_digests_of("r9")), "NOT_FOUND", "REPLICA_UNKNOWN")
    nameless = _digests_of("r0", "no/name")
    await fails(inspect.DigestTensors(nameless), "INVALID_ARGUMENT", "INVALID_NAME")
    for error, how in (
        (NotReadyError("no files", reason="NOT_RETAINED"), "FAILED_PRECONDITION/NOT_RETAINED"),
        (TransferTimeoutError("slow"), "DEADLINE_EXCEEDED/DEADLINE"),
        (LoadFailedError("its engine is gone"), "INTERNAL/LOAD_FAILED"),
    ):
        replica.tensors = {PolicyVersion("math", 1): error}
        failed = await fails(inspect.DigestTensors(_digests_of("r0")), *how.split("/"))
        assert failed.metadata["member"] == "r0"
    await replica.server.stop(0)
    await fails(inspect.DigestTensors(_digests_of("r0")), "UNAVAILABLE", "PEER_GONE")
