"""Ports of a process beside that of its services: metrics over HTTP, and health alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.rpc.security.credentials import is_loopback
from weft_rl.rpc.server import Security, WeftServer, serve_health
from weft_rl.telemetry.config import TelemetryConfig
from weft_rl.telemetry.http_server import HttpServer
from weft_rl.telemetry.metrics import MetricsText
from weft_rl.telemetry.site import Page, build_site

_log = logging.getLogger(__name__)


@dataclass
class Ports:
    """Ports that are open; 0 where one is not."""

    metrics_port: int = 0
    metrics_url: str = ""
    """URL of the metrics port; pages are beside ``/metrics``."""
    health_port: int = 0
    _http: HttpServer | None = None
    _health: grpc.aio.Server | None = None

    @classmethod
    async def open(
        cls,
        config: TelemetryConfig,
        made: WeftServer,
        registry: CollectorRegistry,
        security: Security,
        pages: Mapping[str, Page] | None = None,
    ) -> Ports:
        """Open the ports that ``config`` names.

        Args:
            made: Server whose health is served.
            registry: Registry that ``/metrics`` shows.
            pages: Further pages of the HTTP port.

        Raises:
            NotReadyError: An address cannot be listened on.
            InvalidRequestError: Nobody could ever read what is protected.
        """
        ports = cls()
        try:
            if config.health:
                ports._health, ports.health_port = await serve_health(made, config.health)
            if config.metrics:
                ports._http = _http_server(config, registry, security, pages or {})
                ports.metrics_port = ports._http.start(config.metrics)
        except BaseException:
            await ports.close()
            raise
        if config.metrics:
            scheme = "https" if security.credentials.tls_cert else "http"
            host = config.metrics.rpartition(":")[0]
            ports.metrics_url = f"{scheme}://{host}:{ports.metrics_port}"
            _log.info("metrics on %s/metrics", ports.metrics_url)
        return ports

    def look_again(self) -> None:
        """Read the files of certificates again."""
        if self._http is not None:
            self._http.look_again()

    async def close(self) -> None:
        """Close the ports. Idempotent."""
        http, self._http = self._http, None
        health, self._health = self._health, None
        if http is not None:
            await asyncio.to_thread(http.stop)
        if health is not None:
            await health.stop(0)


def _http_server(
    config: TelemetryConfig,
    registry: CollectorRegistry,
    security: Security,
    pages: Mapping[str, Page],
) -> HttpServer:
    if config.metrics_auth and security.access is None:
        raise InvalidRequestError(
            "--metrics-auth asks for the tokens or certificates of the access file: give --access"
        )
    if (
        config.metrics_auth
        and not security.credentials.tls_cert
        and not is_loopback(config.metrics)
    ):
        raise InvalidRequestError(
            f"--metrics-auth on {config.metrics}: a password is taken over TLS only, give "
            "--tls-cert and --tls-key"
        )
    own = {
        "/metrics": Page(answer=MetricsText(registry), is_protected=config.metrics_auth),
        "/healthz": Page(answer=lambda _: PlainTextResponse("ok\n"), is_protected=False),
    }
    ask = security.access is not None and security.access.access.by_certificate
    return HttpServer(build_site({**own, **pages}, security), security.credentials, ask=ask)
