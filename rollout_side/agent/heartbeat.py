"""Values that a replica and the coordinator exchange, at registration and with heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_side.engine import AbsentPolicy
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import Checkpoint, not_compared
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.contract.replica_report import DrainNote, ReplicaReport, Sleep
from weft_rl.contract.tensors import Reference
from weft_rl.rpc.codec import drain_from_proto, version_to_proto, versions_from_proto
from weft_rl.v1 import registry_pb2 as pb
from weft_rl.v1 import types_pb2


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Facts that a replica states once, at registration."""

    address: str
    """Address of its ReplicaService, HOST:PORT."""
    capabilities: Capabilities
    reference: Reference
    model_name: str


_NOT_KNOWN = not_compared("it does not say what it was started with")


@dataclass(frozen=True)
class Holdings:
    """Versions that a replica serves and holds now, with its report."""

    report: ReplicaReport
    """Report, whose ``asleep`` is set while the engine sleeps, not while it waits to."""
    staged: tuple[str, ...] = ()
    """Transfers with staged bytes, whole or in part."""
    checkpoint: Checkpoint = _NOT_KNOWN
    """Checkpoint that the engine was started with."""
    held: frozenset[tuple[PolicyVersion, bytes, bool]] = frozenset()
    """Held versions, each with its digest, and True if it is spilled."""
    last_epoch: int = 0
    """Highest epoch of a side group that it was told."""
    to_sleep: Sleep | None = None
    """Set while it waits to sleep, refusing new requests."""


@dataclass(frozen=True, order=True)
class OrderKey:
    """Key that sorts orders to refuse requests: the newer one is greater."""

    generation: int
    """Generation of the coordinator that gave the order."""
    number: int


@dataclass(frozen=True)
class HeartbeatAnswer:
    """Answer of the coordinator to a heartbeat."""

    drain: DrainNote | None
    """Set when the replica is to drain."""
    is_draining: bool
    """True if the coordinator knew, as it answered, that the replica drains."""
    in_transfer: bool
    """True if a transfer needs the replica."""
    refuse_reason: str
    """Reason to refuse new requests; empty to take them."""
    order: OrderKey
    """Order that set ``refuse_reason``."""
    pins: tuple[int, ...]
    """Versions of the base whose copies are to be kept."""
    vector: VersionVector = field(default_factory=VersionVector)
    """Vector that was reported."""
    lacking: tuple[PolicyVersion, ...] = ()
    """Versions behind the pool's aliases that the vector lacks."""
    lacking_more: bool = False
    """True if there are more than ``lacking`` lists."""
    base_doubt: str = ""
    """Reason why base@0 here is not known to be the pool's; empty if it is, or is not served."""
    absent: Mapping[str, AbsentPolicy] = field(default_factory=dict)
    """Policies that the pool does not serve any more, by name."""


def answer_from_proto(
    response: pb.HeartbeatResponse,
    is_draining: bool,
    coordinator_generation: int,
    vector: VersionVector,
) -> HeartbeatAnswer:
    """Return the answer to a heartbeat that reported ``vector`` and ``is_draining``."""
    return HeartbeatAnswer(
        drain_from_proto(response.drain) if response.HasField("drain") else None,
        is_draining,
        response.in_transfer,
        response.refuse_reason,
        OrderKey(coordinator_generation, response.order_number),
        tuple(response.pinned_base_versions),
        vector,
        tuple(versions_from_proto(response.lacking)),
        response.lacking_more,
        response.base_doubt,
        {
            one.policy: AbsentPolicy(one.last_version, one.reason)
            for one in response.absent_policies
        },
    )


def held_to_proto(held: tuple[PolicyVersion, bytes, bool]) -> types_pb2.HeldVersion:
    """Return the message that tells the coordinator of a held version."""
    version, digest, spilled = held
    return types_pb2.HeldVersion(
        version=version_to_proto(version), content_digest=digest, spilled=spilled
    )
