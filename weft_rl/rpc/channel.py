"""Channels to Weft's servers, and the addresses that they go to."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
from typing import Final

import grpc

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.rpc.renewed_channels import renewed_aio_channel, renewed_channel
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials

#: Largest message either way; whatever may be larger is sent in chunks.
MAX_MESSAGE_BYTES: Final = 4 * 2**20
#: A silent connection is probed this often, and given up ``KEEPALIVE_TIMEOUT_MS``
#: later. Servers allow twice that rate (see ``weft_rl.rpc.server``).
KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
# Of Linux: the address of an interface.
_SIOCGIFADDR: Final = 0x8915

# Unary calls that may be sent twice. CallStore is not among them (add, append);
# typed failures are never retried (see weft_rl.rpc.status).
_RETRIED: Final = {
    "weft.v1.InspectService": None,
    "weft.v1.PublishService": (
        "DescribeTarget", "AcquirePolicy", "RenewLease", "ReleasePolicy",
        "BeginTransfer", "AwaitTransfer", "AbortTransfer",
    ),
    "weft.v1.RegistryService": ("CheckReplica", "Register", "Heartbeat", "Leave"),
    "weft.v1.ReplicaService": None,
}  # fmt: skip
_RETRY_POLICY: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def _service_config() -> str:
    names: list[dict[str, str]] = []
    for service, methods in _RETRIED.items():
        if methods is None:
            names.append({"service": service})
        else:
            names += [{"service": service, "method": method} for method in methods]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]})


CHANNEL_OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted coordinator is found again within two seconds.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The control plane is next door: an http_proxy meant for the internet is
    # not on the way to it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", _service_config()),
]


def open_channel(target: str, credentials: Credentials | None = None) -> grpc.Channel:
    """Open a blocking channel to ``HOST:PORT``; connects at the first call.

    The caller closes it. Not to be carried over a fork.

    Args:
        credentials: Credentials to show; this process's (``Credentials.from_environment``) by
            default.

    Raises:
        InvalidRequestError: A file of them cannot be used.
    """
    shown = Credentials.from_environment() if credentials is None else credentials
    if shown == NO_CREDENTIALS:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return renewed_channel(target, shown, CHANNEL_OPTIONS)


def open_aio_channel(target: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """Open an asyncio channel to ``HOST:PORT``; call it on the running loop.

    The caller closes it. Arguments and errors are those of ``open_channel``.
    """
    shown = Credentials.from_environment() if credentials is None else credentials
    if shown == NO_CREDENTIALS:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return renewed_aio_channel(target, shown, CHANNEL_OPTIONS)


def split_target(target: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[V6]:PORT`` into host and port.

    Raises:
        ValueError: Not of that form.
    """
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ValueError(f"{target!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def check_listen(listen: str) -> None:
    """Refuse an address to listen on that is not HOST:PORT; port 0 is any.

    Raises:
        InvalidRequestError: It is not.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(f"listen is {listen!r}; it must be HOST:PORT")


def check_target(target: object, name: str = "coordinator") -> str:
    """Return ``target`` if it is HOST:PORT, as a user has written it under ``name``.

    Raises:
        InvalidRequestError: It has a scheme, lacks its port, or is no string.
    """
    what = f"{name}={target!r}"
    if not isinstance(target, str):
        raise InvalidRequestError(f"{what}: give HOST:PORT as a string")
    if "//" in target or target.startswith("unix:"):
        raise InvalidRequestError(f"{what}: give HOST:PORT without a scheme, as in weft:50051")
    try:
        host, port = split_target(target)
    except ValueError:
        raise InvalidRequestError(
            f"{what} names no port: give HOST:PORT, as in {target.strip(':') or 'weft'}:50051"
        ) from None
    if not 0 < port < 65536 or any(character.isspace() for character in host):
        raise InvalidRequestError(f"{what}: give a host, and a port from 1 to 65535")
    return target


def address_of_interface(name: str) -> str:
    """Return a network interface's first IPv4 address.

    Raises:
        OSError: There is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])  # after its name follows a sockaddr_in


def local_address_towards(target: str) -> str:
    """Return the address that this machine's routes give packets to ``HOST:PORT``.

    Nothing is sent: a datagram socket is connected, which only chooses a route.
    """
    host, port = split_target(target)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
