"""Which address of this machine its peers can reach."""

from __future__ import annotations

import socket


def split_target(target: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT`` as host and port.

    Raises:
        ValueError: Not of that form.
    """
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ValueError(f"{target!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def local_address_towards(target: str) -> str:
    """The address that this machine's routes give packets to ``HOST:PORT``.

    Nothing is sent: a datagram socket is connected, which only chooses a route.
    """
    host, port = split_target(target)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
