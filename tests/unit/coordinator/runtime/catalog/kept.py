"""Catalog with a row in every table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.checkpoint import FileDigest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import OutOfService
from weft_rl.contract.tensors import DataType
from weft_rl.coordinator.decisions.state.effects import (
    Announce,
    EventKind,
    SaveAsStarted,
    SaveCheckpoint,
    SaveEpoch,
    SaveEvent,
    SaveNumberFloor,
    SaveOutOfService,
    SavePin,
    SavePolicy,
    SavePool,
    SavePoolId,
    SaveSleep,
    SaveVersion,
)
from weft_rl.coordinator.decisions.state.pool import Lease, Policy, TrainerProcess
from weft_rl.coordinator.decisions.state.replica import StandingSleepOrder
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    ContentDigest,
    Failure,
    PolicyKind,
    VersionRecord,
    VersionState,
)
from weft_rl.coordinator.runtime.catalog.database import Catalog, Snapshot


def _record(policy: str, number: int, state: VersionState) -> VersionRecord:
    config = '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}'
    return VersionRecord(
        version=PolicyVersion(policy, number),
        state=state,
        trainer_id="t1",
        request_id=f"q-{policy}-{number}",
        transfer_id=f"t-{policy}-{number}",
        layout_digest=f"layout-{policy}".encode(),
        create_time=1763700000.25 + number,
        commit_time=1763700001.5 + number,
        content_digest=ContentDigest(1, b"\x00\xff digest", 256 * number),
        adapter=None if policy == "base" else AdapterSpec(config, "f00d", 1),
    )


RECORDS = {
    "base": [
        _record("base", 2, VersionState.COMMITTED),
        _record("base", 1, VersionState.RETIRED),
    ],
    "math": [
        replace(
            _record("math", 4, VersionState.ABORTED),
            commit_time=0.0,
            content_digest=None,
            failure=Failure("DEADLINE", "späť: the push's time was up"),
        ),
        _record("math", 3, VersionState.COMMITTED),
        _record("math", 2, VersionState.COMMITTED),
        _record("math", 1, VersionState.RETIRED),
    ],
}
_LEASE = Lease("t1", "session", 7, 0.0, TrainerProcess("host", "key", 99, 5.5), time_to_live=60.0)
_BASE = Policy("base", PolicyKind.BASE, 2, 4, 2, (2,))
_CODE = Policy("code", PolicyKind.ADAPTER, 1_000_001, 3, forgotten=True)
_MATH = Policy(
    "math", PolicyKind.ADAPTER, 4, 7, 3, (2, 3), _LEASE, (2,), 2, {2: 1, 3: 1}, owner="t1"
)
SNAPSHOT = Snapshot(
    generation=2,
    epoch=9,
    fingerprint="f00d",
    architecture="TinyForCausalLM",
    number_floor=1_000_000,
    policies=(_BASE, _CODE, _MATH),
    out_of_service={"replica-1": OutOfService("new disk")},
    checkpoint=BoundCheckpoint(
        digest=b"\1" * 32,
        base_dtype=DataType.BFLOAT16,
        quantization="fp8",
        replica_id="replica-0",
        files=(FileDigest("späť.safetensors", b"\2" * 32),),
    ),
    base_contents=dict.fromkeys((1, 2), b"layout-base\x00\xff digest"),
    as_started=frozenset({b"\5" * 32}),
    events=(SaveEvent(1e9, Announce(EventKind.REPLICA_LOST, "replica-1", "no heartbeat")),),
    sleeps={
        "replica-1": StandingSleepOrder(
            trainer_id="t1", fencing_token=7, level=1, aborts=True, seconds=30.0
        )
    },
    pool_id="pool",
)


def write_kept(path: Path) -> None:
    """Write the catalog that ``SNAPSHOT`` is read from when it is opened again."""
    known = SNAPSHOT
    assert known.checkpoint
    catalog = Catalog.open(path)
    catalog.apply(
        [
            SavePool(known.fingerprint, known.architecture),
            SavePoolId(known.pool_id),
            SaveCheckpoint(known.checkpoint),
            *(SaveAsStarted(content) for content in known.as_started),
            SaveNumberFloor(known.number_floor),
            SaveEpoch(known.epoch),
            SavePolicy(_BASE),
            SavePolicy(_CODE),
            SavePolicy(_MATH),
            SavePin(PolicyVersion("math", 2), True),
            *(SaveVersion(record) for records in RECORDS.values() for record in records),
            *(SaveOutOfService(name, order) for name, order in known.out_of_service.items()),
            *(SaveSleep(name, order) for name, order in known.sleeps.items()),
            *known.events,
        ]
    )
    catalog.close()
