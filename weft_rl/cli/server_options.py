"""Options and preparations that both servers, coordinator and replica, have."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Annotated, Final

import typer

from weft_rl import logs
from weft_rl.cli.console.options import SECURITY

#: Headings of the options in the help; those without one are shown first.
TELEMETRY: Final = "Logs, metrics and traces"

#: Open files that a server may need: each connection of a coordinator (see ``weft_rl.rpc.server``)
#: and each version of a replica has one, each trainer's side group eight.
WANTED: Final = 65_536

LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        envvar="WEFT_LOG_LEVEL",
        metavar="LEVEL",
        help="debug, info or warning.",
        rich_help_panel=TELEMETRY,
    ),
]
LogFormat = Annotated[
    logs.LogFormat,
    typer.Option(
        "--log-format",
        envvar="WEFT_LOG_FORMAT",
        help="Log lines as text or as JSON.",
        rich_help_panel=TELEMETRY,
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve Prometheus metrics and /healthz over HTTP here; a coordinator also serves its "
        "web page. Default: nowhere.",
        rich_help_panel=TELEMETRY,
    ),
]
MetricsAuth = Annotated[
    bool,
    typer.Option(
        "--metrics-auth",
        help="Answer there only callers with the role inspect: by their certificate, or by their "
        "token as HTTP Basic password.",
        rich_help_panel=TELEMETRY,
    ),
]
Health = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve only grpc.health.v1 here, in plaintext, for probes. Default: nowhere.",
        rich_help_panel=TELEMETRY,
    ),
]
Traces = Annotated[
    bool,
    typer.Option(
        "--traces",
        help="Export OpenTelemetry spans by OTLP over gRPC, as the OTEL_ variables say. Needs the "
        "extra 'tracing'.",
        rich_help_panel=TELEMETRY,
    ),
]

Access = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file of which certificates or tokens may call what; needs --tls-cert. Read "
        "again when it changes.",
        rich_help_panel=SECURITY,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Serve every caller although the address is not this machine's loopback.",
        rich_help_panel=SECURITY,
    ),
]


def announce(line: str, metrics_url: str) -> None:
    """Print that a server is ready, and the URL of its metrics, if it has one."""
    print(line, flush=True)
    if metrics_url:
        print(f"metrics on {metrics_url}/metrics", flush=True)


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


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files, which is 1024 in most shells, as far as the
    hard limit allows. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
