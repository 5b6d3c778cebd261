"""Options of a process's telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.rpc.channel import split_target


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Ports beside that of the services, and traces; none by default.

    Raises:
        InvalidRequestError: An option cannot be; names it.
    """

    metrics: str = ""
    """HOST:PORT of metrics, ``/healthz`` and a coordinator's page over HTTP."""
    metrics_auth: bool = False
    """True if metrics are shown only to callers who may inspect."""
    health: str = ""
    """HOST:PORT of a plaintext port that serves grpc.health.v1 alone."""
    traces: bool = False
    """True if spans are exported by OTLP, to where the environment says."""

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
