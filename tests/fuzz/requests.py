"""A valid request for every method, of what is alive now: what is then mutated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from tests.fuzz.world import REPLICA, World
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.codec import CAPABILITIES, vector_to_proto
from weft_rl.rpc.manifest_codec import manifest_to_chunks, reference_to_chunks
from weft_rl.v1 import admin_pb2 as admin
from weft_rl.v1 import generate_pb2 as generate
from weft_rl.v1 import inspect_pb2 as inspect
from weft_rl.v1 import publish_pb2 as publish
from weft_rl.v1 import registry_pb2 as registry
from weft_rl.v1 import rendezvous_pb2 as rendezvous
from weft_rl.v1 import replica_pb2 as replica
from weft_rl.v1 import types_pb2 as types

_SOON = Duration(nanos=20_000_000)


def valid_requests(world: World, method: str) -> list[Message]:
    """What ``method`` ("InspectService/GetPool") would be sent by somebody honest: one
    message, or, where it takes a stream, several."""
    return _MAKERS[method](world) if method in _MAKERS else []


def _manifest(world: World) -> list[Message]:
    return [publish.PutManifestRequest(chunk=c) for c in manifest_to_chunks(world.manifest)]


def _reference(world: World) -> list[Message]:
    chunks = reference_to_chunks(world.engine.reference)
    return [registry.PutReferenceRequest(chunk=chunk) for chunk in chunks]


def _begin(world: World) -> list[Message]:
    return [world.begin_request(f"q-{world.count()}")]


def _register(world: World) -> list[Message]:
    request = registry.RegisterRequest(
        replica_id="stranger",
        incarnation="i1",
        address="127.0.0.1:1",
        http_url="http://127.0.0.1:1",
        model_name="double",
        capabilities=CAPABILITIES.encode(world.engine.capabilities),
        report=registry.ReplicaReport(
            version_vector=vector_to_proto(world.agent.serving.vector),
            retained_base_versions=[1],
        ),
        protocol_revision=PROTOCOL_REVISION,
        out_of_service=registry.OutOfService(no_pushes=True, reason="why not"),
    )
    return [request]


def _heartbeat(world: World) -> list[Message]:
    beat = registry.HeartbeatRequest(
        replica_id="stranger",
        incarnation="i1",
        report=registry.ReplicaReport(
            version_vector=types.VersionVector(
                base=1, adapters=[types.AdapterVersions(policy="math", versions=[1], alias=1)]
            ),
            spilled_versions=[types.PolicyVersion(policy="math", version=1)],
            pinned_base_versions=[1],
            drain=registry.Drain(time_left=_SOON, reason="leaving"),
            sleep=registry.Sleep(trainer_id="fuzz", weights_awake=True, level=2),
            work=registry.Work(what="switching to math@1", silence=_SOON),
        ),
        staged_transfer_ids=["t-1"],
    )
    return [beat]


def _store(world: World) -> list[Message]:
    keys = rendezvous.StoreKeys(keys=["a", "n"], timeout=_SOON)
    operations: list[dict[str, Any]] = [
        {"set": rendezvous.StoreSet(keys=["a", "n"], values=[b"1", b"9223372036854775807"])},
        {"get": keys},
        {"wait": keys},
        {"check": keys},
        {"delete": keys},
        {"add": rendezvous.StoreAdd(key="n", amount=1)},
        {"compare_set": rendezvous.StoreCompareSet(key="a", expected=b"1", desired=b"2")},
        {"append": rendezvous.StoreSet(keys=["a"], values=[b"3"])},
        {"count": rendezvous.StoreCount()},
    ]
    operation = world.chance.choice(operations)
    return [rendezvous.CallStoreRequest(credential=world.credential(0), **operation)]


def _attend(world: World) -> list[Message]:
    rank = world.chance.choice((0, 1, 2))
    hello = rendezvous.Hello(
        credential=world.credential(min(rank, 1)),
        rank=rank,
        protocol_revision=PROTOCOL_REVISION,
        num_buckets_in_flight=2,
    )
    of = {"transfer_id": world.transfer_id}
    said: list[dict[str, Any]] = [
        {"prepared": rendezvous.Prepared(**of)},
        {"bucket_verified": rendezvous.BucketVerified(**of)},
        {"load_due": rendezvous.LoadDue(**of)},
        {"staged": rendezvous.Staged(**of, content_digest=_digest(world))},
        {"failed": rendezvous.RankFailed(**of, reason="PEER_GONE", message="who knows")},
    ]
    words = world.chance.sample(said, 2)
    return [
        rendezvous.AttendRequest(hello=hello),
        *(rendezvous.AttendRequest(**word) for word in words),
    ]


def _digest(world: World) -> types.ContentDigest:
    return types.ContentDigest(
        algorithm=types.DIGEST_ALGORITHM_WSUM64,
        value=b"\1" * 8,
        size_bytes=world.manifest.total_bytes,
    )


def _plan(world: World, rank: int) -> publish.GroupPlan:
    return publish.GroupPlan(
        group_id=f"g-{world.count()}", token="t", epoch=1, rank=rank, size=2, backend="gloo"
    )


def _order(world: World, kind: Callable[..., Message], **fields: Any) -> list[Message]:
    version = world.chance.choice(
        [types.PolicyVersion(policy="base", version=1), types.PolicyVersion(policy="math")]
    )
    return [kind(coordinator_generation=world.generation, version=version, **fields)]


def _commit(world: World) -> list[Message]:
    return _order(
        world,
        replica.CommitTransferRequest,
        transfer_id=world.transfer_id,
        content_digest=_digest(world),
        adapter=world.adapter(),
    )


def _switch(world: World) -> list[Message]:
    spilled = replica.SpilledCopy(
        transfer_id=world.transfer_id,
        adapter=world.adapter(),
        content_digest=_digest(world),
        layout_digest=world.manifest.layout_digest,
    )
    given = {"spilled": spilled} if world.chance.random() < 0.5 else {}
    return _order(world, replica.SwitchVersionRequest, **given)


def _join(world: World) -> list[Message]:
    order = replica.JoinGroupRequest(
        coordinator_generation=world.generation, trainer_id="stranger", group=_plan(world, 1)
    )
    return [order]


def _send(world: World) -> list[Message]:
    return _order(
        world,
        replica.SendVersionRequest,
        transfer_id=world.transfer_id,
        group=_plan(world, 0),
        timeout=Duration(seconds=1),
    )


def _generate(world: World) -> list[Message]:
    asked = world.chance.choice(["base", "base@0", "base@1", world.policy, "math@1", "tiny"])
    how = generate.Sampling(
        num_samples=2, temperature=0.5, top_p=0.9, top_k=4, seed=7, max_tokens=3, stop=["\n"],
        stop_token_ids=[2],
    )  # fmt: skip
    prompt: dict[str, Any] = world.chance.choice(
        [{"text": "7 + 8 ="}, {"token_ids": generate.TokenIds(ids=[1, 2, 3])}]
    )
    strict = world.chance.random() < 0.5
    return [
        generate.GenerateRequest(
            policy=asked, strict=strict, sampling=how, chunk_tokens=2, **prompt
        )
    ]


_Maker = Callable[[World], list[Message]]
_VERSION = types.PolicyVersion(policy="math", version=1)


def _just(message: Message) -> _Maker:
    def make(_: World) -> list[Message]:
        copy = type(message)()
        copy.CopyFrom(message)
        return [copy]

    return make


_MAKERS: Mapping[str, _Maker] = {
    "PublishService/AcquirePolicy": lambda world: [world.acquire_request()],
    "PublishService/RenewLease": lambda world: [
        publish.RenewLeaseRequest(policy=world.policy, fencing_token=world.token)
    ],
    "PublishService/ReleasePolicy": lambda world: [
        publish.ReleasePolicyRequest(policy=world.policy, fencing_token=world.token + 1)
    ],
    "PublishService/PutManifest": _manifest,
    "PublishService/BeginTransfer": _begin,
    "PublishService/AwaitTransfer": lambda world: [
        publish.AwaitTransferRequest(transfer_id=world.transfer_id)
    ],
    "PublishService/AbortTransfer": lambda world: [
        publish.AbortTransferRequest(
            transfer_id=world.transfer_id, policy="code", fencing_token=world.token
        )
    ],
    "PublishService/SleepRollouts": lambda world: [
        publish.SleepRolloutsRequest(
            fencing_token=world.token,
            session_id="s1",
            gpu_uuids=["GPU-1"],
            when_running=registry.WHEN_RUNNING_ABORT,
            timeout=_SOON,
            level=2,
        )
    ],
    "PublishService/WakeRollouts": lambda world: [
        publish.WakeRolloutsRequest(fencing_token=world.token, session_id="s1")
    ],
    "RegistryService/Register": _register,
    "RegistryService/CheckReplica": _just(
        registry.CheckReplicaRequest(
            replica_id="stranger", incarnation="i1", protocol_revision=PROTOCOL_REVISION
        )
    ),
    "RegistryService/PutReference": _reference,
    "RegistryService/Heartbeat": _heartbeat,
    "RegistryService/Leave": _just(registry.LeaveRequest(replica_id="stranger", incarnation="i1")),
    "RendezvousService/CallStore": _store,
    "RendezvousService/GetManifest": lambda world: [
        rendezvous.GetManifestRequest(
            credential=world.credential(1), layout_digest=world.manifest.layout_digest
        )
    ],
    "RendezvousService/Attend": _attend,
    "InspectService/ListEvents": _just(inspect.ListEventsRequest(page_size=1, page_token="7")),
    "InspectService/ListVersions": _just(
        inspect.ListVersionsRequest(policy="base", page_size=1, page_token="7")
    ),
    "InspectService/GetTransfer": lambda world: [
        inspect.GetTransferRequest(transfer_id=world.transfer_id)
    ],
    "InspectService/DigestTensors": _just(
        inspect.DigestTensorsRequest(replica_id=REPLICA, version=_VERSION)
    ),
    "AdminService/Rollback": _just(admin.RollbackRequest(policy="base", to_version=1)),
    "AdminService/Pin": _just(admin.PinRequest(version=_VERSION, pinned=True)),
    "AdminService/Retire": _just(admin.RetireRequest(version=_VERSION)),
    "AdminService/SetRetention": _just(admin.SetRetentionRequest(policy="math", num_versions=1000)),
    "AdminService/ForgetPolicy": _just(admin.ForgetPolicyRequest(policy="math", force=True)),
    "AdminService/Cordon": _just(admin.CordonRequest(replica_id="stranger", reason="why not")),
    "AdminService/Uncordon": _just(admin.UncordonRequest(replica_id="stranger")),
    "AdminService/Drain": _just(
        admin.DrainRequest(replica_id="stranger", timeout=_SOON, reason="why not")
    ),
    "AdminService/CancelTransfer": _just(
        admin.CancelTransferRequest(transfer_id="stranger", reason="why not")
    ),
    "AdminService/SleepReplica": _just(
        admin.SleepReplicaRequest(
            replica_id="stranger",
            when_running=registry.WHEN_RUNNING_FINISH,
            timeout=_SOON,
            level=2,
        )
    ),
    "AdminService/WakeReplica": _just(admin.WakeReplicaRequest(replica_id="stranger")),
    "GenerateService/Generate": _generate,
    "ReplicaService/JoinGroup": _join,
    "ReplicaService/CommitTransfer": _commit,
    "ReplicaService/LoadTransfer": lambda world: _order(
        world, replica.LoadTransferRequest, transfer_id=world.transfer_id, timeout=_SOON
    ),
    "ReplicaService/SwitchVersion": _switch,
    "ReplicaService/DiscardTransfer": lambda world: [
        replica.DiscardTransferRequest(
            coordinator_generation=world.generation, transfer_id=f"t-{world.count()}"
        )
    ],
    "ReplicaService/RetireVersions": lambda world: [
        replica.RetireVersionsRequest(
            coordinator_generation=world.generation, versions=[_VERSION], ended_policies=["math"]
        )
    ],
    "ReplicaService/DescribeVersion": _just(
        replica.DescribeVersionRequest(version=types.PolicyVersion(policy="base", version=1))
    ),
    "ReplicaService/DigestVersion": _just(
        replica.DigestVersionRequest(version=types.PolicyVersion(policy="base", version=1))
    ),
    "ReplicaService/SendVersion": _send,
    "ReplicaService/Sleep": lambda world: [
        replica.SleepRequest(
            coordinator_generation=world.generation,
            trainer_id="fuzz",
            when_running=registry.WHEN_RUNNING_ABORT,
            timeout=_SOON,
            level=2,
        )
    ],
    "ReplicaService/WakeUp": lambda world: [
        replica.WakeUpRequest(coordinator_generation=world.generation)
    ],
}
