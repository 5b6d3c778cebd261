"""``weft events`` and ``weft watch``: what happened last, and what happens from now on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.text import Text

from weft_rl.cli.console.connection import CALL_SECONDS, connect
from weft_rl.cli.console.output import print_json, shown_time
from weft_rl.contract.errors import CapacityError, PeerUnavailableError
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_RETRY_SECONDS = 1.0
_BAD = ("LOST", "QUARANTINED", "SUSPECT", "ABORTED", "FAILED", "CONFLICT", "BEHIND", "NOT_ADOPTED")


def show_events(coordinator: str, *, limit: int, json_output: bool) -> None:
    """Print the last events, oldest first.

    Raises:
        WeftError: The coordinator does not answer.
    """
    console = Console()
    with connect(coordinator) as channel:
        listed, since = _list(InspectServiceStub(channel), limit)
    for event in reversed(listed):
        if json_output:
            print_json(event)
        else:
            console.print(render(event), soft_wrap=True)
    if not json_output and len(listed) < limit:
        console.print(f"(events are kept since {shown_time(since)})", style="dim")


def _list(stub: InspectServiceStub, limit: int) -> tuple[list[pb.WatchEventsResponse], Timestamp]:
    """List the newest events; return them with the time since when events are kept."""
    listed: list[pb.WatchEventsResponse] = []
    token = ""
    while True:
        request = pb.ListEventsRequest(page_token=token)
        page = stub.ListEvents(request, timeout=CALL_SECONDS)
        listed += page.events
        token = page.next_page_token
        if not token or len(listed) >= limit:
            return listed[:limit], page.kept_since


def watch_events(coordinator: str, *, json_output: bool) -> None:
    """Print each event until interrupted, as one line.

    Raises:
        WeftError: The caller may not watch; a coordinator that is away is awaited.
    """
    console = Console()
    with open_channel(coordinator) as channel:
        for event in _follow(InspectServiceStub(channel)):
            if json_output:
                print_json(event)
            else:
                console.print(render(event), soft_wrap=True)


def _follow(stub: InspectServiceStub) -> Iterator[pb.WatchEventsResponse]:
    """Yield events, over restarts of the coordinator; says where some may be missing."""
    is_away = False
    while True:
        call = stub.WatchEvents(pb.WatchEventsRequest())
        try:
            call.initial_metadata()  # comes at once; from here nothing is missed
            if is_away and call.is_active():
                _say("it answers again; what happened meanwhile may be in weft events")
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
    """Print to standard error: what is read by programs stays events alone."""
    print(f"weft watch: {text}", file=sys.stderr, flush=True)


def render(event: pb.WatchEventsResponse) -> Text:
    """Render an event as a line: when, what, whom it concerns, and more of it."""
    kind = pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_")
    colour = "red" if kind.endswith(_BAD) else "bold"
    return Text.assemble(
        (shown_time(event.time), "dim"),
        "  ",
        (kind.lower().replace("_", " "), colour),
        f"  {event.subject}",
        (f"  {event.message}" if event.message else "", "dim"),
    )
