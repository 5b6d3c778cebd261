"""Options that both servers have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weft_rl import logs

LogLevel = Annotated[
    str, typer.Option("--log-level", envvar="WEFT_LOG_LEVEL", help="debug, info or warning.")
]
LogFormat = Annotated[
    logs.LogFormat,
    typer.Option("--log-format", envvar="WEFT_LOG_FORMAT", help="Lines of text, or of JSON."),
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve Prometheus metrics, /healthz and, of a coordinator, the page over HTTP here; "
        "default: nowhere.",
    ),
]
MetricsAuth = Annotated[
    bool,
    typer.Option(
        "--metrics-auth",
        help="Ask for the token, as HTTP Basic password, or the certificate of who may inspect.",
    ),
]
Health = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve grpc.health.v1 alone here, in plaintext, for probes; default: nowhere.",
    ),
]
Traces = Annotated[
    bool,
    typer.Option(
        "--traces",
        help="Export OpenTelemetry spans by OTLP over gRPC, as the OTEL_ variables say; needs the "
        "extra 'tracing'.",
    ),
]

Access = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file that says which certificates or tokens may call what; needs --tls-cert. "
        "Read again when it changes.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Serve everybody, on an address that is not this machine's loopback."
    ),
]


def announce(line: str, metrics_url: str) -> None:
    """Say on standard output that a server is ready, and where its metrics are, if anywhere."""
    print(line, flush=True)
    if metrics_url:
        print(f"metrics on {metrics_url}/metrics", flush=True)


def configure_logging(level: str, log_format: logs.LogFormat) -> None:
    """Configure logging as told, here and in the processes that this one starts."""
    try:
        logs.configure(level, log_format)
    except ValueError:
        raise typer.BadParameter(f"--log-level {level!r}: use debug, info or warning") from None
    os.environ[logs.LEVEL_VARIABLE] = level
    os.environ[logs.FORMAT_VARIABLE] = log_format
    if log_format == "json":
        logs.write_json_only()
