"""Values that the coordinator's state is made of: kinds, states, and what the catalog records."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.checkpoint import FileDigest
from weft_rl.contract.errors import WeftError, error_from_reason
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import HeldVersion
from weft_rl.contract.tensors import DataType


class PolicyKind(enum.IntEnum):
    """Kind of a policy; numbers are those of ``weft.v1.PolicyKind``."""

    BASE = 1
    ADAPTER = 2


class VersionState(enum.IntEnum):
    """State of a version; numbers are those of ``weft.v1.VersionState``."""

    STAGING = 1
    COMMITTED = 2
    ABORTED = 3
    RETIRED = 4
    FAILED = 5


class ReplicaState(enum.IntEnum):
    """State of a replica; numbers are those of ``weft.v1.ReplicaState``."""

    PENDING_WEIGHTS = 1
    READY = 2
    LOST = 3
    QUARANTINED = 4
    DRAINING = 5
    OUT_OF_SERVICE = 6
    SUSPECT = 7
    ASLEEP = 8

    @property
    def word(self) -> str:
        """Its word, the same in every message, listing and page."""
        return self.name.lower().replace("_", " ")


class CallAnswer:
    """Answer to a waiting call: its fields are those of the response, as its proto says."""


class StateReason(enum.Enum):
    """Reason of a replica for its state: the state, and the label that tells it from others."""

    READY = ReplicaState.READY, ""
    SILENT = ReplicaState.LOST, "silent"
    LEFT_TRANSFER = ReplicaState.LOST, "left_transfer"
    MIXED_WEIGHTS = ReplicaState.QUARANTINED, "mixed_weights"
    LEAVING = ReplicaState.DRAINING, "leaving"
    OPERATOR = ReplicaState.OUT_OF_SERVICE, "operator"
    SLEEP_ORDERED = ReplicaState.ASLEEP, "ordered"
    WAKING = ReplicaState.ASLEEP, "waking"
    STALLED = ReplicaState.SUSPECT, "stalled"
    VERSIONS_MISSING = ReplicaState.PENDING_WEIGHTS, "versions_missing"
    OTHER_BASE = ReplicaState.PENDING_WEIGHTS, "other_base"
    NOT_OPEN = ReplicaState.PENDING_WEIGHTS, "not_open"

    def __init__(self, state: ReplicaState, label: str) -> None:
        self.state, self.label = state, label


class Phase(enum.IntEnum):
    """Phase of a transfer; WAITING and FORMING are both FORMING on the wire."""

    WAITING = 0
    """Begun, without a version: waits for replicas, for preflight, or for its turn."""
    FORMING = 1
    STAGING = 2
    COMMITTING = 3
    COMMITTED = 4
    ABORTED = 5


@dataclass(frozen=True)
class ContentDigest:
    """A digest over all bytes of a version, as in ``weft.v1.ContentDigest``."""

    algorithm: int
    value: bytes
    size_bytes: int


def base_content(layout_digest: bytes, digest: ContentDigest) -> bytes:
    """Return a key that tells the content of a pushed base from that of others.

    The layout is part of it, since a content digest is one over the tensors of its layout.
    """
    return layout_digest + digest.value


@dataclass(frozen=True, kw_only=True)
class BoundCheckpoint:
    """Checkpoint that base@0 is in this pool, and the replica that bound it."""

    digest: bytes
    base_dtype: DataType
    quantization: str
    replica_id: str
    files: tuple[FileDigest, ...] = ()


@dataclass(frozen=True)
class RecordedFacts:
    """Facts of a version that a holder of it tells the catalog."""

    content_digest: ContentDigest
    layout_digest: bytes
    adapter: AdapterSpec | None


@dataclass(frozen=True)
class Failure:
    """Reason why something ended, as a value that an error can be made of."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def error(self) -> WeftError:
        """Return the typed error to answer callers with."""
        return error_from_reason(self.reason, self.message, dict(self.metadata))

    @classmethod
    def of(cls, error: WeftError) -> Failure:
        """Return the failure that stands for an error."""
        return cls(error.reason, error.message, error.metadata)


@dataclass(frozen=True)
class VersionLayout:
    """A manifest and the sums that decisions need."""

    manifest: Manifest | None = field(repr=False, compare=False)
    """Manifest; not kept once a transfer has ended."""
    digest: bytes
    total_bytes: int
    wire_bytes: int
    num_buckets: int
    """Number of buckets that are sent: the manifest's own, or the wire buckets of a send plan."""

    @classmethod
    def of(cls, manifest: Manifest) -> VersionLayout:
        """Compute the sums of a manifest once; O(buckets)."""
        return cls(
            manifest,
            manifest.layout_digest,
            manifest.total_bytes,
            manifest.wire_bytes,
            len(manifest.buckets),
        )


#: Layout of a transfer that moves no bytes.
NO_LAYOUT = VersionLayout(None, b"", 0, 0, 0)


@dataclass(frozen=True)
class VersionRecord:
    """A version as the catalog holds it; times are seconds since 1970, 0 when not yet."""

    version: PolicyVersion
    state: VersionState
    trainer_id: str
    request_id: str
    transfer_id: str
    layout_digest: bytes
    create_time: float
    commit_time: float = 0.0
    content_digest: ContentDigest | None = None
    adapter: AdapterSpec | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class HeldVersionRecord:
    """Version that a replica holds, with what the catalog says of it."""

    held: HeldVersion
    record: VersionRecord | None
