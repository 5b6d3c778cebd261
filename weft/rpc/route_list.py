"""The replicas that may be sent requests, out of the messages that tell of them."""

from __future__ import annotations

from weft.v1 import inspect_pb2 as pb


class RouteList:
    """The whole list of routes, kept up to date by what WatchRoutes tells."""

    def __init__(self) -> None:
        self._routes: dict[str, pb.Route] = {}

    def follow(self, message: pb.WatchRoutesResponse) -> pb.WatchRoutesResponse | None:
        """Take a message in: the list, each route with its version vector, or None while
        there is more to come."""
        if message.whole:
            self._routes.clear()
        for name in message.removed_replica_ids:
            self._routes.pop(name, None)
        for route in message.routes:
            route.version_vector.CopyFrom(message.version_vectors[route.version_vector_index])
            route.ClearField("version_vector_index")
            self._routes[route.replica_id] = route
        if message.more:
            return None
        return pb.WatchRoutesResponse(
            routes=[route for _, route in sorted(self._routes.items())],
            coordinator_generation=message.coordinator_generation,
            revision=message.revision,
        )
