"""What the catalog holds of a version, and of base@0, as values of its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weft.contract.checkpoint import FileDigest
from weft.contract.names import PolicyVersion
from weft.contract.tensors import DataType
from weft.coordinator.decisions.state.values import (
    AdapterSpec,
    BoundCheckpoint,
    ContentDigest,
    Failure,
    VersionRecord,
    VersionState,
)


def version_to_row(record: VersionRecord) -> tuple[Any, ...]:
    """A version's record as the values of its row, in the order of the columns."""
    digest, adapter, failure = record.content_digest, record.adapter, record.failure
    return (
        record.version.policy,
        record.version.version,
        int(record.state),
        record.trainer_id,
        record.request_id,
        record.transfer_id,
        record.layout_digest,
        record.create_time,
        record.commit_time,
        *((digest.algorithm, digest.value, digest.size_bytes) if digest else (None,) * 3),
        *(
            (
                adapter.config_json,
                adapter.config_digest,
                adapter.base_fingerprint,
                adapter.trained_on_base_version,
            )
            if adapter
            else (None,) * 4
        ),
        *((failure.reason, failure.message) if failure else (None,) * 2),
    )


def version_from_row(row: Sequence[Any]) -> VersionRecord:
    """The record that a row's values are of; what follows them is not looked at."""
    return VersionRecord(
        version=PolicyVersion(row[0], row[1]),
        state=VersionState(row[2]),
        trainer_id=row[3],
        request_id=row[4],
        transfer_id=row[5],
        layout_digest=row[6],
        create_time=row[7],
        commit_time=row[8],
        content_digest=ContentDigest(*row[9:12]) if row[9] is not None else None,
        adapter=AdapterSpec(*row[12:16]) if row[12] is not None else None,
        failure=Failure(row[16], row[17]) if row[16] is not None else None,
    )


def checkpoint_to_text(bound: BoundCheckpoint) -> str:
    """What base@0 is, as the catalog holds it: JSON."""
    return json.dumps(
        {
            "digest": bound.digest.hex(),
            "base_dtype": int(bound.base_dtype),
            "quantization": bound.quantization,
            "replica_id": bound.replica_id,
            "files": [(file.name, file.digest.hex()) for file in bound.files],
        },
        separators=(",", ":"),
    )


def checkpoint_from_text(text: str) -> BoundCheckpoint | None:
    """What ``checkpoint_to_text`` wrote; None of nothing."""
    if not text:
        return None
    known = json.loads(text)
    return BoundCheckpoint(
        digest=bytes.fromhex(known["digest"]),
        base_dtype=DataType(known["base_dtype"]),
        quantization=known["quantization"],
        replica_id=known["replica_id"],
        files=tuple(FileDigest(name, bytes.fromhex(digest)) for name, digest in known["files"]),
    )
