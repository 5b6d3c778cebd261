"""The operator's orders as commands: rollback, pin, forget, cordon, drain and the like."""

from __future__ import annotations

from typing import Annotated

import typer

from weft_rl.cli.console.options import (
    DEFAULT_COORDINATOR,
    MAX_VERSION,
    AdapterName,
    Coordinator,
    Json,
    PolicyName,
    ReplicaId,
)
from weft_rl.contract.sleep import DEFAULT_REQUESTS_SECONDS

VersionName = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="Which version: math@3, or math 3.")
]
VersionNumber = Annotated[
    int | None, typer.Argument(metavar="VERSION", hidden=True, min=1, max=MAX_VERSION)
]
Reason = Annotated[str, typer.Option(help="Why, for people.")]


def add_orders(app: typer.Typer) -> None:
    """Add the commands of this module, after those that ``app`` has."""
    about_versions = (rollback, pin, retire, retain, forget)
    about_replicas = (cordon, quarantine, uncordon, drain, sleep, wake)
    for order in (*about_versions, *about_replicas, base):
        app.command()(order)


def rollback(
    policy: PolicyName,
    to: Annotated[
        int, typer.Option("--to", help="Version to serve again.", min=0, max=MAX_VERSION)
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it.", min=1)] = 300.0,
) -> None:
    """Serve a former version again: an adapter's alias, or a base that replicas retain."""
    from weft_rl.cli.orders.versions import roll_back

    roll_back(coordinator, policy, to, timeout_seconds=timeout, json_output=json_output)


def pin(
    name: VersionName,
    number: VersionNumber = None,
    off: Annotated[bool, typer.Option("--off", help="Let it be retired again.")] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Keep a version of an adapter from being retired, or the copies of a base."""
    from weft_rl.cli.orders import versions

    version = versions.parse_version(name, number)
    versions.pin(coordinator, version, pinned=not off, json_output=json_output)


def retire(
    name: VersionName,
    number: VersionNumber = None,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Retire a version of an adapter now; its alias must stand for another."""
    from weft_rl.cli.orders import versions

    versions.retire(coordinator, versions.parse_version(name, number), json_output=json_output)


def retain(
    policy: AdapterName,
    number: Annotated[
        int,
        typer.Argument(
            metavar="VERSIONS",
            help="How many of the newest are kept; 0: as the coordinator's --retain.",
            min=0,
            max=1000,
        ),
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Keep so many versions of an adapter, from now on and over restarts."""
    from weft_rl.cli.orders import versions

    versions.retain(coordinator, policy, number, json_output=json_output)


def forget(
    policy: AdapterName,
    force: Annotated[
        bool,
        typer.Option("--force", help="End its owner's lease, too, and what it is pushing."),
    ] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """End an adapter: all its versions are retired, and replicas drop them, also from disk.

    Its numbers are never used again: a later push of the name begins above them.
    """
    from weft_rl.cli.orders import versions

    versions.forget(coordinator, policy, by_force=force, json_output=json_output)


def cordon(
    replica: ReplicaId,
    reason: Reason = "",
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Take a replica out of service; it keeps up with pushes and can come back at once."""
    from weft_rl.cli.orders import replicas

    replicas.cordon(coordinator, replica, reason, json_output=json_output)


def quarantine(
    replica: ReplicaId,
    reason: Annotated[str, typer.Option(help="Why, for people.")],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Take a replica out of service and out of transfers; it refuses new requests."""
    from weft_rl.cli.orders import replicas

    replicas.quarantine(coordinator, replica, reason, json_output=json_output)


def uncordon(
    replica: ReplicaId,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Put a replica back into service, cordoned or quarantined."""
    from weft_rl.cli.orders import replicas

    replicas.uncordon(coordinator, replica, json_output=json_output)


def drain(
    replica: ReplicaId,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds for its requests and transfers to end.", min=0, max=86_400),
    ] = 300.0,
    reason: Reason = "",
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Let a replica finish what runs, leave the pool and end; returns when it has left."""
    from weft_rl.cli.orders import replicas

    replicas.drain(coordinator, replica, reason, timeout_seconds=timeout, json_output=json_output)


def sleep(
    replica: ReplicaId,
    level: Annotated[
        int,
        typer.Option(
            help="vLLM's: 1 moves the weights to host memory, 2 discards them.", min=1, max=2
        ),
    ] = 1,
    abort: Annotated[
        bool, typer.Option("--abort", help="Abort running requests, rather than let them finish.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds for its requests to end.", min=0, max=86_400)
    ] = DEFAULT_REQUESTS_SECONDS,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Put a replica to sleep: its GPU's memory is free until weft wake; returns when it sleeps.

    It must have been started with --enable-sleep. Nothing is routed to it meanwhile, it refuses
    requests, and it keeps up with pushes. At level 2 it wakes with the base that was pushed since,
    or else with a copy: its own, its checkpoint's files, or a peer's.
    """
    from weft_rl.cli.orders import replicas

    replicas.sleep(
        coordinator,
        replica,
        level=level,
        aborts=abort,
        timeout_seconds=timeout,
        json_output=json_output,
    )


def wake(
    replica: ReplicaId,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Wake a replica, whoever put it to sleep; returns when it is awake.

    It is routed to once it has what the pool serves. One that is awake is left alone.
    """
    from weft_rl.cli.orders import replicas

    replicas.wake(coordinator, replica, json_output=json_output)


def base(
    rebind: Annotated[
        bool,
        typer.Option(
            "--rebind",
            help="Let the next replica bind the pool to its model; what was served is retired.",
        ),
    ] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Show which base model the pool is bound to, or let it be bound to another.

    Only while no replica is in contact and no push runs. Version numbers keep counting.
    """
    from weft_rl.cli.orders import base_model

    if rebind:
        base_model.rebind(coordinator, json_output=json_output)
    else:
        base_model.show(coordinator, json_output=json_output)
