"""Codec between protos and contract values, and from protos to JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import (
    MAX_FILES,
    Checkpoint,
    CheckpointState,
    FileDigest,
    StoredTensor,
)
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.manifest import Manifest, SendPlan, WireBucket, make_send_plan
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import DrainNote, ReplicaReport, ReplicaWork, Sleep
from weft_rl.contract.tensors import DataType
from weft_rl.rpc.bounds import LAST_SECOND, MAX_DURATION_SECONDS
from weft_rl.v1 import publish_pb2, registry_pb2, types_pb2

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


def capabilities_to_proto(value: Capabilities) -> registry_pb2.Capabilities:
    """Encode what a replica can do, for Register."""
    return registry_pb2.Capabilities(
        engine_version=value.engine_version,
        base_fingerprint=value.base_fingerprint,
        architecture=value.architecture,
        base_dtype=dtype_to_proto(value.base_dtype),
        adapter_dtype=dtype_to_proto(value.adapter_dtype),
        backends=value.backends,
        num_receivers=value.num_receivers,
        tensor_parallel_size=value.tensor_parallel_size,
        lora_enabled=value.lora_enabled,
        max_lora_rank=value.max_lora_rank,
        lora_modules=value.lora_modules,
        lora_on_experts=value.lora_on_experts,
        staging_capacity_bytes=value.staging_capacity_bytes,
        adapter_capacity_bytes=value.adapter_capacity_bytes,
        loads_in_place=value.loads_in_place,
        served_names=value.served_names,
        quantization=value.quantization,
        logprobs_mode=value.logprobs_mode,
        logprobs_truncated=value.logprobs_truncated,
        running_requests=value.running_requests,
        trial_name=value.trial_name,
        gpu_uuids=value.gpu_uuids,
        can_sleep=value.can_sleep,
        base_refusal=value.base_refusal,
        lora_unapplied=value.lora_unapplied,
        draft_method=value.draft_method,
        draft_fingerprint=value.draft_fingerprint,
        reference_digest=value.reference_digest,
    )


def capabilities_from_proto(message: registry_pb2.Capabilities) -> Capabilities:
    """Decode what a replica can do, from Register.

    Raises:
        InvalidRequestError: An element type is unset, or there are no receivers.
    """
    if not message.num_receivers:
        raise InvalidRequestError("num_receivers is 0; a replica adds at least 1 member")
    return Capabilities(
        engine_version=message.engine_version,
        base_fingerprint=message.base_fingerprint,
        architecture=message.architecture,
        base_dtype=dtype_from_proto(message.base_dtype),
        adapter_dtype=dtype_from_proto(message.adapter_dtype),
        backends=tuple(message.backends),
        num_receivers=message.num_receivers,
        tensor_parallel_size=message.tensor_parallel_size,
        lora_enabled=message.lora_enabled,
        max_lora_rank=message.max_lora_rank,
        lora_modules=tuple(message.lora_modules),
        lora_on_experts=message.lora_on_experts,
        staging_capacity_bytes=message.staging_capacity_bytes,
        adapter_capacity_bytes=message.adapter_capacity_bytes,
        loads_in_place=message.loads_in_place,
        served_names=tuple(message.served_names),
        quantization=message.quantization,
        logprobs_mode=message.logprobs_mode,
        logprobs_truncated=message.logprobs_truncated,
        running_requests=message.running_requests or "recompute",
        trial_name=message.trial_name,
        gpu_uuids=tuple(message.gpu_uuids),
        can_sleep=message.can_sleep,
        base_refusal=message.base_refusal,
        lora_unapplied=tuple(message.lora_unapplied),
        draft_method=message.draft_method,
        draft_fingerprint=message.draft_fingerprint,
        reference_digest=message.reference_digest,
    )


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
    )


def vector_from_proto(message: types_pb2.VersionVector) -> VersionVector:
    """Decode the versions that are served."""
    return VersionVector(
        base=message.base,
        adapters={
            entry.policy: AdapterVersions(tuple(sorted(entry.versions)), entry.alias)
            for entry in message.adapters
        },
    )


def version_to_proto(version: PolicyVersion) -> types_pb2.PolicyVersion:
    """Encode ``math@17`` as a message."""
    return types_pb2.PolicyVersion(policy=version.policy, version=version.version)


def version_from_proto(message: types_pb2.PolicyVersion) -> PolicyVersion:
    """Decode ``math@17`` from a message; the name is not checked."""
    return PolicyVersion(message.policy, message.version)


def versions_from_proto(messages: Iterable[types_pb2.PolicyVersion]) -> list[PolicyVersion]:
    """Decode several versions; their names are not checked."""
    return [version_from_proto(message) for message in messages]


def content_to_proto(manifest: Manifest, digest: bytes) -> types_pb2.ContentDigest:
    """Encode the content digest of a version with this manifest."""
    return types_pb2.ContentDigest(
        algorithm=types_pb2.DigestAlgorithm.ValueType(int(manifest.digest_algorithm)),
        value=digest,
        size_bytes=manifest.total_bytes,
    )


def duration_to_proto(seconds: float) -> Duration:
    """Encode seconds, given as any float.

    Negative seconds become 0; more than ``weft_rl.rpc.bounds`` takes becomes its maximum.
    """
    message = Duration()
    bounded = min(max(0.0, seconds), MAX_DURATION_SECONDS)  # of NaN: 0
    message.FromTimedelta(timedelta(seconds=bounded))
    return message


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


def ticket_from_proto(
    message: publish_pb2.GroupPlan, *, coordinator: str, host: str
) -> GroupTicket:
    """Decode a member's place in a side group; the arguments are as in ``GroupTicket``."""
    return GroupTicket(
        coordinator=coordinator,
        host=host,
        group_id=message.group_id,
        token=message.token,
        epoch=message.epoch,
        rank=message.rank,
        size=message.size,
        backend=message.backend,
        num_senders=message.num_senders or 1,
    )


def send_plan_to_proto(plan: SendPlan) -> types_pb2.SendPlan:
    """Encode a send plan as lists."""
    return types_pb2.SendPlan(
        num_senders=plan.num_senders,
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
    return make_send_plan(message.num_senders, map(WireBucket, *lists))


def as_dict(message: Message) -> dict[str, Any]:
    """Convert a message by the names of its proto; what is empty, zero or false is left out."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found


def level_from_proto(value: int) -> int:
    """Return vLLM's level at which a replica is to sleep.

    Raises:
        InvalidRequestError: There is no such level.
    """
    if value not in (0, 1, 2):
        raise InvalidRequestError(f"level is {value}, and must be 1 or 2")
    return value or 1


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


# -- reports of replicas ---------------------------------------------------------

#: Spilled versions that are taken note of.
MAX_SPILLED: Final = 4096
_LONGEST_SILENCE_SECONDS: Final = 86_400.0


def report_to_proto(
    report: ReplicaReport, *, has_vector: bool = True
) -> registry_pb2.ReplicaReport:
    """Encode a replica's report; without its version vector where that is told beside it."""
    return registry_pb2.ReplicaReport(
        version_vector=vector_to_proto(report.vector) if has_vector else None,
        retained_base_versions=report.retained,
        spilled_versions=map(version_to_proto, sorted(report.spilled)),
        dirty_reason=report.dirty_reason,
        base_as_started=report.base_as_started,
        refusing=report.refusing,
        order_number=report.order_number,
        sleep=sleep_to_proto(report.asleep),
        drain=drain_to_proto(report.drain),
        adapter_used_bytes=report.adapter_used_bytes,
        pinned_base_versions=sorted(report.pins_obeyed),
        pinned_base_bytes=report.pinned_bytes,
        work=_work_to_proto(report.work),
        draft_version=report.draft_version,
    )


def report_from_proto(message: registry_pb2.ReplicaReport) -> ReplicaReport:
    """Decode a replica's report; keeps ``MAX_SPILLED`` of its spilled versions."""
    return ReplicaReport(
        vector=vector_from_proto(message.version_vector),
        retained=tuple(message.retained_base_versions),
        spilled=frozenset(versions_from_proto(message.spilled_versions[:MAX_SPILLED])),
        dirty_reason=message.dirty_reason,
        base_as_started=message.base_as_started,
        refusing=message.refusing,
        order_number=message.order_number,
        asleep=sleep_from_proto(message.sleep) if message.HasField("sleep") else None,
        drain=drain_from_proto(message.drain) if message.HasField("drain") else None,
        adapter_used_bytes=message.adapter_used_bytes,
        pins_obeyed=frozenset(message.pinned_base_versions),
        pinned_bytes=message.pinned_base_bytes,
        work=_work_from_proto(message.work) if message.HasField("work") else None,
        draft_version=message.draft_version,
    )


def sleep_to_proto(asleep: Sleep | None) -> registry_pb2.Sleep | None:
    """Encode a sleep; None for an engine that is awake."""
    if asleep is None:
        return None
    return registry_pb2.Sleep(
        trainer_id=asleep.trainer_id, weights_awake=asleep.weights_awake, level=asleep.level
    )


def sleep_from_proto(message: registry_pb2.Sleep) -> Sleep:
    """Decode a sleep."""
    return Sleep(message.trainer_id, message.weights_awake, message.level or 1)


def drain_to_proto(drain: DrainNote | None) -> registry_pb2.Drain | None:
    """Encode a drain; None while there is none."""
    if drain is None:
        return None
    return registry_pb2.Drain(time_left=duration_to_proto(drain.seconds), reason=drain.reason)


def drain_from_proto(message: registry_pb2.Drain) -> DrainNote:
    """Decode a drain."""
    return DrainNote(duration_from_proto(message.time_left), message.reason)


def _work_to_proto(work: ReplicaWork | None) -> registry_pb2.Work | None:
    if work is None:
        return None
    silence = duration_to_proto(min(max(0.0, work.silence), _LONGEST_SILENCE_SECONDS))
    return registry_pb2.Work(what=work.what, silence=silence)


def _work_from_proto(message: registry_pb2.Work) -> ReplicaWork:
    return ReplicaWork(message.what, duration_from_proto(message.silence))


# -- checkpoints, and the digests of tensors -------------------------------------

_SHA256_BYTES: Final = 32
_MAX_NAME_CHARS: Final = 255
_MAX_REASON_CHARS: Final = 500


def checkpoint_to_proto(value: Checkpoint) -> registry_pb2.Checkpoint:
    """Encode the checkpoint that a replica was started with, for ReportCheckpoint."""
    return registry_pb2.Checkpoint(
        state=registry_pb2.CheckpointState.ValueType(int(value.state)),
        digest=value.digest,
        files=files_to_proto(value.files),
        reason=value.reason,
    )


def files_to_proto(files: Iterable[FileDigest]) -> list[registry_pb2.CheckpointFile]:
    """Encode the files of a checkpoint."""
    return [registry_pb2.CheckpointFile(name=file.name, digest=file.digest) for file in files]


def checkpoint_from_proto(message: registry_pb2.Checkpoint) -> Checkpoint:
    """Decode the checkpoint that a replica was started with, from ReportCheckpoint.

    Raises:
        InvalidRequestError: A digest is not SHA-256, there are too many files, or no state.
    """
    try:
        state = CheckpointState(message.state)
    except ValueError:
        raise InvalidRequestError(f"{message.state} is not the state of a checkpoint") from None
    if len(message.files) > MAX_FILES:
        raise InvalidRequestError(
            f"{len(message.files)} files of a checkpoint; at most {MAX_FILES} are told"
        )
    digested = state is CheckpointState.DIGESTED
    digests = [message.digest, *(file.digest for file in message.files)] if digested else []
    if any(len(digest) != _SHA256_BYTES for digest in digests):
        raise InvalidRequestError("the digest of a checkpoint, or of a file of it, is not SHA-256")
    if not digested:
        return Checkpoint(state, reason=message.reason[:_MAX_REASON_CHARS])
    files = tuple(FileDigest(file.name[:_MAX_NAME_CHARS], file.digest) for file in message.files)
    return Checkpoint(state, message.digest, files)


def tensors_to_proto(tensors: Iterable[StoredTensor]) -> list[types_pb2.TensorDigest]:
    """Encode tensors and their digests."""
    return [
        types_pb2.TensorDigest(name=t.name, dtype=t.dtype, dims=t.shape, digest=t.digest)
        for t in tensors
    ]


def tensors_from_proto(messages: Iterable[types_pb2.TensorDigest]) -> list[StoredTensor]:
    """Decode tensors and their digests."""
    return [StoredTensor(m.name, m.dtype, tuple(m.dims), m.digest) for m in messages]
