"""``weft coordinator``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from weft_rl.cli.server_options import (
    Access,
    Health,
    Insecure,
    LogFormat,
    LogLevel,
    Metrics,
    MetricsAuth,
    Traces,
    announce,
    configure_logging,
    raise_file_limit,
)
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.telemetry.config import TelemetryConfig

_VERSIONS = "Versions and policies"


def _seconds(text: str) -> Any:
    return typer.Option(metavar="SECONDS", help=text, rich_help_panel="When a process is given up")


def coordinator(
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 picks a free one."),
    ] = CoordinatorConfig.listen,
    catalog: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="SQLite file of what outlives a restart: versions, leases, history.",
        ),
    ] = Path("weft.db"),
    recover: Annotated[
        bool,
        typer.Option(
            "--recover",
            help="Take an empty catalog for that of a pool whose own was lost: the first replica "
            "or trainer that comes back says which, and what it holds is served.",
        ),
    ] = CoordinatorConfig.recover,
    retain_versions: Annotated[
        int,
        typer.Option(
            metavar="VERSIONS",
            help="Number of newest versions of each adapter that can still be requested; "
            "`weft retain` sets it for one adapter.",
            rich_help_panel=_VERSIONS,
        ),
    ] = CoordinatorConfig.retain_versions,
    max_policies_per_trainer: Annotated[
        int,
        typer.Option(
            metavar="POLICIES",
            help="Number of policies that one trainer may have at a time.",
            rich_help_panel=_VERSIONS,
        ),
    ] = CoordinatorConfig.max_policies_per_trainer,
    heartbeat_seconds: Annotated[
        float, _seconds("Interval of replicas' heartbeats.")
    ] = CoordinatorConfig.heartbeat_seconds,
    lost_after_seconds: Annotated[
        float, _seconds("A replica without a heartbeat for so long is lost.")
    ] = CoordinatorConfig.lost_after_seconds,
    lease_seconds: Annotated[
        float,
        _seconds("A trainer that does not renew its lease for so long no longer owns the policy."),
    ] = CoordinatorConfig.lease_seconds,
    stall_seconds: Annotated[
        float,
        _seconds(
            "A replica that sends heartbeats, but does not do its next step of a transfer for so "
            "long, is left out of the transfer."
        ),
    ] = CoordinatorConfig.stall_seconds,
    sender_stall_seconds: Annotated[
        float,
        _seconds(
            "A push of which nothing is sent for so long is aborted, if another push waits for its "
            "replicas."
        ),
    ] = CoordinatorConfig.sender_stall_seconds,
    max_transfer_seconds: Annotated[
        float, _seconds("Longest time of a push, from when it is its turn.")
    ] = CoordinatorConfig.max_transfer_seconds,
    access: Access = CoordinatorConfig.access,
    insecure: Insecure = CoordinatorConfig.insecure,
    metrics: Metrics = TelemetryConfig.metrics,
    metrics_auth: MetricsAuth = TelemetryConfig.metrics_auth,
    health: Health = TelemetryConfig.health,
    traces: Traces = TelemetryConfig.traces,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run the coordinator, which directs replicas and transfers."""
    configure_logging(log_level, log_format)
    from weft_rl.coordinator.server import serve
    from weft_rl.telemetry.ports import Ports

    raise_file_limit()
    config = CoordinatorConfig(
        listen=listen,
        catalog=catalog,
        recover=recover,
        lease_seconds=lease_seconds,
        heartbeat_seconds=heartbeat_seconds,
        lost_after_seconds=lost_after_seconds,
        retain_versions=retain_versions,
        stall_seconds=stall_seconds,
        sender_stall_seconds=sender_stall_seconds,
        max_transfer_seconds=max_transfer_seconds,
        max_policies_per_trainer=max_policies_per_trainer,
        credentials=Credentials.from_environment(),
        access=access,
        insecure=insecure,
        telemetry=TelemetryConfig(
            metrics=metrics, metrics_auth=metrics_auth, health=health, traces=traces
        ),
    )
    host = listen.rpartition(":")[0]

    def ready(port: int, ports: Ports) -> None:
        announce(f"listening on {host}:{port}", ports.metrics_url)
        if ports.metrics_url:
            print(f"page on {ports.metrics_url}/", flush=True)

    asyncio.run(serve(config, ready=ready))
