"""The coordinator's values as messages of ``weft.v1``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from weft_rl import __version__
from weft_rl.containers import replace
from weft_rl.contract.group import MAX_HOPS, LinkUsage
from weft_rl.contract.manifest import SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.policies.republishing import conflicts, publish_again_version
from weft_rl.coordinator.decisions.problems import Problem, problems
from weft_rl.coordinator.decisions.purposes.rollback import rollback_ways
from weft_rl.coordinator.decisions.state import effects
from weft_rl.coordinator.decisions.state.pool import (
    Lease,
    Policy,
    PoolState,
    live_lease,
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
    Failure,
    Phase,
    PolicyKind,
    RecordedFacts,
    VersionRecord,
    VersionState,
)
from weft_rl.coordinator.messages.pages import SharedVectors, cut, entry_of
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.codec import (
    CHECKPOINT,
    LINK_USAGE,
    POLICY_VERSION,
    REPORT_BESIDE_VECTOR,
    duration_to_proto,
    send_plan_from_proto,
    send_plan_to_proto,
    timestamp_to_proto,
    vector_to_proto,
)
from weft_rl.schema import codec, converter, listing
from weft_rl.v1 import inspect_pb2, publish_pb2, replica_pb2, types_pb2

# Policies that a replica names which it serves otherwise than the pool.
_MAX_DIFFERENCES = 16


# -- values, events and answers whose fields are those of their messages -----------

converter(SendPlan, types_pb2.SendPlan, send_plan_to_proto, send_plan_from_proto)
CONTENT: Final = codec(ContentDigest, types_pb2.ContentDigest)
FACTS: Final = codec(RecordedFacts, types_pb2.VersionFacts)
_bound: Final = listing(BoundCheckpoint, inspect_pb2.BoundCheckpoint)
_difference: Final = listing(VersionDifference, inspect_pb2.VersionDifference)
_problem: Final = listing(Problem, inspect_pb2.Problem)
_lease: Final = listing(Lease, publish_pb2.Lease)
listing(Failure, types_pb2.Failure)  # for what has one as a field
_refusal: Final = listing(Failure, publish_pb2.TransferRefusal)
_group: Final = listing(Group, publish_pb2.GroupPlan)
_begun: Final = listing(effects.BeginAnswer, publish_pb2.BeginTransferResponse, told=["group"])
_transfer: Final = listing(
    Transfer, publish_pb2.Transfer, told=["version", "purpose", "refusals", "waits_for", "pauses"]
)
_recorded: Final = listing(VersionRecord, publish_pb2.Transfer, told=["state"])
_version: Final = listing(VersionRecord, inspect_pb2.Version)
_replica: Final = listing(Replica, inspect_pb2.Replica, told=["checkpoint", "report"])
SPILLED_COPY: Final = listing(effects.CallRestore, replica_pb2.SpilledCopy)
_route: Final = listing(Replica, inspect_pb2.Route)
_policy: Final = listing(Policy, inspect_pb2.Policy, told=["lease"])


def group_to_proto(group: Group, ranks: Sequence[int]) -> publish_pb2.GroupPlan:
    """Encode a group for the process that has ``ranks`` of it, with the tokens of those alone."""
    token, *further = map(group.token_of, ranks)
    return _group(group, token=token, further_tokens=further, rank=ranks[0])


def begin_to_proto(answer: effects.BeginAnswer) -> publish_pb2.BeginTransferResponse:
    """Encode the answer to BeginTransfer; without a group if the transfer has ended."""
    return _begun(answer, group=answer.group and group_to_proto(answer.group, answer.group.senders))


def transfer_to_proto(
    transfer: Transfer, state: PoolState, now: float, num_verified: int
) -> publish_pb2.Transfer:
    """Encode a transfer as seen from outside.

    Args:
        num_verified: Buckets that every receiver has verified, while it stages.
    """
    begun, started, committed = transfer.begin_at, transfer.start_at, transfer.commit_at
    end, layout, purpose = transfer.end_at or now, transfer.layout, transfer.purpose
    waiting = transfer.create_time and duration_to_proto(transfer.create_time - state.wall(begun))
    return _transfer(
        transfer,
        version=POLICY_VERSION.encode(transfer.policy_version),
        state=max(transfer.phase, Phase.FORMING),
        total_bytes=layout.total_bytes,
        num_buckets=layout.num_buckets,
        num_buckets_verified=layout.num_buckets if committed else num_verified,
        replica_ids=transfer.targets,
        begin_time=timestamp_to_proto(state.wall(begun)),
        waiting=waiting or None,
        forming=duration_to_proto((started or end) - begun),
        staging=duration_to_proto((committed or end) - started) if started else None,
        committing=duration_to_proto(end - committed) if committed else None,
        lost_replica_ids=transfer.lost,
        whole_replica_ids=transfer.sent_whole,
        serving_replica_ids=sorted(transfer.served_by),
        refusals=[
            _refusal(failure, replica_id=replica_id)
            for replica_id, failure in sorted({**transfer.losses, **transfer.refusals}.items())
        ],
        served_over_base_version=purpose.served_over,
        over_another_base=purpose.over_another_base,
        purpose=f"TRANSFER_PURPOSE_{purpose.name.upper()}",
        waits_for="" if transfer.version else transfer.waits_for,
        replaced_version=transfer.served_before,
        pauses=[
            publish_pb2.GenerationPause(
                replica_id=replica_id,
                pause=duration_to_proto(pause.seconds),
                resumed_after=duration_to_proto(pause.end_at - committed),
            )
            for replica_id, pause in sorted(transfer.pauses.items())
        ],
        hops=_hops(transfer.attempt.progress.hops),
        layout_digest=layout.digest,
        **_hex(layout.digest, transfer.content_digest),
    )


def _hops(hops: Mapping[tuple[str, str], LinkUsage]) -> list[publish_pb2.Hop]:
    slowest = sorted(hops.items(), key=lambda entry: entry[1].rate or float("inf"))
    return [
        publish_pb2.Hop(source=source, target=target, usage=LINK_USAGE.encode(usage))
        for (source, target), usage in slowest[:MAX_HOPS]
    ]


def _hex(layout_digest: bytes, content: ContentDigest | None) -> dict[str, Any]:
    return {
        "layout_digest_hex": layout_digest.hex(),
        "content_digest_hex": content and content.value.hex(),
    }


def transfer_from_record(record: VersionRecord, state: PoolState) -> publish_pb2.Transfer:
    """Encode a transfer that only the catalog still knows, from the record of its version.

    Names the replicas in contact that serve the version now; O(replicas).
    """
    served = record.state in (VersionState.COMMITTED, VersionState.RETIRED)
    return _recorded(
        record,
        state=Phase.COMMITTED if served else Phase.ABORTED,
        purpose="TRANSFER_PURPOSE_PUSH",
        begin_time=timestamp_to_proto(record.create_time),
        total_bytes=record.content_digest and record.content_digest.size_bytes,
        serving_replica_ids=sorted(
            replica.replica_id
            for replica in state.replicas.values()
            if replica.in_contact and replica.vector.holds(record.version)
        ),
        **_hex(record.layout_digest, record.content_digest),
    )


def version_record_to_proto(record: VersionRecord, state: PoolState) -> inspect_pb2.Version:
    """Encode a version as recorded, with the base that it is served over now."""
    is_served = record.adapter and record.state is VersionState.COMMITTED
    return _version(
        record,
        trained_on_base_version=record.adapter and record.adapter.trained_on_base_version,
        served_over_base_version=state.vector.base if is_served else None,
        over_another_base=is_served and state.is_over_another_base(record.version),
        **_hex(record.layout_digest, record.content_digest),
    )


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
    return _replica(
        replica,
        state=where,
        state_reason=why,
        version_vector=None if vectors else vector_to_proto(replica.vector, most),
        version_vector_index=vectors.index(replica.vector) if vectors else None,
        since_heartbeat=duration_to_proto(now - replica.last_heard),
        checkpoint=CHECKPOINT.encode(replace(replica.checkpoint, files=())),
        report=REPORT_BESIDE_VECTOR.encode(replica.believed_report(now)),
        differences=map(_difference, differences[:_MAX_DIFFERENCES]),
        num_more_differences=max(0, len(differences) - _MAX_DIFFERENCES),
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
    is_adapter, lease = policy.kind is PolicyKind.ADAPTER, live_lease(policy, now)
    return _policy(
        policy,
        policy=policy.name,
        lease=lease and _lease(replace(lease, time_to_live=lease.expires_at - now)),
        publish_again_version=publish_again_version(state, policy.name),
        num_retained=num_retained(policy, state.settings) if is_adapter else 0,
        has_own_retention=is_adapter and policy.retain > 0,
        conflicts=[
            _conflict_to_proto(state, PolicyVersion(policy.name, number))
            for number in conflicts(state, policy.name)
        ],
        trained_on_base_version=policy.trained_on.get(policy.served_version),
        lost=state.is_lost(policy),
        over_another_base=state.is_over_another_base(
            PolicyVersion(policy.name, policy.served_version)
        ),
        rollback_versions=[
            inspect_pb2.RollbackVersion(**way._asdict())
            for way in (() if is_adapter else rollback_ways(state))
        ],
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
        base_checkpoint=_bound(state.checkpoint) if state.checkpoint else None,
        protocol_revision=PROTOCOL_REVISION,
        time=timestamp_to_proto(unix_seconds),
        unused_files=unused_files,
        problems=[
            _problem(problem, subject=problem.replica_id or problem.policy)
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
            lambda replica: _route(replica, version_vector_index=vectors.index(replica.vector)),
            lambda replica, _: inspect_pb2.Route(),
        )

    page = cut(listed, make, vectors=vectors)
    message = inspect_pb2.WatchRoutesResponse(
        routes=[route for route in page.entries if route.replica_id],
        version_vectors=vectors.messages,
    )
    return message, listed[len(page.entries) :]
