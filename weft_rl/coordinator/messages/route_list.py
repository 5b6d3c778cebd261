"""Routes as messages: the whole list, or the changes since a list was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import is_listed, routes
from weft_rl.coordinator.messages.listing import entry_of
from weft_rl.coordinator.messages.pages import Vectors, cut
from weft_rl.coordinator.messages.wire import route_to_proto
from weft_rl.rpc.codec import version_to_proto
from weft_rl.v1 import inspect_pb2

# Of a name at most 63 characters long: 256 KiB.
_MAX_REMOVED: Final = 4000
# Of such names, too, about 128 KiB.
_MAX_OVER_ANOTHER_BASE: Final = 1024


def route_messages(
    state: PoolState, changed: Sequence[str] | None, previous: int, revision: int
) -> list[inspect_pb2.WatchRoutesResponse]:
    """Return the messages, one or more, that bring a reader from ``previous`` to ``revision``.

    Args:
        changed: Replicas that have changed since ``previous``; None for the whole list.
    """
    if changed is None:
        listed, removed = routes(state), list[str]()
    else:
        now_is = [(name, state.replicas.get(name)) for name in sorted(changed)]
        listed = [replica for _, replica in now_is if replica and is_listed(replica)]
        removed = [name for name, replica in now_is if not (replica and is_listed(replica))]
    parts = list[inspect_pb2.WatchRoutesResponse]()
    while listed or removed or not parts:
        part, listed = _part(listed)
        part.removed_replica_ids.extend(removed[:_MAX_REMOVED])
        removed = removed[_MAX_REMOVED:]
        parts.append(part)
    for part in parts:
        part.coordinator_generation = state.generation
        part.revision = revision
        part.previous_revision = -1 if changed is None else previous
        part.more = part is not parts[-1]
    parts[0].whole = changed is None
    parts[-1].over_another_base.extend(
        inspect_pb2.OverAnotherBase(
            version=version_to_proto(version),
            trained_on_base_version=state.policies[version.policy].trained_on[version.version],
            base_version=state.vector.base,
        )
        for version in state.over_another_base()[:_MAX_OVER_ANOTHER_BASE]
    )
    return parts


def _part(listed: list[Replica]) -> tuple[inspect_pb2.WatchRoutesResponse, list[Replica]]:
    """Put as many routes into a message as it may hold; return it and the rest."""
    vectors = Vectors()

    def make(replica: Replica) -> inspect_pb2.Route:
        return entry_of(
            replica,
            lambda replica: route_to_proto(replica, vectors.index(replica.vector)),
            lambda replica, _: inspect_pb2.Route(),
        )

    page = cut(listed, make, vectors=vectors)
    message = inspect_pb2.WatchRoutesResponse(
        routes=[route for route in page.entries if route.replica_id],
        version_vectors=vectors.messages,
    )
    return message, listed[len(page.entries) :]
