"""Which address of this machine its peers can reach."""

from __future__ import annotations

import socket

from weft.contract.errors import InvalidRequestError


def split_target(target: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT`` as host and port.

    Raises:
        ValueError: Not of that form.
    """
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ValueError(f"{target!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


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


def local_address_towards(target: str) -> str:
    """The address that this machine's routes give packets to ``HOST:PORT``.

    Nothing is sent: a datagram socket is connected, which only chooses a route.
    """
    host, port = split_target(target)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
