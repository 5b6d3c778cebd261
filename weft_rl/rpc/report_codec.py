"""Replica reports as messages of ``weft.v1``, and back."""

from __future__ import annotations

from typing import Final

from weft_rl.contract.replica_report import Asleep, DrainNote, ReplicaReport, Work
from weft_rl.rpc.codec import (
    duration_from_proto,
    duration_to_proto,
    vector_from_proto,
    vector_to_proto,
    version_to_proto,
    versions_from_proto,
)
from weft_rl.v1 import registry_pb2

#: Spilled versions that are taken note of.
MAX_SPILLED: Final = 4096
_LONGEST_SILENCE_SECONDS: Final = 86_400.0


def report_to_proto(report: ReplicaReport) -> registry_pb2.ReplicaReport:
    """Encode a replica's report."""
    return registry_pb2.ReplicaReport(
        version_vector=vector_to_proto(report.vector),
        retained_base_versions=report.retained,
        spilled_versions=map(version_to_proto, report.spilled),
        dirty_reason=report.dirty_reason,
        base_as_started=report.base_as_started,
        refusing=report.refusing,
        order_number=report.order_number,
        sleep=asleep_to_proto(report.asleep),
        drain=drain_to_proto(report.drain),
        adapter_used_bytes=report.adapter_used_bytes,
        pinned_base_versions=sorted(report.pins_obeyed),
        pinned_base_bytes=report.pinned_bytes,
        work=_work_to_proto(report.work),
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
        asleep=asleep_from_proto(message.sleep) if message.HasField("sleep") else None,
        drain=drain_from_proto(message.drain) if message.HasField("drain") else None,
        adapter_used_bytes=message.adapter_used_bytes,
        pins_obeyed=frozenset(message.pinned_base_versions),
        pinned_bytes=message.pinned_base_bytes,
        work=_work_from_proto(message.work) if message.HasField("work") else None,
    )


def asleep_to_proto(asleep: Asleep | None) -> registry_pb2.Sleep | None:
    """Encode a sleep; None for an engine that is awake."""
    if asleep is None:
        return None
    return registry_pb2.Sleep(
        trainer_id=asleep.trainer_id, weights_awake=asleep.weights_awake, level=asleep.level
    )


def asleep_from_proto(message: registry_pb2.Sleep) -> Asleep:
    """Decode a sleep."""
    return Asleep(message.trainer_id, message.weights_awake, message.level or 1)


def drain_to_proto(drain: DrainNote | None) -> registry_pb2.Drain | None:
    """Encode a drain; None while there is none."""
    if drain is None:
        return None
    return registry_pb2.Drain(time_left=duration_to_proto(drain.seconds), reason=drain.reason)


def drain_from_proto(message: registry_pb2.Drain) -> DrainNote:
    """Decode a drain."""
    return DrainNote(duration_from_proto(message.time_left), message.reason)


def _work_to_proto(work: Work | None) -> registry_pb2.Work | None:
    if work is None:
        return None
    silence = duration_to_proto(min(max(0.0, work.silence), _LONGEST_SILENCE_SECONDS))
    return registry_pb2.Work(what=work.what, silence=silence)


def _work_from_proto(message: registry_pb2.Work) -> Work:
    return Work(message.what, duration_from_proto(message.silence))
