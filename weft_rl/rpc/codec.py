"""Codec between protos and contract values, and from protos to JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import MAX_FILES, Checkpoint, CheckpointState, StoredTensor
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.group import GroupTicket, LinkUsage
from weft_rl.contract.manifest import Manifest, SendPlan, WireBucket, make_send_plan
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import (
    DrainNote,
    HeldVersion,
    OutOfService,
    ReplicaReport,
    Sleep,
)
from weft_rl.contract.sampling import Sampling
from weft_rl.contract.tensors import DataType
from weft_rl.rpc.bounds import LAST_SECOND, MAX_DURATION_SECONDS
from weft_rl.schema import codec, converter, listing
from weft_rl.v1 import generate_pb2, publish_pb2, registry_pb2, types_pb2

#: Entries of a list in one message: at most 2.2 MiB with the longest names.
CHUNK_ENTRIES: Final = 4096


def chunk_ranges(count: int, most: int = CHUNK_ENTRIES) -> Iterator[slice]:
    """Return slices of at most ``most`` that cover ``count`` entries."""
    return (slice(i, i + most) for i in range(0, count, most))


def dtype_from_proto(number: int) -> DataType:
    """Return the element type with this number.

    Raises:
        InvalidRequestError: Unset or unknown.
    """
    try:
        return DataType(number)
    except ValueError:
        raise InvalidRequestError(f"{number} is not a data type") from None


def dtype_to_proto(dtype: DataType) -> types_pb2.DataType.ValueType:
    """Return the enum value of ``dtype``."""
    return types_pb2.DataType.ValueType(int(dtype))


def vector_to_proto(vector: VersionVector, most: int | None = None) -> types_pb2.VersionVector:
    """Encode the versions that are served, adapters by name.

    Args:
        most: Number of adapters to encode; the others are only counted. None encodes all.
    """
    return types_pb2.VersionVector(
        base=vector.base,
        adapters=[
            types_pb2.AdapterVersions(policy=policy, versions=entry.versions, alias=entry.alias)
            for policy, entry in sorted(vector.adapters.items())[:most]
        ],
        num_more_adapters=max(0, len(vector.adapters) - most) if most is not None else 0,
        revision=vector.revision,
    )


def vector_from_proto(message: types_pb2.VersionVector) -> VersionVector:
    """Decode the versions that are served."""
    return VersionVector(
        base=message.base,
        adapters={
            entry.policy: AdapterVersions(tuple(sorted(entry.versions)), entry.alias)
            for entry in message.adapters
        },
        revision=message.revision,
    )


def content_to_proto(manifest: Manifest, digest: bytes) -> types_pb2.ContentDigest:
    """Encode the content digest of a version with this manifest."""
    return types_pb2.ContentDigest(
        algorithm=types_pb2.DigestAlgorithm.ValueType(int(manifest.digest_algorithm)),
        value=digest,
        size_bytes=manifest.total_bytes,
    )


def duration_to_proto(seconds: float) -> Duration:
    """Encode seconds, given as any float, to the microsecond.

    Negative seconds become 0; more than ``weft_rl.rpc.bounds`` takes becomes its maximum.
    """
    bounded = min(max(0.0, seconds), MAX_DURATION_SECONDS)  # of NaN: 0
    whole, micros = divmod(round(bounded * 1e6), 1_000_000)
    return Duration(seconds=whole, nanos=micros * 1000)


def duration_from_proto(message: Duration) -> float:
    """Return a duration in seconds."""
    return message.seconds + message.nanos * 1e-9


def timestamp_to_proto(unix_seconds: float) -> Timestamp:
    """Encode seconds since 1970, given as any float.

    A time outside the years that a ``Timestamp`` has becomes the nearest one inside.
    """
    bounded = min(max(0.0, unix_seconds), LAST_SECOND)
    whole = int(bounded // 1)
    return Timestamp(seconds=whole, nanos=int((bounded - whole) * 1e9))


def timestamp_from_proto(message: Timestamp) -> float:
    """Return a time in seconds since 1970."""
    return message.seconds + message.nanos / 1e9


# -- values whose fields are those of their messages ------------------------------

converter(float, Duration, duration_to_proto, duration_from_proto, suffix="_seconds")
converter(float, Timestamp, timestamp_to_proto, timestamp_from_proto)
POLICY_VERSION: Final = codec(PolicyVersion, types_pb2.PolicyVersion)
converter(VersionVector, types_pb2.VersionVector, vector_to_proto, vector_from_proto)
CAPABILITIES: Final = codec(Capabilities, registry_pb2.Capabilities)
SLEEP: Final = codec(Sleep, registry_pb2.Sleep)
LINK_USAGE: Final = codec(LinkUsage, publish_pb2.LinkUsage)
DRAIN: Final = codec(DrainNote, registry_pb2.Drain)
OUT_OF_SERVICE: Final = codec(OutOfService, registry_pb2.OutOfService)
HELD: Final = codec(HeldVersion, types_pb2.HeldVersion)
REPORT: Final = codec(ReplicaReport, registry_pb2.ReplicaReport)
#: Report whose version vector is told beside it.
REPORT_BESIDE_VECTOR: Final = codec(
    ReplicaReport,
    registry_pb2.ReplicaReport,
    given=["version_vector"],
    told=["version_vector"],
)
CHECKPOINT: Final = codec(Checkpoint, registry_pb2.Checkpoint)
TENSOR: Final = codec(StoredTensor, types_pb2.TensorDigest)
#: Place in a side group; the member says by which address it reaches the coordinator, by which it
#: is reached, and where it runs.
TICKET: Final = codec(
    GroupTicket,
    publish_pb2.GroupPlan,
    given=["coordinator", "host", "site"],
    told=["further_tokens"],
)


_send_plan: Final = listing(SendPlan, types_pb2.SendPlan, told=["buckets"])


def send_plan_to_proto(plan: SendPlan) -> types_pb2.SendPlan:
    """Encode a send plan as lists."""
    return _send_plan(
        plan,
        senders=[wire.sender for wire in plan.buckets],
        buckets=[wire.bucket for wire in plan.buckets],
        payload_bytes=[wire.payload_bytes for wire in plan.buckets],
        num_runs=[wire.num_runs for wire in plan.buckets],
    )


def send_plan_from_proto(message: types_pb2.SendPlan) -> SendPlan:
    """Decode a send plan.

    Raises:
        InvalidRequestError: It is no plan of any layout.
    """
    lists = (message.senders, message.buckets, message.payload_bytes, message.num_runs)
    if len({len(entries) for entries in lists}) != 1:
        raise InvalidRequestError("the lists of a send plan are of different lengths")
    return make_send_plan(
        message.num_senders, map(WireBucket, *lists), message.delta_from, message.num_whole
    )


def as_dict(message: Message) -> dict[str, Any]:
    """Convert a message by the names of its proto; what is empty, zero or false is left out."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found


def when_running_to_proto(aborts: bool) -> registry_pb2.WhenRunning.ValueType:
    """Encode what becomes of running requests: they are aborted, or finish."""
    return registry_pb2.WHEN_RUNNING_ABORT if aborts else registry_pb2.WHEN_RUNNING_FINISH


def aborts_from_proto(value: registry_pb2.WhenRunning.ValueType) -> bool:
    """Return whether running requests are aborted, rather than finished.

    Raises:
        InvalidRequestError: The value is unset or unknown.
    """
    if value not in (registry_pb2.WHEN_RUNNING_ABORT, registry_pb2.WHEN_RUNNING_FINISH):
        raise InvalidRequestError("when_running must say what becomes of running requests")
    return value == registry_pb2.WHEN_RUNNING_ABORT


# -- sampling ---------------------------------------------------------------------

SAMPLING: Final = codec(
    Sampling,
    generate_pb2.Sampling,
    given=["stop", "stop_token_ids"],
    told=["num_samples", "stop", "stop_token_ids"],
)

# -- checkpoints ------------------------------------------------------------------

_SHA256_BYTES: Final = 32


def checkpoint_from_proto(message: registry_pb2.Checkpoint) -> Checkpoint:
    """Decode the checkpoint that a replica was started with, from ReportCheckpoint.

    Raises:
        InvalidRequestError: A digest is not SHA-256, there are too many files, or no state.
    """
    told = CHECKPOINT.decode(message)
    if told.state is not CheckpointState.DIGESTED:
        return Checkpoint(told.state, reason=told.reason)
    if len(told.files) > MAX_FILES:
        raise InvalidRequestError(
            f"{len(told.files)} files of a checkpoint; at most {MAX_FILES} are told"
        )
    if any(len(each) != _SHA256_BYTES for each in (told.digest, *(f.digest for f in told.files))):
        raise InvalidRequestError("the digest of a checkpoint, or of a file of it, is not SHA-256")
    return Checkpoint(told.state, told.digest, told.files)


converter(Checkpoint, registry_pb2.Checkpoint, CHECKPOINT.encode, checkpoint_from_proto)
