"""Commands that list what the coordinator knows: versions, transfers, events, routes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.text import Text

from weft_rl.cli.console.commands import Printed, pool_command
from weft_rl.cli.console.options import OptionalPolicyName
from weft_rl.cli.console.output import CALL_SECONDS, print_text, shown_time
from weft_rl.cli.console.table import ColumnSpec, FittedTable
from weft_rl.cli.status import hop_text, sent_text, vector_text
from weft_rl.contract.errors import CapacityError, PeerUnavailableError
from weft_rl.contract.names import plural
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.rpc.pool_listing import RouteList, list_policies
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1 import publish_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

Limit = Annotated[int, typer.Option(help="Number of newest entries to show.", min=1, max=100_000)]

_listing = partial(pool_command, has_table=True)
_MAX_PAGE = 1000
_RETRY_SECONDS = 1.0
_DIGEST_CHARS = 12


def _pages(call: Callable[..., Any], request: Any) -> Iterator[Any]:
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


@_listing
def versions(
    channel: grpc.Channel, policy: OptionalPolicyName = "", limit: Limit = 20
) -> Iterator[Printed]:
    """Show versions, newest first, and why some have failed.

    The limit is for each policy.
    """
    stub = InspectServiceStub(channel)
    policies = {p.policy: p for p in list_policies(stub, CALL_SECONDS)}
    names = [policy] if policy else [name for name, p in policies.items() if p.last_version]
    undoes = any(way.num_undo for policy in policies.values() for way in policy.rollback_versions)
    table = FittedTable(
        "versions",
        _VERSION_COLUMNS,
        caption=_UNDO_LIMIT if undoes else "",
        empty="no version was pushed yet",
    )
    listed = pb.ListVersionsResponse()
    for name in names:
        for version in _newest(stub, name, limit):
            known = (policies.get(name, pb.Policy()), version)
            table.add(known, _failure(version))
            listed.versions.append(version)
    yield table, listed


def _newest(stub: InspectServiceStub, policy: str, limit: int) -> Iterator[pb.Version]:
    request = pb.ListVersionsRequest(policy=policy, page_size=min(limit, _MAX_PAGE))
    pages = _pages(stub.ListVersions, request)
    return islice((version for page in pages for version in page.versions), limit)


def _remarks(policy: pb.Policy, version: pb.Version) -> Iterator[Text]:
    number = version.version.version
    if policy.served_version == number:
        yield Text("served", "bold")
    if number in policy.pinned:
        yield Text("pinned")
    if version.HasField("trained_on_base_version"):
        yield Text(f"trained on base@{version.trained_on_base_version}", "dim")
    if version.state in (pb.VERSION_STATE_COMMITTED, pb.VERSION_STATE_RETIRED):
        for way in policy.rollback_versions:
            if way.version == number and number != policy.served_version:
                yield Text(f"rollback by {_rollback_way(way)}", "cyan")


def _rollback_way(way: pb.RollbackVersion) -> str:
    """Format how replicas go back to a version."""
    if way.num_undo and way.num_copies:
        at = plural(way.num_undo, "replica")
        return f"retained copies, and by undo in place at {at} of {way.num_copies + way.num_undo}"
    return "undo in place" if way.num_undo else "retained copies"


_UNDO_LIMIT = "undo in place reaches as far as old elements fit in --staging-memory-gib"


_VERSION_COLUMNS = (
    ColumnSpec("version", lambda row: f"{row[1].version.policy}@{row[1].version.version}"),
    ColumnSpec("state", lambda row: Text(*_VERSION_STATES.get(row[1].state, ("unknown", "red")))),
    ColumnSpec("trainer", lambda row: row[1].trainer_id, 2),
    ColumnSpec("began", lambda row: shown_time(row[1].create_time), 3),
    ColumnSpec("digest", lambda row: row[1].content_digest_hex[:_DIGEST_CHARS] or "-", 4),
    ColumnSpec("remarks", lambda row: Text(", ").join(_remarks(*row)), 1, is_prose=True),
)


def _failure(of: pb.Version | publish_pb2.Transfer) -> list[Text]:
    is_failed = of.HasField("failure")
    return [Text(f"{of.failure.reason}: {of.failure.message}", "red")] if is_failed else []


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


@_listing
def transfers(
    channel: grpc.Channel,
    purpose: Annotated[
        TransferPurpose | None,
        typer.Option(
            metavar="PURPOSE",
            help=f"Show only those of one purpose: {', '.join(TransferPurpose)}. Default: all.",
        ),
    ] = None,
    limit: Limit = 20,
    hops: Annotated[
        bool,
        typer.Option("--hops", help="Show what each link between members carried, over streams."),
    ] = False,
) -> Iterator[Printed]:
    """Show pushes and other transfers, under way and ended.

    A push sends a version to all replicas; a clone and a restore bring one replica what it lacks,
    from another or from its own copy; a rollback serves an earlier version again. The coordinator
    remembers the last 100 that ended, until it restarts.
    """
    found = (
        transfer
        for page in _pages(InspectServiceStub(channel).ListTransfers, pb.ListTransfersRequest())
        for transfer in page.transfers
        if purpose in (None, _purpose(transfer))
    )
    listed = [*islice(found, limit)]
    table = FittedTable("transfers", _TRANSFER_COLUMNS, empty="no such transfer is known")
    for transfer in listed:
        refusals = [Text(f"{r.replica_id}: {r.message}", "dim") for r in transfer.refusals]
        failure = _failure(transfer)
        links = [Text(hop_text(hop), "dim") for hop in transfer.hops] if hops else []
        table.add(transfer, failure + refusals + links)
    yield table, pb.ListTransfersResponse(transfers=listed)


def _purpose(transfer: publish_pb2.Transfer) -> str:
    name = publish_pb2.TransferPurpose.Name(transfer.purpose)
    return name.removeprefix("TRANSFER_PURPOSE_").lower()


def _seconds(transfer: publish_pb2.Transfer) -> list[float]:
    parts = (transfer.forming, transfer.staging, transfer.committing)
    return [*map(duration_from_proto, parts)]


def _replicas(transfer: publish_pb2.Transfer) -> str:
    """Format how many of the replicas switched; a single one is named."""
    count = len(transfer.replica_ids)
    if count == 1:
        return transfer.replica_ids[0]
    if transfer.state == publish_pb2.TRANSFER_STATE_COMMITTED:
        return f"{len(transfer.serving_replica_ids)} of {count}"
    return str(count)


_TRANSFER_COLUMNS = (
    ColumnSpec("transfer", lambda t: f"{_purpose(t)} {t.version.policy}@{t.version.version}"),
    ColumnSpec("sender", lambda t: t.trainer_id, 3),
    ColumnSpec("state", lambda t: Text(*_TRANSFER_STATES.get(t.state, ("unknown", "red")))),
    ColumnSpec("bytes", sent_text, 4, is_number=True),
    ColumnSpec("replicas", _replicas, 5),
    ColumnSpec("began", lambda t: shown_time(t.begin_time), 2),
    ColumnSpec("seconds", lambda t: f"{sum(_seconds(t)):.2f}", 1, is_number=True),
    ColumnSpec(
        "forming + staging + committing",
        lambda t: " + ".join(f"{each:.2f}" for each in _seconds(t)),
        7,
        is_number=True,
    ),
    ColumnSpec(
        "paused",
        lambda t: f"{pause:.3f}" if (pause := duration_from_proto(t.pause)) else "-",
        6,
        is_number=True,
    ),
    ColumnSpec("id", lambda t: t.transfer_id, 8),
)


# -- events ------------------------------------------------------------------------------------


@pool_command
def events(channel: grpc.Channel, limit: Limit = 50) -> Iterator[Printed]:
    """Print the last events, oldest first.

    The last 500 failures and 500 others outlive a restart of the coordinator; 500 details (steps
    of pushes, retired versions) do not.
    """
    listed: list[pb.WatchEventsResponse] = []
    for page in _pages(InspectServiceStub(channel).ListEvents, pb.ListEventsRequest()):
        listed += page.events
        if len(listed) >= limit:
            break
    for event in reversed(listed[:limit]):
        yield _event_text(event), event
    if len(listed) < limit:
        yield (f"[dim](every event is kept since {shown_time(page.kept_since)})[/]",)


@pool_command
def watch(channel: grpc.Channel) -> Iterator[Printed]:
    """Print events as they happen, until interrupted.

    It waits while the coordinator is away. weft events shows those before.
    """
    for event in _follow_events(InspectServiceStub(channel)):
        yield _event_text(event), event


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
    print(f"weft watch: {text}", file=sys.stderr, flush=True)


def _event_text(event: pb.WatchEventsResponse) -> Text:
    known = event.kind in pb.EventKind.values()
    is_failure = event.outcome == pb.EVENT_OUTCOME_FAILURE
    kind = pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_") if known else "KIND_UNKNOWN"
    return Text.assemble(
        (shown_time(event.time), "dim"),
        "  ",
        (kind.lower().replace("_", " "), "red" if is_failure else "bold"),
        f"  {event.subject}",
        (f"  {event.message}" if event.message else "", "dim"),
    )


# -- routes ------------------------------------------------------------------------------------

#: Deadline of one list: a coordinator that was just restarted takes its time.
_ROUTES_SECONDS = 60.0
#: Adapters that the table names of a replica; ``--json`` has all.
_MAX_ADAPTERS = 4


@_listing
def routes(
    channel: grpc.Channel,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print each new list until interrupted.")
    ] = False,
) -> Iterator[Printed]:
    """Show the replicas that requests may be sent to."""
    stub = InspectServiceStub(channel)
    empty = "no replica may be sent requests: weft status says why"
    for listed in _follow_routes(stub) if watch else _route_list(stub):
        table = FittedTable(f"routes, revision {listed.revision}", _ROUTE_COLUMNS, empty=empty)
        for route in listed.routes:
            table.add(route)
        yield table, listed


def _route_list(stub: InspectServiceStub) -> Iterator[pb.WatchRoutesResponse]:
    call = stub.WatchRoutes(pb.WatchRoutesRequest(), timeout=_ROUTES_SECONDS)
    try:
        yield next(_lists(call))
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
    ColumnSpec("replica", lambda route: route.replica_id),
    ColumnSpec("OpenAI API", lambda route: route.http_url),
    ColumnSpec("model", lambda route: route.model_name, 2),
    ColumnSpec(
        "serves", lambda r: vector_text(r.version_vector, most=_MAX_ADAPTERS), 1, is_prose=True
    ),
)
