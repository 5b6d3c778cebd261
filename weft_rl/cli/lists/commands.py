"""The commands that look back, and on: versions, transfers, watch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator, Json, OptionalPolicyName

Limit = Annotated[int, typer.Option(help="How many at most; the newest.", min=1, max=100_000)]


class Purpose(StrEnum):
    """Purpose of a transfer."""

    PUSH = "push"
    CLONE = "clone"
    RESTORE = "restore"
    ROLLBACK = "rollback"


def add_lists(app: typer.Typer) -> None:
    """Add the commands of this module, after those that ``app`` has."""
    for command in (versions, transfers, events, watch):
        app.command()(command)


def versions(
    policy: OptionalPolicyName = "",
    limit: Limit = 20,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Show versions, newest first: who pushed them, where they stand, what failed.

    The limit is each policy's.
    """
    from weft_rl.cli.lists.versions import show_versions

    show_versions(coordinator, policy, limit=limit, json_output=json_output)


def transfers(
    purpose: Annotated[
        Purpose | None, typer.Option(help="Only those for this; default: all.")
    ] = None,
    limit: Limit = 20,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Show transfers under way, then the last 100 that ended: pushes, clones and the like."""
    from weft_rl.cli.lists.transfers import show_transfers

    wanted = purpose.value if purpose else ""
    show_transfers(coordinator, wanted, limit=limit, json_output=json_output)


def events(
    limit: Limit = 50, coordinator: Coordinator = DEFAULT_COORDINATOR, json_output: Json = False
) -> None:
    """Print what happened last, oldest first.

    The coordinator has the last 1,000 events in memory, and begins anew when it is restarted;
    what was before is in weft versions and weft transfers.
    """
    from weft_rl.cli.lists.events import show_events

    show_events(coordinator, limit=limit, json_output=json_output)


def watch(coordinator: Coordinator = DEFAULT_COORDINATOR, json_output: Json = False) -> None:
    """Print events as they come, until interrupted; a coordinator that is away is awaited.

    What happened before is in weft events.
    """
    from weft_rl.cli.lists.events import watch_events

    watch_events(coordinator, json_output=json_output)
