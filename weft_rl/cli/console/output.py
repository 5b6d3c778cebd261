"""A command's connection to the coordinator, its output and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from weft_rl.contract.errors import InvalidRequestError, TransferTimeoutError, WeftError
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import as_dict
from weft_rl.rpc.status import error_from_rpc
from weft_rl.units import shown_bytes

#: Deadline of a call that waits for no replica.
CALL_SECONDS: Final = 10.0
#: Exit codes. A server refused.
_REFUSED: Final = 1
#: An option or an argument is wrong: no server was called. Typer's own code, too.
MISUSED: Final = 2
#: The coordinator did not answer: nothing was done, the same command may be tried again.
NO_ANSWER: Final = 3
#: A deadline passed: what was asked for may still happen.
NOT_KNOWN: Final = 4
_AWAY: Final = ("COORDINATOR_AWAY", "COORDINATOR_UNREACHABLE")


@contextmanager
def connect(coordinator: str) -> Iterator[grpc.Channel]:
    """Open a channel for one command; calls on it that fail raise a typed error."""
    with open_channel(coordinator) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


def print_text(text: str | Text, *, to: Console | None = None) -> None:
    """Print sentences: wrapped between words on a terminal, elsewhere in one line each.

    Args:
        text: Text, a string with markup.
        to: Console; by default that of standard output.
    """
    console = to or Console()
    console.print(text, highlight=False, soft_wrap=not console.is_terminal)


def print_json(facts: Message | Mapping[str, Any]) -> None:
    """Print one object as one line."""
    known = as_dict(facts) if isinstance(facts, Message) else facts
    print(json.dumps(known), flush=True)


def print_error(error: WeftError, *, json_output: bool) -> None:
    """Print on standard error, in one line, what failed and what to do about it."""
    if json_output:
        facts = {"reason": error.reason, "status": error.status, "message": error.message}
        print(json.dumps({"error": {**facts, "metadata": error.metadata}}), file=sys.stderr)
        return
    hint = ""
    if error.reason == "COORDINATOR_AWAY":
        hint = (
            ". Check that `weft coordinator` runs there, and --coordinator (or WEFT_COORDINATOR); "
            "`weft doctor` finds out more"
        )
    text = f"[bold red]error:[/] {escape(error.message)}{hint} [dim]({error.reason})[/]"
    print_text(text, to=Console(stderr=True))


def exit_code(error: WeftError) -> int:
    """Return the exit code of a command that failed with ``error``."""
    if error.reason in _AWAY:
        return NO_ANSWER
    if isinstance(error, InvalidRequestError) and not _was_answered(error):
        return MISUSED
    return NOT_KNOWN if isinstance(error, TransferTimeoutError) else _REFUSED


def _was_answered(error: BaseException | None) -> bool:
    """Return whether an error was a server's answer."""
    while error is not None:
        if isinstance(error, grpc.RpcError):
            return True
        error = error.__cause__ or error.__context__
    return False


def rate(num_bytes: int, seconds: float) -> str:
    """Format bytes a second in a fitting unit; empty if there were no bytes or no time."""
    if num_bytes <= 0 or seconds <= 0:
        return ""
    return f"{shown_bytes(num_bytes / seconds)}/s"


def shown_time(time: Timestamp, *, now: datetime | None = None) -> str:
    """Format a time as ``12:31:05`` today, ``2026-11-21 12:31:05`` on another day, in this
    machine's time zone; a dash where it is not set."""
    if not time.seconds:
        return "-"
    here = time.ToDatetime(tzinfo=UTC).astimezone()
    today = (now or datetime.now(UTC)).astimezone().date()
    return here.strftime("%H:%M:%S" if here.date() == today else "%Y-%m-%d %H:%M:%S")
