"""Commands that list what the coordinator knows: versions, transfers, events, routes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.text import Text

from weft_rl.cli.console.options import (
    DEFAULT_COORDINATOR,
    Coordinator,
    Json,
    OptionalPolicyName,
    Wide,
)
from weft_rl.cli.console.output import CALL_SECONDS, connect, print_json, print_text, shown_time
from weft_rl.cli.console.table import ColumnSpec, FittedTable, listing_console
from weft_rl.cli.status import vector_text
from weft_rl.contract.errors import CapacityError, PeerUnavailableError
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.rpc.pool_listing import RouteList, list_policies
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1 import publish_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

Limit = Annotated[int, typer.Option(help="Number of newest entries to show.", min=1, max=100_000)]

_MAX_PAGE = 1000
_RETRY_SECONDS = 1.0
_DIGEST_CHARS = 12


def _pages(call: Callable[..., Any], request: Any) -> Iterator[Any]:
    """Yield the responses of a paged listing."""
    while True:
        page = call(request, timeout=CALL_SECONDS)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


# -- versions ----------------------------------------------------------------------------------

_VERSION_STATES = {
    pb.VERSION_STATE_STAGING: ("staging", "yellow"),
    pb.VERSION_STATE_COMMITTED: ("committed", "green"),
    pb.VERSION_STATE_ABORTED: ("aborted", "red"),
    pb.VERSION_STATE_RETIRED: ("retired", "dim"),
    pb.VERSION_STATE_FAILED: ("failed", "red"),
}


def versions(
    policy: OptionalPolicyName = "",
    limit: Limit = 20,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    wide: Wide = False,
    json_output: Json = False,
) -> None:
    """Show versions, newest first, and why some have failed.

    The limit is for each policy.
    """
    with connect(coordinator) as channel:
        stub = InspectServiceStub(channel)
        policies = {p.policy: p for p in list_policies(stub, CALL_SECONDS)}
        names = [policy] if policy else [name for name, p in policies.items() if p.last_version]
        listed = [
            (policies.get(name, pb.Policy()), version)
            for name in names
            for version in _newest(stub, name, limit)
        ]
    if json_output:
        print_json(pb.ListVersionsResponse(versions=[version for _, version in listed]))
    else:
        listing_console(wide=wide).print(_versions_table(listed))


def _newest(stub: InspectServiceStub, policy: str, limit: int) -> Iterator[pb.Version]:
    request = pb.ListVersionsRequest(policy=policy, page_size=min(limit, _MAX_PAGE))
    pages = _pages(stub.ListVersions, request)
    return islice((version for page in pages for version in page.versions), limit)


_VERSION_COLUMNS = (
    ColumnSpec("version"),
    ColumnSpec("state"),
    ColumnSpec("trainer", 2),
    ColumnSpec("began", 3),
    ColumnSpec("digest", 4),
    ColumnSpec("remarks", 1, is_prose=True),
)


def _versions_table(listed: list[tuple[pb.Policy, pb.Version]]) -> FittedTable:
    table = FittedTable("versions", _VERSION_COLUMNS, empty="no version was pushed yet")
    for policy, version in listed:
        table.add_row(
            f"{version.version.policy}@{version.version.version}",
            Text(*_VERSION_STATES.get(version.state, ("unknown", "red"))),
            version.trainer_id,
            shown_time(version.create_time),
            version.content_digest_hex[:_DIGEST_CHARS] or "-",
            Text(", ").join(_remarks(policy, version)),
            notes=_failure(version.failure_reason, version.failure_message),
        )
    return table


def _remarks(policy: pb.Policy, version: pb.Version) -> Iterator[Text]:
    number = version.version.version
    if policy.served_version == number:
        yield Text("served", "bold")
    if number in policy.pinned_versions:
        yield Text("pinned")
    if version.HasField("trained_on_base_version"):
        yield Text(f"trained on base@{version.trained_on_base_version}", "dim")


def _failure(reason: str, message: str) -> list[Text]:
    return [Text(f"{reason}: {message}", "red")] if reason else []


# -- transfers ---------------------------------------------------------------------------------

_TRANSFER_STATES = {
    publish_pb2.TRANSFER_STATE_FORMING: ("forming", "yellow"),
    publish_pb2.TRANSFER_STATE_STAGING: ("staging", "yellow"),
    publish_pb2.TRANSFER_STATE_COMMITTING: ("committing", "yellow"),
    publish_pb2.TRANSFER_STATE_COMMITTED: ("committed", "green"),
    publish_pb2.TRANSFER_STATE_ABORTED: ("aborted", "red"),
}


class TransferPurpose(StrEnum):
    """Purpose of a transfer."""

    PUSH = "push"
    CLONE = "clone"
    RESTORE = "restore"
    ROLLBACK = "rollback"


def transfers(
    purpose: Annotated[
        TransferPurpose | None,
        typer.Option(
            metavar="PURPOSE",
            help=f"Show only those of one purpose: {', '.join(TransferPurpose)}. Default: all.",
        ),
    ] = None,
    limit: Limit = 20,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    wide: Wide = False,
    json_output: Json = False,
) -> None:
    """Show pushes and other transfers, under way and ended.

    A push sends a version to all replicas; a clone and a restore bring one replica what it lacks,
    from another or from its own copy; a rollback serves an earlier version again. The coordinator
    remembers the last 100 that ended, until it restarts.
    """
    with connect(coordinator) as channel:
        stub = InspectServiceStub(channel)
        found = (
            transfer
            for page in _pages(stub.ListTransfers, pb.ListTransfersRequest())
            for transfer in page.transfers
            if purpose in (None, _purpose(transfer))
        )
        listed = [*islice(found, limit)]
    if json_output:
        print_json(pb.ListTransfersResponse(transfers=listed))
    else:
        listing_console(wide=wide).print(_transfers_table(listed))


def _purpose(transfer: publish_pb2.Transfer) -> str:
    name = publish_pb2.TransferPurpose.Name(transfer.purpose)
    return name.removeprefix("TRANSFER_PURPOSE_").lower()


_TRANSFER_COLUMNS = (
    ColumnSpec("transfer"),
    ColumnSpec("sender", 3),
    ColumnSpec("state"),
    ColumnSpec("bytes", 4, is_number=True),
    ColumnSpec("replicas", 5),
    ColumnSpec("began", 2),
    ColumnSpec("seconds", 1, is_number=True),
    ColumnSpec("forming + staging + committing", 7, is_number=True),
    ColumnSpec("paused", 6, is_number=True),
)


def _transfers_table(listed: list[publish_pb2.Transfer]) -> FittedTable:
    table = FittedTable("transfers", _TRANSFER_COLUMNS, empty="no such transfer is known")
    for transfer in listed:
        parts = (transfer.forming, transfer.staging, transfer.committing)
        seconds, pause = [*map(duration_from_proto, parts)], duration_from_proto(transfer.pause)
        refusals = [Text(f"{r.replica_id}: {r.message}", "dim") for r in transfer.refusals]
        table.add_row(
            f"{_purpose(transfer)} {transfer.version.policy}@{transfer.version.version}",
            transfer.trainer_id,
            Text(*_TRANSFER_STATES.get(transfer.state, ("unknown", "red"))),
            f"{transfer.total_bytes:,}",
            _replicas(transfer),
            shown_time(transfer.begin_time),
            f"{sum(seconds):.2f}",
            " + ".join(f"{each:.2f}" for each in seconds),
            f"{pause:.3f}" if pause else "-",
            notes=_failure(transfer.failure_reason, transfer.failure_message) + refusals,
        )
    return table


def _replicas(transfer: publish_pb2.Transfer) -> str:
    """Format how many of the replicas switched; a single one is named."""
    count = len(transfer.replica_ids)
    if count == 1:
        return transfer.replica_ids[0]
    if transfer.state == publish_pb2.TRANSFER_STATE_COMMITTED:
        return f"{len(transfer.serving_replica_ids)} of {count}"
    return str(count)


# -- events ------------------------------------------------------------------------------------


def events(
    limit: Limit = 50, coordinator: Coordinator = DEFAULT_COORDINATOR, json_output: Json = False
) -> None:
    """Print the last events, oldest first.

    The last 500 failures and 500 others outlive a restart of the coordinator; 500 details (steps
    of pushes, retired versions) do not.
    """
    with connect(coordinator) as channel:
        listed: list[pb.WatchEventsResponse] = []
        for page in _pages(InspectServiceStub(channel).ListEvents, pb.ListEventsRequest()):
            listed += page.events
            if len(listed) >= limit:
                break
    for event in reversed(listed[:limit]):
        _print_event(event, json_output)
    if not json_output and len(listed) < limit:
        print_text(f"[dim](every event is kept since {shown_time(page.kept_since)})[/]")


def watch(coordinator: Coordinator = DEFAULT_COORDINATOR, json_output: Json = False) -> None:
    """Print events as they happen, until interrupted.

    It waits while the coordinator is away. weft events shows those before.
    """
    with open_channel(coordinator) as channel:
        for event in _follow_events(InspectServiceStub(channel)):
            _print_event(event, json_output)


def _follow_events(stub: InspectServiceStub) -> Iterator[pb.WatchEventsResponse]:
    """Yield events, over restarts of the coordinator; says where some may be missing."""
    is_away = False
    while True:
        call = stub.WatchEvents(pb.WatchEventsRequest())
        try:
            call.initial_metadata()  # comes at once; from here nothing is missed
            if is_away and call.is_active():
                _say("it answers again; weft events may show what happened meanwhile")
                is_away = False
            yield from call
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if not isinstance(error, PeerUnavailableError | CapacityError):
                raise error from rpc_error
            if not is_away:
                _say(f"{error.message}; waiting for it")
            is_away = True
        finally:
            call.cancel()
        time.sleep(_RETRY_SECONDS)


def _say(text: str) -> None:
    """Print to standard error: standard output holds events alone, for programs."""
    print(f"weft watch: {text}", file=sys.stderr, flush=True)


def _print_event(event: pb.WatchEventsResponse, json_output: bool) -> None:
    if json_output:
        print_json(event)
        return
    known = event.kind in pb.EventKind.values()
    is_failure = event.outcome == pb.EVENT_OUTCOME_FAILURE
    kind = pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_") if known else "KIND_UNKNOWN"
    text = Text.assemble(
        (shown_time(event.time), "dim"),
        "  ",
        (kind.lower().replace("_", " "), "red" if is_failure else "bold"),
        f"  {event.subject}",
        (f"  {event.message}" if event.message else "", "dim"),
    )
    print_text(text)


# -- routes ------------------------------------------------------------------------------------

#: Deadline of one list: a coordinator that was just restarted takes its time.
_ROUTES_SECONDS = 60.0
#: Adapters that the table names of a replica; ``--json`` has all.
_MAX_ADAPTERS = 4


def routes(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print each new list until interrupted.")
    ] = False,
    wide: Wide = False,
    json_output: Json = False,
) -> None:
    """Show the replicas that requests may be sent to."""
    with open_channel(coordinator) as channel:
        stub = InspectServiceStub(channel)
        for listed in _follow_routes(stub) if watch else _route_list(stub):
            if json_output:
                print_json(listed)
            else:
                listing_console(wide=wide).print(_routes_table(listed))


def _route_list(stub: InspectServiceStub) -> Iterator[pb.WatchRoutesResponse]:
    call = stub.WatchRoutes(pb.WatchRoutesRequest(), timeout=_ROUTES_SECONDS)
    try:
        yield next(_lists(call))
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error
    finally:
        call.cancel()


def _follow_routes(stub: InspectServiceStub) -> Iterator[pb.WatchRoutesResponse]:
    """Yield lists as they come; the last one stays in force while the coordinator is away."""
    while True:
        try:
            yield from _lists(stub.WatchRoutes(pb.WatchRoutesRequest()))
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if not isinstance(error, PeerUnavailableError):
                raise error from rpc_error
            text = Text(f"{error.message}; the last list stays in force", "dim")
            print_text(text, to=Console(stderr=True))
        time.sleep(_RETRY_SECONDS)


def _lists(call: Iterable[pb.WatchRoutesResponse]) -> Iterator[pb.WatchRoutesResponse]:
    """Yield the whole list at each change."""
    known = RouteList()
    for message in call:
        if (listed := known.follow(message)) is not None:
            yield listed


_ROUTE_COLUMNS = (
    ColumnSpec("replica"),
    ColumnSpec("OpenAI API"),
    ColumnSpec("model", 2),
    ColumnSpec("serves", 1, is_prose=True),
)


def _routes_table(listed: pb.WatchRoutesResponse) -> FittedTable:
    empty = "no replica may be sent requests: weft status says why"
    table = FittedTable(f"routes, revision {listed.revision}", _ROUTE_COLUMNS, empty=empty)
    for route in listed.routes:
        serves = vector_text(route.version_vector, most=_MAX_ADAPTERS)
        table.add_row(route.replica_id, route.http_url, route.model_name, serves)
    return table
