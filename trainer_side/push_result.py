"""Result of a push that succeeded: its version, its cost, and what success does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft_rl.contract.names import PolicyVersion, plural
from weft_rl.v1 import publish_pb2 as pb


@dataclass(frozen=True)
class CopyUsage:
    """Cost of the copy that an async push sends; see ``PushReport``."""

    num_bytes: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0


#: Cost of a push that reads the model in place.
NOT_COPIED = CopyUsage()


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """Cost of a push as the coordinator measured it, with remarks on its outcome."""

    total_bytes: int
    """Payload of the version, in bytes; each replica received as much."""
    num_replicas: int
    """Replicas that served the version when the push ended; ``remarks`` names the others."""
    seconds: float
    """Time from the call until every replica had switched, or had failed to."""
    forming_seconds: float
    """Time from the request to begin until every receiver was ready."""
    staging_seconds: float
    """Time from then until every receiver had verified the last bucket."""
    committing_seconds: float
    """Time from then until every replica served the version."""
    pause_seconds: float
    """Longest time that a replica paused generation."""
    source: str
    """Kind of trainer and of model that was read."""
    backend: str
    """Backend that carried the bytes: "one-sided", "nccl" or "gloo"."""
    backend_reason: str
    """Reason for this backend, and against those that the pool would have preferred."""
    copied_bytes: int = 0
    """Bytes that this rank copied to host memory before an async push returned; 0 for a push that
    blocks."""
    copying_seconds: float = 0.0
    """Time that the copy took, which the call blocked for."""
    copies_memory_bytes: int = 0
    """Host memory that this rank's publisher holds for copies, of this push and others; it is used
    again."""
    remarks: tuple[str, ...] = ()
    """Facts that success does not tell, each a sentence: replicas that did not switch and why, a
    quantised base, a base that is not the one that the adapter was trained on."""

    def __repr__(self) -> str:
        """Return the cost in short; the fields have all of it."""
        return f"PushReport({self._cost()})"

    def _cost(self) -> str:
        text = (
            f"{self.total_bytes:,} bytes to {plural(self.num_replicas, 'replica')} in "
            f"{self.seconds:.3f} s over {self.backend}"
        )
        return f"{text}, {plural(len(self.remarks), 'remark')}" if self.remarks else text


class PushResult(NamedTuple):
    """Version that a push made, and the push's report."""

    version: PolicyVersion
    """Version that the replicas serve, for example ``math@17``."""
    report: PushReport
    """Cost and remarks of the push."""

    def __str__(self) -> str:
        """Return the version alone: ``math@17``."""
        return str(self.version)

    def __repr__(self) -> str:
        """Return version and cost in short."""
        return f"PushResult({self.version}, {self.report._cost()})"


def report_of(
    transfer: pb.Transfer,
    *,
    total_bytes: int,
    seconds: float,
    source: str,
    backend: str,
    remarks: Sequence[str],
    cost: CopyUsage = NOT_COPIED,
) -> PushReport:
    """Return the report of a push from its ended transfer.

    Args:
        backend: Backend that was to carry the bytes, if the transfer does not say.
        remarks: The trainer's own remarks; those on replicas that do not serve it follow.
    """
    return PushReport(
        total_bytes=total_bytes,
        num_replicas=len(transfer.serving_replica_ids),
        seconds=seconds,
        forming_seconds=transfer.forming.ToTimedelta().total_seconds(),
        staging_seconds=transfer.staging.ToTimedelta().total_seconds(),
        committing_seconds=transfer.committing.ToTimedelta().total_seconds(),
        pause_seconds=transfer.pause.ToTimedelta().total_seconds(),
        source=source,
        backend=transfer.backend or backend,
        backend_reason=transfer.backend_reason,
        copied_bytes=cost.num_bytes,
        copying_seconds=cost.seconds,
        copies_memory_bytes=cost.memory_bytes,
        remarks=(*remarks, *missing_replicas(transfer)),
    )


def missing_replicas(transfer: pb.Transfer) -> tuple[str, ...]:
    """Return a sentence for each replica that does not serve a committed push, with the reason."""
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
