"""``weft coordinator`` and ``weft rollout``: the settings of their configs are their options."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rollout_side.config import RolloutConfig
from weft_rl import logs
from weft_rl.cli.console.commands import with_settings
from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.descriptors import raise_file_limit
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.telemetry.config import TELEMETRY

LogLevel = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        envvar="WEFT_LOG_LEVEL",
        help="debug, info or warning.",
        rich_help_panel=TELEMETRY,
    ),
]
LogFormat = Annotated[
    logs.LogFormat,
    typer.Option(
        envvar="WEFT_LOG_FORMAT",
        help="Log lines as text or as JSON.",
        rich_help_panel=TELEMETRY,
    ),
]


@with_settings(CoordinatorConfig)
def coordinator(
    *,
    make: Callable[..., CoordinatorConfig],
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run the coordinator, which directs replicas and transfers."""
    configure_logging(log_level, log_format)
    from weft_rl.coordinator.server import serve
    from weft_rl.telemetry.ports import Ports

    raise_file_limit()
    config = make(credentials=Credentials.from_environment())
    host = config.listen.rpartition(":")[0]

    def ready(port: int, ports: Ports) -> None:
        _announce(f"listening on {host}:{port}", ports.metrics_url)
        if ports.metrics_url:
            print(f"page on {ports.metrics_url}/", flush=True)

    asyncio.run(serve(config, ready=ready))


@with_settings(RolloutConfig)
def rollout(
    context: typer.Context,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    *,
    make: Callable[..., RolloutConfig],
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run a replica: vLLM's engine with its OpenAI server.

    It serves what trainers push. Everything after -- goes to vLLM's server, the model first.
    """
    if not context.args:
        raise typer.BadParameter("name the model after --, as in: weft rollout ... -- MODEL")
    configure_logging(log_level, log_format)
    if log_format == "json":
        logs.configure_vllm()
    raise_file_limit()
    from rollout_side.service.main import run as run_replica

    why = run_replica(
        make(coordinator=coordinator, vllm_args=context.args),
        ready=lambda grpc, http, ports: _announce(
            f"serving on {http}, gRPC on {grpc}", ports.metrics_url
        ),
    )
    print(f"ended: {why}", flush=True)


class RolloutCommand(TyperCommand):
    """Command whose further arguments, those of vLLM, come after ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; say of an unknown one where those of vLLM go."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", "")
            if type(error).__name__ != "NoSuchOption":  # typer has click's, or its own
                raise
            alike = getattr(error, "possibilities", None) or ()
            meant = f" Did you mean {' or '.join(alike)}?" if alike else ""
            raise typer.BadParameter(
                f"{option} is no option of weft rollout.{meant} Options of vLLM go after --, as "
                f"in: weft rollout -- MODEL {option}",
                ctx=ctx,
            ) from None


def configure_logging(level: str, log_format: logs.LogFormat) -> None:
    """Configure logging, here and in the processes that this one starts."""
    try:
        logs.configure(level, log_format)
    except ValueError:
        raise typer.BadParameter(f"--log-level {level!r}: use debug, info or warning") from None
    os.environ[logs.LEVEL_VARIABLE] = level
    os.environ[logs.FORMAT_VARIABLE] = log_format
    if log_format == "json":
        logs.write_json_only()


def _announce(line: str, metrics_url: str) -> None:
    """Print that a server is ready, and the URL of its metrics, if it has one."""
    print(line, flush=True)
    if metrics_url:
        print(f"metrics on {metrics_url}/metrics", flush=True)
