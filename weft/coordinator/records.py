"""A transfer as the catalog's record of its version."""

from __future__ import annotations

from weft.coordinator.transfer import Transfer
from weft.coordinator.values import VersionRecord, VersionState


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
