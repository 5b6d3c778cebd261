"""Options of a process's telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.options import setting
from weft_rl.rpc.channel import split_target

#: Heading of these options, and of those of logs, in the help.
TELEMETRY: Final = "Logs, metrics and traces"


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Ports beside that of the services, and traces; none by default.

    Raises:
        InvalidRequestError: An option cannot be; names it.
    """

    metrics: str = setting(
        "",
        "Serve Prometheus metrics and /healthz over HTTP here; a coordinator also serves its "
        "web page. Default: nowhere.",
        "HOST:PORT",
        panel=TELEMETRY,
    )
    metrics_auth: bool = setting(
        False,
        "Answer there only callers with the role inspect: by their certificate, or by their "
        "token as HTTP Basic password.",
        panel=TELEMETRY,
    )
    health: str = setting(
        "",
        "Serve only grpc.health.v1 here, in plaintext, for probes. Default: nowhere.",
        "HOST:PORT",
        panel=TELEMETRY,
    )
    traces: bool = setting(
        False,
        "Export OpenTelemetry spans by OTLP over gRPC, as the OTEL_ variables say. Needs the "
        "extra 'tracing'.",
        panel=TELEMETRY,
    )

    def __post_init__(self) -> None:
        for option, address in (("--metrics", self.metrics), ("--health", self.health)):
            if address:
                _check_address(option, address)
        if self.metrics_auth and not self.metrics:
            raise InvalidRequestError("--metrics-auth is about the port that --metrics opens")


def _check_address(option: str, address: str) -> None:
    try:
        _, port = split_target(address)
    except ValueError:
        port = -1
    if not 0 <= port < 65536:
        raise InvalidRequestError(
            f"{option} is {address!r}; it must be HOST:PORT (0.0.0.0:9090, 127.0.0.1:0)"
        )


#: Of a process that opens no further port.
NO_TELEMETRY: Final = TelemetryConfig()
