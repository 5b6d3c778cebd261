"""Refusals: which answers to an order to switch are definite.

A definite refusal says that nothing has changed and nothing will: the replica does not serve
the version and holds nothing that it could still switch to by that order. It is the word
of the process that was told, which signs it with its incarnation; what gRPC says in its
place (a timeout, a reset, an answer that was too large to read) proves nothing.
"""

from __future__ import annotations

from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure

_NOTHING_CHANGED = frozenset(
    {
        "LOAD_FAILED",
        "NOT_STAGED",
        "NOT_RETAINED",
        "INVALID_NAME",
        "INVALID_MANIFEST",
        "DIGEST_MISMATCH",
        "STAGING_FULL",
    }
)


def is_dirty(failure: Failure) -> bool:
    """Return whether a replica says that its weights may be mixed."""
    return failure.metadata.get("dirty") == "true"


def is_definite(failure: Failure, incarnation: str) -> bool:
    """Return whether the process ``incarnation`` has refused for good, with nothing changed."""
    signed = bool(incarnation) and failure.metadata.get("incarnation") == incarnation
    return signed and failure.reason in _NOTHING_CHANGED and not is_dirty(failure)


def all_definite(transfer: Transfer) -> bool:
    """Return whether all refusals of an order to switch are definite."""
    return all(
        is_definite(failure, transfer.incarnations.get(replica_id, ""))
        for replica_id, failure in transfer.refusals.items()
    )
