"""Backoff: versions that could not be brought to a replica, and the time of the next attempt."""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.replica import Backoff
from weft_rl.coordinator.decisions.state.values import Failure

#: Between two attempts; doubled with each failure, from the first to the second.
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


def note(
    change: Change, replica_id: str, version: PolicyVersion, source: str, failure: Failure
) -> None:
    """Postpone the next attempt at bringing a version to a replica."""
    replica = change.state.replicas.get(replica_id)
    if replica is None:
        return
    old = replica.backoffs.get(version)
    count = old.count + 1 if old else 1
    delay = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(count - 1, 30))
    why = f"{failure.message} [{failure.reason}]"
    backoff = Backoff(count, change.now + delay, source, why)
    change.put_replica(replace(replica, backoffs={**replica.backoffs, version: backoff}))
