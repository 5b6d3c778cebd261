"""The coordinator's values as messages of ``weft.v1``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from weft_rl import __version__
from weft_rl.contract.manifest import SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.policies.republishing import conflicts, publish_again_version
from weft_rl.coordinator.decisions.problems import Problem, problems
from weft_rl.coordinator.decisions.state import effects
from weft_rl.coordinator.decisions.state.pool import (
    Lease,
    Policy,
    PoolState,
    num_retained,
)
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    VersionDifference,
    explain_state,
    is_listed,
    replica_state,
    routes,
    version_differences,
)
from weft_rl.coordinator.decisions.state.transfer import Group, Transfer
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    ContentDigest,
    Phase,
    PolicyKind,
    RecordedFacts,
    VersionRecord,
    VersionState,
)
from weft_rl.coordinator.messages.pages import SharedVectors, cut, entry_of
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.codec import (
    CAPABILITIES,
    POLICY_VERSION,
    REPORT_BESIDE_VECTOR,
    duration_to_proto,
    send_plan_from_proto,
    send_plan_to_proto,
    timestamp_to_proto,
    vector_to_proto,
)
from weft_rl.schema import MessageCodec, codec, converter
from weft_rl.v1 import inspect_pb2, publish_pb2, registry_pb2, replica_pb2, types_pb2

# Policies that a replica names which it serves otherwise than the pool.
_MAX_DIFFERENCES = 16


# -- values, events and answers whose fields are those of their messages -----------

converter(SendPlan, types_pb2.SendPlan, send_plan_to_proto, send_plan_from_proto)
CONTENT: Final = codec(ContentDigest, types_pb2.ContentDigest)
FACTS: Final = codec(RecordedFacts, types_pb2.VersionFacts)
_BOUND: Final = codec(BoundCheckpoint, inspect_pb2.BoundCheckpoint)
DIFFERENCE: Final = codec(VersionDifference, inspect_pb2.VersionDifference)
_PROBLEM: Final = codec(Problem, inspect_pb2.Problem, told=["subject"])

#: Answers whose lease is told beside them.
_LEASE: Final = ("policy", "lease", "time_to_live")
ACQUIRED: Final = codec(
    effects.LeaseAnswer, publish_pb2.AcquirePolicyResponse, given=_LEASE, told=["lease"]
)
RENEWED: Final = codec(
    effects.LeaseAnswer,
    publish_pb2.RenewLeaseResponse,
    given=[*_LEASE, "last_version"],
    told=["lease"],
)
_BEGUN: Final = codec(
    effects.BeginAnswer, publish_pb2.BeginTransferResponse, given=["group"], told=["group"]
)


def group_to_proto(group: Group, ranks: Sequence[int]) -> publish_pb2.GroupPlan:
    """Encode a group for the process that has ``ranks`` of it, with the tokens of those alone."""
    token, *further = map(group.token_of, ranks)
    return publish_pb2.GroupPlan(
        group_id=group.group_id,
        token=token,
        further_tokens=further,
        epoch=group.epoch,
        rank=ranks[0],
        size=group.size,
        backend=group.backend,
        num_senders=group.num_senders,
    )


def begin_to_proto(answer: effects.BeginAnswer) -> publish_pb2.BeginTransferResponse:
    """Encode the answer to BeginTransfer; without a group if the transfer has ended."""
    group = answer.group and group_to_proto(answer.group, answer.group.senders)
    return _BEGUN.encode(answer, group=group)


def lease_to_proto(policy: str, lease: Lease, time_to_live: float) -> publish_pb2.Lease:
    """Encode a lease with the seconds that are left to it."""
    return publish_pb2.Lease(
        policy=policy,
        trainer_id=lease.trainer_id,
        fencing_token=lease.fencing_token,
        time_to_live=duration_to_proto(time_to_live),
    )


def transfer_to_proto(
    transfer: Transfer, state: PoolState, now: float, num_verified: int
) -> publish_pb2.Transfer:
    """Encode a transfer as seen from outside.

    Args:
        num_verified: Buckets that every receiver has verified, while it stages.
    """
    phase = max(transfer.phase, Phase.FORMING)
    started, committed = transfer.start_at, transfer.commit_at
    end = transfer.end_at or now
    message = publish_pb2.Transfer(
        transfer_id=transfer.transfer_id,
        version=POLICY_VERSION.encode(transfer.policy_version),
        trainer_id=transfer.trainer_id,
        state=publish_pb2.TransferState.ValueType(int(phase)),
        total_bytes=transfer.layout.total_bytes,
        num_buckets=transfer.layout.num_buckets,
        num_buckets_verified=transfer.layout.num_buckets if committed else num_verified,
        replica_ids=transfer.targets,
        begin_time=timestamp_to_proto(state.wall(transfer.begin_at)),
        forming=duration_to_proto((started or end) - transfer.begin_at),
        layout_digest=transfer.layout.digest,
        layout_digest_hex=transfer.layout.digest.hex(),
        epoch=transfer.epoch,
        backend=transfer.backend,
        backend_reason=transfer.backend_reason,
        pause=duration_to_proto(transfer.pause_seconds),
        lost_replica_ids=transfer.lost,
        serving_replica_ids=sorted(transfer.served_by),
        refusals=[
            publish_pb2.TransferRefusal(
                replica_id=replica_id, reason=failure.reason, message=failure.message
            )
            for replica_id, failure in sorted({**transfer.losses, **transfer.refusals}.items())
        ],
        served_over_base_version=transfer.purpose.served_over,
        over_another_base=transfer.purpose.over_another_base,
        purpose=publish_pb2.TransferPurpose.Value(
            f"TRANSFER_PURPOSE_{transfer.purpose.name.upper()}"
        ),
        waits_for=transfer.waits_for if not transfer.version else "",
        replaced_version=transfer.served_before,
        pauses=[
            publish_pb2.GenerationPause(
                replica_id=replica_id,
                pause=duration_to_proto(pause.seconds),
                resumed_after=duration_to_proto(pause.end_at - committed),
            )
            for replica_id, pause in sorted(transfer.pauses.items())
        ],
    )
    if transfer.create_time:
        waiting = transfer.create_time - state.wall(transfer.begin_at)
        message.waiting.CopyFrom(duration_to_proto(max(0.0, waiting)))
    if started:
        message.staging.CopyFrom(duration_to_proto((committed or end) - started))
    if committed:
        message.committing.CopyFrom(duration_to_proto(end - committed))
    _put_end(message, transfer)
    return message


def _put_end(
    message: publish_pb2.Transfer | inspect_pb2.Version, of: Transfer | VersionRecord
) -> None:
    """Add the content digest and the failure, where there are any."""
    if of.content_digest:
        message.content_digest.CopyFrom(CONTENT.encode(of.content_digest))
        message.content_digest_hex = of.content_digest.value.hex()
    if of.failure:
        message.failure_reason = of.failure.reason
        message.failure_message = of.failure.message


def transfer_from_record(record: VersionRecord, state: PoolState) -> publish_pb2.Transfer:
    """Encode a transfer that only the catalog still knows, from the record of its version.

    Names the replicas in contact that serve the version now; O(replicas).
    """
    committed = record.state in (VersionState.COMMITTED, VersionState.RETIRED)
    message = publish_pb2.Transfer(
        transfer_id=record.transfer_id,
        version=POLICY_VERSION.encode(record.version),
        trainer_id=record.trainer_id,
        state=(
            publish_pb2.TRANSFER_STATE_COMMITTED
            if committed
            else publish_pb2.TRANSFER_STATE_ABORTED
        ),
        purpose=publish_pb2.TRANSFER_PURPOSE_PUSH,
        begin_time=timestamp_to_proto(record.create_time),
        layout_digest=record.layout_digest,
        layout_digest_hex=record.layout_digest.hex(),
        serving_replica_ids=sorted(
            replica.replica_id
            for replica in state.replicas.values()
            if replica.in_contact and replica.vector.holds(record.version)
        ),
    )
    if record.content_digest:
        message.total_bytes = record.content_digest.size_bytes
    _put_end(message, record)
    return message


def version_record_to_proto(record: VersionRecord, state: PoolState) -> inspect_pb2.Version:
    """Encode a version as recorded, with the base that it is served over now."""
    message = inspect_pb2.Version(
        version=POLICY_VERSION.encode(record.version),
        state=inspect_pb2.VersionState.ValueType(int(record.state)),
        trainer_id=record.trainer_id,
        transfer_id=record.transfer_id,
        layout_digest=record.layout_digest,
        layout_digest_hex=record.layout_digest.hex(),
        create_time=timestamp_to_proto(record.create_time),
        trained_on_base_version=record.adapter.trained_on_base_version if record.adapter else None,
    )
    if record.adapter and record.state is VersionState.COMMITTED:
        message.served_over_base_version = state.vector.base
        message.over_another_base = state.is_over_another_base(record.version)
    _put_end(message, record)
    if record.commit_time:
        message.commit_time.CopyFrom(timestamp_to_proto(record.commit_time))
    return message


def replica_to_proto(
    state: PoolState,
    replica: Replica,
    now: float,
    vectors: SharedVectors | None = None,
    most: int | None = None,
) -> inspect_pb2.Replica:
    """Encode a replica, with its state and the reason for it.

    Args:
        vectors: Collection to add its version vector to; None to put it into the message itself.
        most: Most adapters that a vector in the message lists; None for all.
    """
    where, why = explain_state(state, replica)
    differences = version_differences(state, replica)
    return inspect_pb2.Replica(
        replica_id=replica.replica_id,
        state=inspect_pb2.ReplicaState.ValueType(int(where)),
        state_reason=why,
        address=replica.address,
        http_url=replica.http_url,
        capabilities=CAPABILITIES.encode(replica.capabilities),
        version_vector=None if vectors else vector_to_proto(replica.vector, most),
        version_vector_index=vectors.index(replica.vector) if vectors else None,
        since_heartbeat=duration_to_proto(now - replica.last_heard),
        model_name=replica.model_name,
        checkpoint_state=registry_pb2.CheckpointState.ValueType(int(replica.checkpoint.state)),
        checkpoint_digest=replica.checkpoint.digest,
        checkpoint_reason=replica.checkpoint.reason,
        report=REPORT_BESIDE_VECTOR.encode(replica.believed_report(now)),
        differences=map(DIFFERENCE.encode, differences[:_MAX_DIFFERENCES]),
        num_more_differences=max(0, len(differences) - _MAX_DIFFERENCES),
    )


def route_to_proto(replica: Replica, vector_index: int) -> inspect_pb2.Route:
    """Encode the route to a replica that may be sent requests."""
    return inspect_pb2.Route(
        replica_id=replica.replica_id,
        http_url=replica.http_url,
        model_name=replica.model_name,
        version_vector_index=vector_index,
        address=replica.address,
    )


def _conflict_to_proto(state: PoolState, version: PolicyVersion) -> inspect_pb2.VersionConflict:
    contents = state.conflicts[version]
    return inspect_pb2.VersionConflict(
        version=version.version,
        contents=[
            inspect_pb2.FoundContent(content_digest=digest, replica_ids=replica_ids)
            for digest, replica_ids in contents.items()
        ],
    )


def policy_to_proto(state: PoolState, policy: Policy, now: float) -> inspect_pb2.Policy:
    """Encode a policy, with its lease if it has an owner, and with versions to publish again."""
    message = inspect_pb2.Policy(
        policy=policy.name,
        kind=types_pb2.PolicyKind.ValueType(int(policy.kind)),
        served_version=policy.served_version,
        last_version=policy.last_version,
        versions=policy.versions,
        pinned_versions=policy.pinned,
        publish_again_version=publish_again_version(state, policy.name),
        conflicts=[
            _conflict_to_proto(state, PolicyVersion(policy.name, number))
            for number in conflicts(state, policy.name)
        ],
        trained_on_base_version=policy.trained_on.get(policy.served_version),
        lost=state.is_lost(policy),
        over_another_base=state.is_over_another_base(
            PolicyVersion(policy.name, policy.served_version)
        ),
    )
    if policy.kind is PolicyKind.ADAPTER:
        message.num_retained = num_retained(policy, state.settings)
        message.has_own_retention = bool(policy.retain)
    lease = policy.lease
    if lease and now < lease.expires_at:
        message.lease.CopyFrom(lease_to_proto(policy.name, lease, lease.expires_at - now))
    return message


# -- orders to replicas -----------------------------------------------------------

_ORDER: Final = ("coordinator_generation", "pool_id")
_TO: Final = ("replica_id", "address")
#: Codecs of the orders, each of whose messages is told the coordinator's generation and pool.
ORDERS: Final[Mapping[type, MessageCodec[Any, Any]]] = {
    made.value: made
    for made in (
        codec(
            effects.CallJoin,
            replica_pb2.JoinGroupRequest,
            given=[*_TO, "transfer_id", "group", "first_rank"],
            told=[*_ORDER, "trainer_id", "group", "is_probe"],
        ),
        codec(
            effects.CallRestore,
            replica_pb2.SwitchVersionRequest,
            given=[
                *_TO,
                "transfer_id",
                "adapter",
                "content_digest",
                "layout_digest",
                "alias",
                "timeout_seconds",
            ],
            told=[*_ORDER, "spilled"],
        ),
        codec(effects.CallLoad, replica_pb2.LoadTransferRequest, given=_TO, told=_ORDER),
        codec(effects.CallCommit, replica_pb2.CommitTransferRequest, given=_TO, told=_ORDER),
        codec(
            effects.CallSend,
            replica_pb2.SendVersionRequest,
            given=[*_TO, "group"],
            told=[*_ORDER, "group"],
        ),
        codec(
            effects.CallSwitch,
            replica_pb2.SwitchVersionRequest,
            given=[*_TO, "transfer_id"],
            told=[*_ORDER, "spilled"],
        ),
        codec(effects.CallDiscard, replica_pb2.DiscardTransferRequest, given=_TO, told=_ORDER),
        codec(effects.CallRefuse, replica_pb2.RefuseRequestsRequest, given=_TO, told=_ORDER),
        codec(
            effects.CallSleep,
            replica_pb2.SleepRequest,
            given=[*_TO, "aborts", "call_seconds"],
            told=[*_ORDER, "when_running"],
        ),
        codec(
            effects.CallWake, replica_pb2.WakeUpRequest, given=[*_TO, "call_seconds"], told=_ORDER
        ),
        codec(
            effects.CallRetire,
            replica_pb2.RetireVersionsRequest,
            given=[*_TO, "incarnation"],
            told=_ORDER,
        ),
    )
}
SPILLED_COPY: Final = codec(
    effects.CallRestore,
    replica_pb2.SpilledCopy,
    given=[*_TO, "incarnation", "version", "timeout_seconds"],
)


# -- the pool as a whole ---------------------------------------------------------


def pool_to_proto(
    state: PoolState,
    now: float,
    unix_seconds: float,
    unused_files: Sequence[str],
    unwritten_reason: str,
) -> inspect_pb2.GetPoolResponse:
    """Encode a pool without its replicas, policies, transfers and version vector; O(replicas +
    policies + operators' orders).

    Args:
        now: Monotonic seconds, as the state has them.
        unused_files: Files of the coordinator's that are not used, with the reasons.
        unwritten_reason: Why events are not in the catalog; empty if they are.
    """
    found = problems(state, now, unused_files, unwritten_reason)
    counts = Counter(replica_state(state, r) for r in state.replicas.values())
    return inspect_pb2.GetPoolResponse(
        base_fingerprint=state.fingerprint,
        weft_version=__version__,
        coordinator_generation=state.generation,
        replica_counts=[
            inspect_pb2.ReplicaCount(
                state=inspect_pb2.ReplicaState.ValueType(int(where)), num_replicas=count
            )
            for where, count in sorted(counts.items())
        ],
        base_checkpoint=_BOUND.encode(state.checkpoint) if state.checkpoint else None,
        protocol_revision=PROTOCOL_REVISION,
        time=timestamp_to_proto(unix_seconds),
        unused_files=unused_files,
        problems=[
            _PROBLEM.encode(problem, subject=problem.replica_id or problem.policy)
            for problem in found.shown
        ],
        num_more_problems=found.num_more,
        num_errors=found.num_errors,
        pool_id=state.pool_id,
    )


# -- routes: the whole list, or the changes since a list was told ----------------

# Names have at most 63 characters: 256 KiB.
_MAX_REMOVED: Final = 4000
# Versions of such names: about 128 KiB.
_MAX_OVER_ANOTHER_BASE: Final = 1024


def route_messages(
    state: PoolState, changed: Sequence[str] | None, previous: int, revision: int
) -> list[inspect_pb2.WatchRoutesResponse]:
    """Return the messages, one or more, that bring a reader from ``previous`` to ``revision``.

    Args:
        changed: Replicas that have changed since ``previous``; None for the whole list.
    """
    if changed is None:
        listed, removed = routes(state), list[str]()
    else:
        now_is = [(name, state.replicas.get(name)) for name in sorted(changed)]
        listed = [replica for _, replica in now_is if replica and is_listed(replica)]
        removed = [name for name, replica in now_is if not (replica and is_listed(replica))]
    parts = list[inspect_pb2.WatchRoutesResponse]()
    while listed or removed or not parts:
        part, listed = _part(listed)
        part.removed_replica_ids.extend(removed[:_MAX_REMOVED])
        removed = removed[_MAX_REMOVED:]
        parts.append(part)
    for part in parts:
        part.coordinator_generation = state.generation
        part.revision = revision
        part.previous_revision = -1 if changed is None else previous
        part.more = part is not parts[-1]
    parts[0].whole = changed is None
    parts[-1].over_another_base.extend(
        inspect_pb2.OverAnotherBase(
            version=POLICY_VERSION.encode(version),
            trained_on_base_version=state.policies[version.policy].trained_on[version.version],
            base_version=state.vector.base,
        )
        for version in state.over_another_base()[:_MAX_OVER_ANOTHER_BASE]
    )
    return parts


def _part(listed: list[Replica]) -> tuple[inspect_pb2.WatchRoutesResponse, list[Replica]]:
    """Put as many routes into a message as it may hold; return it and the rest."""
    vectors = SharedVectors()

    def make(replica: Replica) -> inspect_pb2.Route:
        return entry_of(
            replica,
            lambda replica: route_to_proto(replica, vectors.index(replica.vector)),
            lambda replica, _: inspect_pb2.Route(),
        )

    page = cut(listed, make, vectors=vectors)
    message = inspect_pb2.WatchRoutesResponse(
        routes=[route for route in page.entries if route.replica_id],
        version_vectors=vectors.messages,
    )
    return message, listed[len(page.entries) :]
