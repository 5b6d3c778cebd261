"""``weft coordinator``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from weft_rl.cli.servers.descriptors import allow_descriptors
from weft_rl.cli.servers.options import (
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
)
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.telemetry.config import TelemetryConfig


def coordinator(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 picks a free one.")
    ] = CoordinatorConfig.listen,
    catalog: Annotated[
        Path, typer.Option(help="SQLite file that outlives restarts: versions, leases, history.")
    ] = Path("weft.db"),
    lease_seconds: Annotated[
        float, typer.Option(help="Time to live of a policy's lease; trainers renew it.")
    ] = CoordinatorConfig.lease_seconds,
    heartbeat_seconds: Annotated[
        float, typer.Option(help="How often replicas report.")
    ] = CoordinatorConfig.heartbeat_seconds,
    lost_after_seconds: Annotated[
        float, typer.Option(help="Silence after which a replica is given up.")
    ] = CoordinatorConfig.lost_after_seconds,
    retain: Annotated[
        int, typer.Option(help="Versions kept of each adapter that `weft retain` says nothing of.")
    ] = CoordinatorConfig.retain,
    stall_seconds: Annotated[
        float,
        typer.Option(
            help="Silence after which a replica whose thread hangs is given up for a transfer."
        ),
    ] = CoordinatorConfig.stall_seconds,
    sender_stall_seconds: Annotated[
        float,
        typer.Option(help="The same of a trainer, while another push waits for its replicas."),
    ] = CoordinatorConfig.sender_stall_seconds,
    max_transfer_seconds: Annotated[
        float, typer.Option(help="Longest that a push may take once it is its turn.")
    ] = CoordinatorConfig.max_transfer_seconds,
    max_policies_per_trainer: Annotated[
        int, typer.Option(help="Policies that one trainer may have at a time.")
    ] = CoordinatorConfig.max_policies_per_trainer,
    access: Access = CoordinatorConfig.access,
    insecure: Insecure = CoordinatorConfig.insecure,
    metrics: Metrics = TelemetryConfig.metrics,
    metrics_auth: MetricsAuth = TelemetryConfig.metrics_auth,
    health: Health = TelemetryConfig.health,
    traces: Traces = TelemetryConfig.traces,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run the coordinator: registry, versions, transfers, commit."""
    configure_logging(log_level, log_format)
    from weft_rl.coordinator.server import serve
    from weft_rl.telemetry.ports import Ports

    allow_descriptors()
    config = CoordinatorConfig(
        listen=listen,
        catalog=catalog,
        lease_seconds=lease_seconds,
        heartbeat_seconds=heartbeat_seconds,
        lost_after_seconds=lost_after_seconds,
        retain=retain,
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
