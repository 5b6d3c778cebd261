"""``grpc.aio`` server, as every Weft server process has it.

Imported by server processes only: trainers do not have the packages for
health, reflection and channelz.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_channelz.v1 import channelz  # type: ignore[import-untyped]
from grpc_channelz.v1 import channelz_pb2 as _channelz_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health_aio  # type: ignore[import-untyped]

from weft_rl.contract.errors import InvalidRequestError, NotReadyError
from weft_rl.descriptors import bounded
from weft_rl.rpc.channel import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MAX_MESSAGE_BYTES
from weft_rl.rpc.inbound import EdgeInterceptor
from weft_rl.rpc.reflection import add_reflection
from weft_rl.rpc.security.credentials import (
    NO_CREDENTIALS,
    Credentials,
    is_loopback,
    look_again,
)
from weft_rl.rpc.security.guard import AccessFile, Guard

_log = logging.getLogger(__name__)
_CHANNELZ: Final = _channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name

#: Longest that a TLS handshake may take, and that a connection without calls is kept.
HANDSHAKE_SECONDS: Final = 10
IDLE_SECONDS: Final = 600
#: Enough for a thousand replicas, each with a connection for its agent and one for each rank. Fewer
#: where the process may not open so many files.
MAX_CONNECTIONS: Final = 16_384
MAX_STREAMS_PER_CONNECTION: Final = 1_024

SERVER_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Below the clients' interval, or they are cut off with "Too many pings". (The
    # similar min_recv_ping_interval name is silently ignored.)
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    # Two servers on one port would share the calls between them.
    ("grpc.so_reuseport", 0),
    # Connections end that do not complete the handshake in time, or ask nothing for long; and
    # there are at most so many.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
]
#: Options of the port that serves health alone, and asks for no credentials.
HEALTH_OPTIONS: Final[list[tuple[str, int]]] = list(
    {
        **dict(SERVER_OPTIONS),
        "grpc.max_receive_message_length": 1024,
        "grpc.max_allowed_incoming_connections": 256,
        "grpc.max_concurrent_streams": 16,
    }.items()
)


@dataclass(frozen=True)
class Servicer:
    """Service to add: its full name, implementation, and generated adder."""

    name: str
    implementation: Any
    add: Callable[[Any, grpc.aio.Server], None]


@dataclass(frozen=True)
class WeftServer:
    """Server that is not started yet, and its health service."""

    server: grpc.aio.Server
    health: health_aio.HealthServicer

    async def set_health(self, service: str, *, serving: bool) -> None:
        """Set whether ``service`` ("" is the process) is fit to be called."""
        status = health_pb2.HealthCheckResponse
        await self.health.set(service, status.SERVING if serving else status.NOT_SERVING)


@dataclass(frozen=True, kw_only=True)
class Security:
    """Security settings of a server: credentials, access rules, insecure mode."""

    credentials: Credentials = NO_CREDENTIALS
    access: AccessFile | None = None
    """Access rules; None where everybody may call."""
    insecure: bool = False
    """True if it may serve everybody on an address that others reach."""

    def look_again(self) -> None:
        """Read the files of rules, certificates and tokens again, as SIGHUP asks a server to. What
        changes is used without being asked; what cannot be used is logged."""
        look_again()
        if self.access is not None:
            self.access.look_again()
        _log.info("told to read the files of rules, certificates and tokens again")


async def make_server(
    servicers: Sequence[Servicer],
    security: Security | None = None,
    *,
    on_refused: Callable[[str], None] | None = None,
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    eighths: int = 4,
) -> WeftServer:
    """Build a server of ``servicers`` with health and reflection.

    Where everybody may call, channelz is added, which knows no callers.

    Every service, and "" for the process, starts as SERVING. The caller binds
    and starts it.

    Args:
        on_refused: Called with the reason of each call that is answered with an error.
        max_request_bytes: Largest request that is read.
        eighths: Share of the open files that this process may have, which connections take at
            most, whoever makes them; see ``descriptors.bounded``.
    """
    access = security.access if security else None
    guard = Guard(access)
    options = {
        **_within_limit(SERVER_OPTIONS, eighths),
        "grpc.max_receive_message_length": max_request_bytes,
    }
    server = grpc.aio.server(
        interceptors=[EdgeInterceptor(guard, on_refused)], options=list(options.items())
    )
    for servicer in servicers:
        servicer.add(servicer.implementation, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [s.name for s in servicers] + ["grpc.health.v1.Health"]
    if access is None:
        channelz.add_channelz_servicer(server)
        names.append(_CHANNELZ)
    add_reflection(server, names)
    made = WeftServer(server, health)
    for name in ("", *(s.name for s in servicers)):
        await made.set_health(name, serving=True)
    return made


def _within_limit(options: Sequence[tuple[str, int]], eighths: int) -> dict[str, int]:
    """Return a server's options, with no more connections than this process has files for."""
    known = dict(options)
    name = "grpc.max_allowed_incoming_connections"
    return {**known, name: bounded(known[name], eighths)}


def bind(server: grpc.aio.Server, listen: str, security: Security | None = None) -> int:
    """Bind a server to ``HOST:PORT`` (port 0 picks a free one); returns the port.

    Raises:
        NotReadyError: The address cannot be listened on, most often because
            another process does.
        InvalidRequestError: Others reach the address, and nobody would be asked who he is;
            or a file of the credentials cannot be used.
    """
    security = security or Security()
    credentials, access = security.credentials, security.access
    check_exposure(listen, security)
    try:
        if credentials.tls_cert:
            ask = access is not None and access.access.by_certificate
            port = server.add_secure_port(listen, credentials.server_credentials(ask=ask))
        else:
            port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise _cannot_listen(listen) from error
    if port == 0:
        raise _cannot_listen(listen)
    return port


def check_listen(listen: str, security: Security | None = None) -> None:
    """Refuse an address that cannot be listened on now, before its server is ready.

    ``bind`` has the last word.

    Args:
        listen: HOST:PORT; empty for none.
        security: Settings of a server that asks its callers who they are; None for others.

    Raises:
        NotReadyError, InvalidRequestError: As ``bind``.
    """
    if not listen:
        return
    if security is not None:
        check_exposure(listen, security, says=False)
    host, _, port = listen.rpartition(":")
    if port == "0":
        return
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _cannot_listen(listen) from error


async def serve_health(made: WeftServer, listen: str) -> tuple[grpc.aio.Server, int]:
    """Serve the health of ``made``, and nothing else, on a plaintext port.

    For probes that speak no TLS. Returns the server and its port.

    Raises:
        NotReadyError: The address cannot be listened on.
    """
    server = grpc.aio.server(options=list(_within_limit(HEALTH_OPTIONS, 1).items()))
    health_pb2_grpc.add_HealthServicer_to_server(made.health, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        await server.stop(None)
        raise _cannot_listen(listen) from error
    await server.start()
    return server, port


def check_exposure(listen: str, security: Security, *, says: bool = True) -> None:
    """Refuse to serve strangers, unless that is wanted; then log it once.

    Args:
        says: Whether to log it now.

    Raises:
        InvalidRequestError: Names what is missing, and how to do without.
    """
    is_guarded = bool(security.credentials.tls_cert) and security.access is not None
    if security.access is not None and not is_guarded:
        needs_tls = security.access.access.by_certificate or not is_loopback(listen)
        if needs_tls:
            raise InvalidRequestError(
                f"{listen} asks callers who they are, and has no certificate of its own: give "
                "--tls-cert and --tls-key"
            )
    if is_guarded or is_loopback(listen):
        return
    if not security.insecure:
        raise InvalidRequestError(
            f"others reach {listen}, and would be asked nothing: give --tls-cert, --tls-key and "
            "--access (docs/start.md), listen on 127.0.0.1, or say --insecure"
        )
    if says:
        _log.warning("%s serves everybody who reaches it: --insecure", listen)


def _cannot_listen(listen: str) -> NotReadyError:
    return NotReadyError(
        f"cannot listen on {listen}: another process has the port, or the address is not of this "
        "machine",
        reason="ADDRESS_IN_USE",
    )
