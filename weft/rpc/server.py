"""A grpc.aio server as every Weft server process has it.

Imported by server processes only: trainers do not have the packages for
health, reflection and channelz.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_channelz.v1 import channelz  # type: ignore[import-untyped]
from grpc_channelz.v1 import channelz_pb2 as _channelz_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health_aio  # type: ignore[import-untyped]

from weft.contract.errors import NotReadyError
from weft.rpc.channel import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MAX_MESSAGE_BYTES
from weft.rpc.inbound import ErrorInterceptor
from weft.rpc.reflection import add_reflection

_CHANNELZ: Final = _channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name

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
]


@dataclass(frozen=True)
class Servicer:
    """A service to add: its full name, implementation, and generated adder."""

    name: str
    implementation: Any
    add: Callable[[Any, grpc.aio.Server], None]


@dataclass(frozen=True)
class WeftServer:
    """A server that is not started yet, and its health service."""

    server: grpc.aio.Server
    health: health_aio.HealthServicer

    async def set_health(self, service: str, *, serving: bool) -> None:
        """Say whether ``service`` ("" is the process) is fit to be called."""
        status = health_pb2.HealthCheckResponse
        await self.health.set(service, status.SERVING if serving else status.NOT_SERVING)


async def make_server(servicers: Sequence[Servicer]) -> WeftServer:
    """Build a server of ``servicers`` with health, reflection and channelz.

    Every service, and "" for the process, starts as SERVING. The caller binds
    and starts it.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
    for servicer in servicers:
        servicer.add(servicer.implementation, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    channelz.add_channelz_servicer(server)
    names = [s.name for s in servicers] + ["grpc.health.v1.Health", _CHANNELZ]
    add_reflection(server, names)
    made = WeftServer(server, health)
    for name in ("", *(s.name for s in servicers)):
        await made.set_health(name, serving=True)
    return made


def bind(server: grpc.aio.Server, listen: str) -> int:
    """Take the port of ``HOST:PORT`` (0 picks a free one); returns the port.

    Raises:
        NotReadyError: The address cannot be listened on, most often because
            another process does.
    """
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise _cannot_listen(listen) from error
    if port == 0:
        raise _cannot_listen(listen)
    return port


def _cannot_listen(listen: str) -> NotReadyError:
    return NotReadyError(
        f"cannot listen on {listen}: another process has the port, or the address is not of this "
        "machine",
        reason="ADDRESS_IN_USE",
    )
