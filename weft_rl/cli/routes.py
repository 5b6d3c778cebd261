"""``weft routes``: the replicas that may be sent requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import grpc
from rich.console import Console
from rich.table import Table

from weft_rl.cli.console.output import print_json
from weft_rl.cli.lists.status import vector_text
from weft_rl.contract.errors import PeerUnavailableError
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.pool_listing import RouteList
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: For one list; a coordinator that was just restarted takes its time.
_LIST_SECONDS = 60.0
_RETRY_SECONDS = 1.0
#: Adapters that the table names of a replica; ``--json`` has all.
_MAX_ADAPTERS = 4


def show_routes(coordinator: str, *, watch: bool, json_output: bool) -> None:
    """Print the routes once, or each new list until interrupted.

    Raises:
        WeftError: The coordinator does not answer; with ``watch`` it is awaited.
    """
    with open_channel(coordinator) as channel:
        stub = InspectServiceStub(channel)
        for routes in _follow(stub) if watch else _once(stub):
            if json_output:
                print_json(routes)
            else:
                Console().print(render(routes))


def _once(stub: InspectServiceStub) -> Iterator[pb.WatchRoutesResponse]:
    call = stub.WatchRoutes(pb.WatchRoutesRequest(), timeout=_LIST_SECONDS)
    try:
        yield next(_lists(call))
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error
    finally:
        call.cancel()


def _follow(stub: InspectServiceStub) -> Iterator[pb.WatchRoutesResponse]:
    """Yield lists as they come; the last one stands while the coordinator is away."""
    while True:
        try:
            yield from _lists(stub.WatchRoutes(pb.WatchRoutesRequest()))
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if not isinstance(error, PeerUnavailableError):
                raise error from rpc_error
            Console(stderr=True).print(f"[dim]{error.message}; the last list stands[/]")
        time.sleep(_RETRY_SECONDS)


def _lists(call: Iterable[pb.WatchRoutesResponse]) -> Iterator[pb.WatchRoutesResponse]:
    """Yield the whole list, with every change."""
    known = RouteList()
    for message in call:
        if (routes := known.follow(message)) is not None:
            yield routes


def render(routes: pb.WatchRoutesResponse) -> Table:
    """Render the routes as a table."""
    table = Table(title=f"routes, revision {routes.revision}", title_justify="left")
    for column in ("replica", "OpenAI API", "model", "serves"):
        table.add_column(column, overflow="fold")
    for route in routes.routes:
        serves = vector_text(route.version_vector, most=_MAX_ADAPTERS)
        table.add_row(route.replica_id, route.http_url, route.model_name, serves)
    return table
