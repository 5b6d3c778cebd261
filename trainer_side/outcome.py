"""What became of a push at each replica, for the trainer's report."""

from __future__ import annotations

from weft.v1 import publish_pb2 as pb


def missing_replicas(transfer: pb.Transfer) -> tuple[str, ...]:
    """Who does not serve a push that was committed, and why, a sentence each."""
    if not transfer.replica_ids:
        count = len(transfer.serving_replica_ids)
        return (
            "the coordinator was restarted before it had told how the push ended: it is "
            f"committed, and {count} of the replicas in contact by then served it; the others "
            "catch up",
        )
    before = set(transfer.lost_replica_ids)
    return tuple(
        f"{refusal.replica_id} does not serve it: {_when(refusal.replica_id in before)}, "
        f"{refusal.message} [{refusal.reason}]"
        for refusal in transfer.refusals
    )


def _when(before_commit: bool) -> str:
    return "it was lost before the commit" if before_commit else "it did not switch at the commit"
