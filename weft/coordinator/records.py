"""A version's record: made of its transfer, and as a row of the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.contract.names import PolicyVersion
from weft.coordinator.transfer import Transfer
from weft.coordinator.values import (
    AdapterSpec,
    ContentDigest,
    Failure,
    VersionRecord,
    VersionState,
)


def record_of(transfer: Transfer, state: VersionState, commit_time: float = 0.0) -> VersionRecord:
    """The record of the version that ``transfer`` brings; times since 1970."""
    return VersionRecord(
        version=transfer.policy_version,
        state=state,
        trainer_id=transfer.trainer_id,
        request_id=transfer.request_id,
        transfer_id=transfer.transfer_id,
        layout_digest=transfer.layout.digest,
        create_time=transfer.create_time,
        commit_time=commit_time,
        content_digest=transfer.content_digest,
        adapter=transfer.adapter,
        failure=transfer.failure,
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
