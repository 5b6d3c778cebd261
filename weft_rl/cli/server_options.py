"""Options and preparations that both servers, coordinator and replica, have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from weft_rl import logs
from weft_rl.cli.console.options import SECURITY
from weft_rl.descriptors import WANTED, raise_file_limit

__all__ = ["WANTED", "raise_file_limit"]

#: Heading of these options in the help.
TELEMETRY: Final = "Logs, metrics and traces"


def _telemetry(*names: str, text: str, metavar: str | None = None, envvar: str = "") -> Any:
    return typer.Option(
        *names, metavar=metavar, envvar=envvar or None, help=text, rich_help_panel=TELEMETRY
    )


LogLevel = Annotated[
    str,
    _telemetry(
        "--log-level", metavar="LEVEL", envvar="WEFT_LOG_LEVEL", text="debug, info or warning."
    ),
]
LogFormat = Annotated[
    logs.LogFormat,
    _telemetry("--log-format", envvar="WEFT_LOG_FORMAT", text="Log lines as text or as JSON."),
]
Metrics = Annotated[
    str,
    _telemetry(
        metavar="HOST:PORT",
        text="Serve Prometheus metrics and /healthz over HTTP here; a coordinator also serves its "
        "web page. Default: nowhere.",
    ),
]
MetricsAuth = Annotated[
    bool,
    _telemetry(
        "--metrics-auth",
        text="Answer there only callers with the role inspect: by their certificate, or by their "
        "token as HTTP Basic password.",
    ),
]
Health = Annotated[
    str,
    _telemetry(
        metavar="HOST:PORT",
        text="Serve only grpc.health.v1 here, in plaintext, for probes. Default: nowhere.",
    ),
]
Traces = Annotated[
    bool,
    _telemetry(
        "--traces",
        text="Export OpenTelemetry spans by OTLP over gRPC, as the OTEL_ variables say. Needs the "
        "extra 'tracing'.",
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
