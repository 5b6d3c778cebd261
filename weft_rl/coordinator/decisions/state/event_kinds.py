"""Kinds of events: what they are about, which are failures, and how many are kept of them.

The catalog, ``weft events`` and the page ask here, so that a failure is one everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from weft_rl.coordinator.decisions.state.effects import EventKind

#: Events that are kept with each other (see ``KEPT_WITH``). The catalog keeps as many, but for
#: details.
MAX_KEPT: Final = 500

#: Kinds by what they are about.
TOPICS: Final[Mapping[str, frozenset[EventKind]]] = {
    "pushes": frozenset(
        {
            EventKind.TRANSFER_BEGUN,
            EventKind.TRANSFER_REFORMED,
            EventKind.TRANSFER_STAGED,
            EventKind.TRANSFER_COMMITTED,
            EventKind.TRANSFER_ABORTED,
            EventKind.VERSION_FAILED,
            EventKind.VERSION_RETIRED,
        }
    ),
    "repairs": frozenset(
        {
            EventKind.CLONE_BEGUN,
            EventKind.CLONE_INTERRUPTED,
            EventKind.CLONE_ENDED,
            EventKind.CLONE_FAILED,
            EventKind.RESTORE_BEGUN,
            EventKind.RESTORE_ENDED,
            EventKind.RESTORE_FAILED,
        }
    ),
    "replicas": frozenset(
        {
            EventKind.REPLICA_READY,
            EventKind.REPLICA_PENDING_WEIGHTS,
            EventKind.REPLICA_LOST,
            EventKind.REPLICA_QUARANTINED,
            EventKind.REPLICA_DRAINING,
            EventKind.REPLICA_OUT_OF_SERVICE,
            EventKind.REPLICA_ASLEEP,
            EventKind.REPLICA_SUSPECT,
            EventKind.REPLICA_ANSWERS,
            EventKind.REPLICA_LEFT,
        }
    ),
    "policies": frozenset(
        {
            EventKind.LEASE_ACQUIRED,
            EventKind.LEASE_RELEASED,
            EventKind.PUBLISH_AGAIN_WANTED,
            EventKind.POLICY_LOST,
            EventKind.POLICY_FOUND,
            EventKind.UNRECORDED_VERSIONS,
            EventKind.VERSION_ADOPTED,
            EventKind.VERSION_NOT_ADOPTED,
            EventKind.VERSION_CONFLICT,
        }
    ),
    "orders": frozenset(
        {
            EventKind.VERSION_PINNED,
            EventKind.VERSION_UNPINNED,
            EventKind.RETENTION_SET,
            EventKind.ROLLED_BACK,
            EventKind.ROLLBACK_FAILED,
            EventKind.POLICY_FORGOTTEN,
            EventKind.BASE_UNBOUND,
        }
    ),
    "coordinator": frozenset(
        {
            EventKind.BASE_BOUND,
            EventKind.CHECKPOINT_BOUND,
            EventKind.CATALOG_BEHIND,
            EventKind.COORDINATOR_STARTED,
        }
    ),
}
#: What a kind is about, one of ``TOPICS``.
TOPIC: Final = {kind: topic for topic, kinds in TOPICS.items() for kind in kinds}

#: Something did not work, or somebody is gone.
FAILURES: Final = frozenset(
    {
        EventKind.REPLICA_LOST,
        EventKind.REPLICA_QUARANTINED,
        EventKind.REPLICA_SUSPECT,
        EventKind.TRANSFER_REFORMED,
        EventKind.TRANSFER_ABORTED,
        EventKind.VERSION_FAILED,
        EventKind.ROLLBACK_FAILED,
        EventKind.CLONE_FAILED,
        EventKind.RESTORE_FAILED,
        EventKind.PUBLISH_AGAIN_WANTED,
        EventKind.POLICY_LOST,
        EventKind.CATALOG_BEHIND,
        EventKind.VERSION_NOT_ADOPTED,
        EventKind.VERSION_CONFLICT,
    }
)
_SUCCESSES: Final = frozenset(
    {
        EventKind.REPLICA_READY,
        EventKind.REPLICA_ANSWERS,
        EventKind.TRANSFER_COMMITTED,
        EventKind.CLONE_ENDED,
        EventKind.RESTORE_ENDED,
        EventKind.VERSION_ADOPTED,
        EventKind.POLICY_FOUND,
    }
)
#: Steps of something whose end is an event, too, and what becomes of each version in time. They are
#: logged for debugging alone, and not in the catalog.
DETAILS: Final = frozenset(
    {
        EventKind.TRANSFER_BEGUN,
        EventKind.TRANSFER_STAGED,
        EventKind.CLONE_BEGUN,
        EventKind.CLONE_INTERRUPTED,
        EventKind.RESTORE_BEGUN,
        EventKind.VERSION_RETIRED,
    }
)


#: "bad" for a failure, "good" for a success, "plain" for all else.
TONE: Final = {
    kind: "bad" if kind in FAILURES else "good" if kind in _SUCCESSES else "plain"
    for kind in EventKind
}
#: Name of the events that a kind is kept with, ``MAX_KEPT`` of each name: failures and the others
#: of each topic, so that a flapping replica drops no outcome of a push; and details.
KEPT_WITH: Final[Mapping[EventKind, str]] = {
    kind: "details"
    if kind in DETAILS
    else f"failures of {TOPIC[kind]}"
    if kind in FAILURES
    else TOPIC[kind]
    for kind in EventKind
}
