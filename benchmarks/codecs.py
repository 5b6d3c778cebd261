"""``python -m benchmarks.codecs``: time of the derived codecs beside code that copies by hand.

Microseconds for a value each way, the least of several rounds of each, by turns; a ratio below 1
is faster than by hand.
"""

from __future__ import annotations

import dataclasses
import struct
import timeit
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import (
    DrainNote,
    EngineReport,
    OutOfService,
    ReplicaReport,
    ReplicaWork,
    Sleep,
)
from weft_rl.contract.tensors import DataType
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import VersionDifference
from weft_rl.coordinator.decisions.state.transfer import TransferIds
from weft_rl.coordinator.decisions.state.values import ContentDigest
from weft_rl.coordinator.messages import wire
from weft_rl.coordinator.services.calls import CODECS
from weft_rl.ipc.bytes_codec import bytes_codec
from weft_rl.rpc.codec import CAPABILITIES, REPORT, vector_from_proto, vector_to_proto
from weft_rl.transport.one_sided.messages import Ready
from weft_rl.v1 import inspect_pb2, publish_pb2, registry_pb2, replica_pb2, types_pb2

_ROUNDS, _CALLS = 9, 5_000


def _version_to(version: PolicyVersion) -> types_pb2.PolicyVersion:
    return types_pb2.PolicyVersion(policy=version.policy, version=version.version)


def _version_from(message: types_pb2.PolicyVersion) -> PolicyVersion:
    return PolicyVersion(message.policy, message.version)


def _duration_to(seconds: float) -> Duration:
    message = Duration()
    message.FromTimedelta(timedelta(seconds=min(max(0.0, seconds), 315_360_000)))
    return message


def _duration_from(message: Duration) -> float:
    return message.seconds + message.nanos * 1e-9


def _report_to(report: ReplicaReport) -> registry_pb2.ReplicaReport:
    asleep, drain, work = report.sleep, report.drain, report.work
    return registry_pb2.ReplicaReport(
        version_vector=vector_to_proto(report.version_vector),
        retained_base_versions=report.retained_base_versions,
        spilled_versions=map(_version_to, sorted(report.spilled_versions)),
        dirty_reason=report.dirty_reason,
        base_as_started=report.base_as_started,
        refusing=report.refusing,
        order_number=report.order_number,
        sleep=registry_pb2.Sleep(
            trainer_id=asleep.trainer_id, weights_awake=asleep.weights_awake, level=asleep.level
        )
        if asleep
        else None,
        drain=_drain_to(drain),
        adapter_used_bytes=report.adapter_used_bytes,
        pinned_base_versions=sorted(report.pinned_base_versions),
        pinned_base_bytes=report.pinned_base_bytes,
        work=registry_pb2.Work(what=work.what, silence=_duration_to(work.silence_seconds))
        if work
        else None,
        engine=registry_pb2.EngineReport(draft_version=report.engine.draft_version)
        if report.engine
        else None,
    )


def _report_from(message: registry_pb2.ReplicaReport) -> ReplicaReport:
    asleep, drain, work = message.sleep, message.drain, message.work
    return ReplicaReport(
        version_vector=vector_from_proto(message.version_vector),
        retained_base_versions=tuple(message.retained_base_versions),
        spilled_versions=frozenset(map(_version_from, message.spilled_versions)),
        dirty_reason=message.dirty_reason,
        base_as_started=message.base_as_started,
        refusing=message.refusing,
        order_number=message.order_number,
        sleep=Sleep(asleep.trainer_id, asleep.weights_awake, asleep.level or 1)
        if message.HasField("sleep")
        else None,
        drain=DrainNote(_duration_from(drain.time_left), drain.reason)
        if message.HasField("drain")
        else None,
        adapter_used_bytes=message.adapter_used_bytes,
        pinned_base_versions=frozenset(message.pinned_base_versions),
        pinned_base_bytes=message.pinned_base_bytes,
        work=ReplicaWork(work.what, _duration_from(work.silence))
        if message.HasField("work")
        else None,
        engine=EngineReport(message.engine.draft_version) if message.HasField("engine") else None,
    )


_NAMES = tuple(Capabilities.__dataclass_fields__)
_TUPLES = tuple(name for name in _NAMES if isinstance(getattr(Capabilities, name, None), tuple))
_DTYPES = ("base_dtype", "adapter_dtype")


def _written_out() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return what was written by hand for capabilities, whose thirty fields all have one form."""
    there = ", ".join(
        f"{name}=number(int(value.{name}))" if name in _DTYPES else f"{name}=value.{name}"
        for name in _NAMES
    )
    back = ", ".join(
        f"{name}=kind(message.{name})"
        if name in _DTYPES
        else f"{name}=tuple(message.{name})"
        if name in _TUPLES
        else f"{name}=message.{name}"
        for name in _NAMES
    )
    known: dict[str, Any] = {
        "Value": Capabilities,
        "Message": registry_pb2.Capabilities,
        "number": types_pb2.DataType.ValueType,
        "kind": DataType,
    }
    source = f"def to(value): return Message({there})\ndef back(message): return Value({back})\n"
    exec(source, known)
    return known["to"], known["back"]


def _digest_to(digest: ContentDigest) -> types_pb2.ContentDigest:
    return types_pb2.ContentDigest(
        algorithm=types_pb2.DigestAlgorithm.ValueType(digest.algorithm),
        value=digest.value,
        size_bytes=digest.size_bytes,
    )


def _adapter_to(spec: AdapterSpec) -> types_pb2.AdapterSpec:
    return types_pb2.AdapterSpec(
        config_json=spec.config_json,
        base_fingerprint=spec.base_fingerprint,
        trained_on_base_version=spec.trained_on_base_version,
    )


def _commit_to(
    call: effects.CallCommit, *, coordinator_generation: int, pool_id: str
) -> replica_pb2.CommitTransferRequest:
    return replica_pb2.CommitTransferRequest(
        coordinator_generation=coordinator_generation,
        pool_id=pool_id,
        transfer_id=call.transfer_id,
        version=_version_to(call.version),
        adapter=_adapter_to(call.adapter) if call.adapter else None,
        content_digest=_digest_to(call.content_digest),
        alias=call.alias,
        layout_digest=call.layout_digest,
        incarnation=call.incarnation,
    )


def _switch_to(
    call: effects.CallSwitch, *, coordinator_generation: int, pool_id: str
) -> replica_pb2.SwitchVersionRequest:
    return replica_pb2.SwitchVersionRequest(
        coordinator_generation=coordinator_generation,
        pool_id=pool_id,
        version=_version_to(call.version),
        incarnation=call.incarnation,
    )


def _load_to(
    call: effects.CallLoad, *, coordinator_generation: int, pool_id: str
) -> replica_pb2.LoadTransferRequest:
    return replica_pb2.LoadTransferRequest(
        coordinator_generation=coordinator_generation,
        pool_id=pool_id,
        transfer_id=call.transfer_id,
        version=_version_to(call.version),
        timeout=_duration_to(call.timeout_seconds),
    )


def _drain_to(drain: DrainNote | None) -> registry_pb2.Drain | None:
    if drain is None:
        return None
    return registry_pb2.Drain(time_left=_duration_to(drain.time_left_seconds), reason=drain.reason)


def _order_to(order: OutOfService | None) -> registry_pb2.OutOfService | None:
    if order is None:
        return None
    return registry_pb2.OutOfService(reason=order.reason, no_pushes=order.no_pushes)


def _beat_to(answer: effects.HeartbeatAnswer) -> registry_pb2.HeartbeatResponse:
    return registry_pb2.HeartbeatResponse(
        ready=answer.ready,
        drain=_drain_to(answer.drain),
        in_transfer=answer.in_transfer,
        pinned_base_versions=answer.pinned_base_versions,
        held_versions_wanted=answer.held_versions_wanted,
        coordinator_generation=answer.coordinator_generation,
        order_number=answer.order_number,
        lacking=map(_version_to, answer.lacking[:4096]),
        lacking_more=len(answer.lacking) > 4096,
        base_doubt=answer.base_doubt,
        out_of_service=_order_to(answer.out_of_service),
        epoch=answer.epoch,
        pool_id=answer.pool_id,
        absent_policies=[
            registry_pb2.AbsentPolicy(
                policy=one.policy, last_version=one.last_version, reason=one.reason
            )
            for one in answer.absent_policies
        ],
    )


def _difference_to(one: VersionDifference) -> inspect_pb2.VersionDifference:
    return inspect_pb2.VersionDifference(
        policy=one.policy,
        version=one.version,
        pool_version=one.pool_version,
        num_behind=one.num_behind,
        num_behind_is_minimum=one.num_behind_is_minimum,
    )


_READY = struct.Struct("<QQQQH")


def _ready_to(ready: Ready) -> bytes:
    *fields, _ = dataclasses.astuple(ready)
    return _READY.pack(*fields, len(ready.tail)) + ready.tail


def _ready_from(content: bytes) -> Ready:
    sequence, export_id, first_byte, num_bytes, tail_bytes = _READY.unpack_from(content)
    tail = content[_READY.size :]
    if len(tail) != tail_bytes:
        raise ValueError(f"a tail of {len(tail):,} bytes")
    return Ready(sequence, export_id, first_byte, num_bytes, tail)


_IDS = TransferIds("t1", 7, "g1", "secret", "more")
_GIVEN: dict[str, Any] = {
    "ticket": 1,
    "layout": None,
    "min_replicas": 1,
    "deadline": 9.0,
    "answer_by": 8.0,
    "ids": _IDS,
    "recorded": None,
}


def _begin_from(request: publish_pb2.BeginTransferRequest) -> events.BeginTransfer:
    told = request.adapter
    adapter = None
    if request.HasField("adapter"):
        adapter = AdapterSpec(
            told.config_json,
            told.base_fingerprint,
            told.trained_on_base_version if told.HasField("trained_on_base_version") else None,
        )
    return events.BeginTransfer(
        request_id=request.request_id,
        policy=request.policy,
        fencing_token=request.fencing_token,
        layout_digest=request.layout_digest,
        adapter=adapter,
        backend=request.backend,
        backend_reason=request.backend_reason,
        trial_names=frozenset(request.trial_names),
        group_id=request.group_id,
        session_id=request.session_id,
        check_finite=request.check_finite,
        refuse_other_base=request.refuse_other_base,
        carries_runs=request.carries_runs,
        send_plan=None,
        **_GIVEN,
    )


def _cases() -> list[tuple[str, Callable[[Any], Any], Callable[[Any], Any], Any]]:
    vector = VersionVector(3, {f"p{i}": AdapterVersions((1, 2), 2) for i in range(4)})
    report = ReplicaReport(
        version_vector=vector, retained_base_versions=(3, 2), order_number=7,
        work=ReplicaWork("loading base@4", 0.25), pinned_base_versions=frozenset({2}),
        spilled_versions=frozenset(PolicyVersion("math", i) for i in range(8)),
    )  # fmt: skip
    able = Capabilities(
        engine_version="0.26", base_fingerprint="f" * 64, architecture="Tiny",
        base_dtype=DataType.BFLOAT16, adapter_dtype=DataType.FLOAT16, backends=("nccl", "gloo"),
        lora_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
    )  # fmt: skip
    version, digest = PolicyVersion("math", 3), ContentDigest(2, b"12345678", 1 << 30)
    adapter = AdapterSpec('{"peft_type": "LORA"}', "f" * 64, 3)
    commit = effects.CallCommit("t1", "r0", "i1", "h:1", version, adapter, digest, 0, b"d" * 32)
    switch = effects.CallSwitch("t1", "r0", "i1", "h:1", version)
    load = effects.CallLoad("t1", "r0", "h:1", version, 60.0)
    beat = effects.HeartbeatAnswer(True, coordinator_generation=3, epoch=7, pool_id="pool")
    behind = VersionDifference("math", 2, 3, 1)
    begin = publish_pb2.BeginTransferRequest(
        request_id="q1", policy="math", fencing_token=3, layout_digest=b"d" * 32,
        adapter=_adapter_to(adapter), backend="gloo", session_id="s1", protocol_revision=1,
    )  # fmt: skip
    to, back = _written_out()
    ready = Ready(1, 2, 3, 4, b"t" * 256)

    def told(encode: Callable[..., Any]) -> Callable[[Any], Any]:
        return partial(encode, coordinator_generation=3, pool_id="pool")

    return [
        ("ReplicaReport, encoded", _report_to, REPORT.encode, report),
        ("ReplicaReport, decoded", _report_from, REPORT.decode, REPORT.encode(report)),
        ("HeartbeatResponse, encoded", _beat_to, CODECS["Heartbeat"].encode, beat),
        ("Capabilities, encoded", to, CAPABILITIES.encode, able),
        ("Capabilities, decoded", back, CAPABILITIES.decode, CAPABILITIES.encode(able)),
        (
            "BeginTransferRequest, decoded",
            _begin_from,
            partial(CODECS["BeginTransfer"].request.decode, **_GIVEN),
            begin,
        ),
        (
            "LoadTransferRequest, encoded",
            told(_load_to),
            told(wire.ORDERS[effects.CallLoad].encode),
            load,
        ),
        (
            "CommitTransferRequest, encoded",
            told(_commit_to),
            told(wire.ORDERS[effects.CallCommit].encode),
            commit,
        ),
        (
            "SwitchVersionRequest, encoded",
            told(_switch_to),
            told(wire.ORDERS[effects.CallSwitch].encode),
            switch,
        ),
        ("VersionDifference, encoded", _difference_to, wire.DIFFERENCE.encode, behind),
        ("one-sided Ready, encoded", _ready_to, bytes_codec(Ready).pack, ready),
        ("one-sided Ready, decoded", _ready_from, bytes_codec(Ready).unpack, _ready_to(ready)),
    ]


def main() -> None:
    """Print the table."""
    table = Table("message", "by hand, us", "derived, us", "ratio")
    for name, by_hand, derived, given in _cases():
        assert by_hand(given) == derived(given), name
        least = [float("inf")] * 2
        for _ in range(_ROUNDS):
            for i, function in enumerate((by_hand, derived)):
                seconds = timeit.timeit(partial(function, given), number=_CALLS)
                least[i] = min(least[i], seconds / _CALLS * 1e6)
        table.add_row(name, *(f"{one:.2f}" for one in least), f"{least[1] / least[0]:.2f}")
    console = Console()
    console.print(describe())
    console.print(table)


if __name__ == "__main__":
    main()
