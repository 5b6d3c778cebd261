"""Meeting of the ranks of one trainer, which connect to each other by the application's store."""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import json
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from trainer_side.ranks.link import Channel, LinkError, RankLink
from weft_rl.rpc.channel import local_address_towards

_log = logging.getLogger(__name__)

_SECRET_BYTES: Final = 32
#: Who connects: the secret of this meeting, a rank and a channel.
_HELLO: Final = struct.Struct(f"<{_SECRET_BYTES}sIB")
#: A rank says who it is as soon as it has connected.
_HELLO_SECONDS: Final = 10.0
#: Connections that are silent, beside those of the ranks that are expected.
_MAX_STRANGERS: Final = 256
_LOOPBACK: Final = "127.0.0.1"
# Of documentation (RFC 5737): the default route leads there, and nothing is sent.
_ANYWHERE: Final = "192.0.2.1:9"
# Of Linux: the address of an interface. After its name follows a sockaddr_in.
_SIOCGIFADDR: Final = 0x8915
_IFREQ: Final = struct.Struct("<16s4x4s232x")


def meet(store: Any, rank: int, size: int, deadline: float) -> RankLink:
    """Connect to every other rank; collective, blocks until all are there.

    Args:
        store: Store of the application (``torch.distributed.Store``), under a prefix that was never
            used. Any process that reads it can take part.
        deadline: ``time.monotonic()`` seconds.

    Raises:
        LinkError: Not all came in time, one cannot be reached, or the store is gone.
    """
    sockets: dict[tuple[Channel, int], socket.socket] = {}
    try:
        with closing(_listen(store)) as listener:
            _write(store, str(rank), json.dumps(listener.getsockname()[:2]))
            if rank == 0:
                _write(store, "secret", secrets.token_hex(_SECRET_BYTES))
            secret = bytes.fromhex(_read(store, "secret", deadline))
            for other in range(rank):
                address = tuple(json.loads(_read(store, str(other), deadline)))
                for channel in _channels(other):
                    hello = _HELLO.pack(secret, rank, channel)
                    sockets[channel, other] = _connect(other, address, hello, deadline)
            expected = {
                (channel, other) for other in range(rank + 1, size) for channel in _channels(rank)
            }
            for key, connection in _accepted(listener, secret, expected, deadline):
                sockets[key] = connection
        for each in sockets.values():
            # A message waits for an answer: it must not wait for more to be sent with it.
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanished says nothing.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException as error:
        for each in sockets.values():
            each.close()
        if isinstance(error, OSError):
            raise LinkError(f"this rank cannot connect to the others: {error}") from error
        raise
    return RankLink(sockets)


def _channels(lower: int) -> tuple[Channel, ...]:
    """Return the channels between a rank and any higher one."""
    return tuple(Channel) if lower == 0 else (Channel.PAIRS,)


def _write(store: Any, key: str, value: str) -> None:
    try:
        store.set(key, value)
    except RuntimeError as error:
        raise LinkError(f"the store of torch.distributed fails: {error}") from error


def _read(store: Any, key: str, deadline: float) -> str:
    left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    who = "rank 0" if key == "secret" else f"rank {key}"
    try:
        store.wait([key], left)
        return str(store.get(key), "utf-8")
    except RuntimeError as error:
        raise LinkError(f"{who} did not come in time: {error}") from error


def _connect(other: int, address: tuple[str, int], hello: bytes, deadline: float) -> socket.socket:
    left = max(0.001, deadline - time.monotonic())
    try:
        connection = socket.create_connection(address, left)
        try:
            connection.sendall(hello)
        except BaseException:
            connection.close()
            raise
    except OSError as error:
        raise LinkError(f"rank {other} cannot be reached at {address}: {error}") from error
    return connection


def _accepted(
    listener: socket.socket, secret: bytes, expected: set[tuple[Channel, int]], deadline: float
) -> Iterator[tuple[tuple[Channel, int], socket.socket]]:
    """Yield connections of expected ranks, as they say who they are.

    Others are turned away, however slowly they speak. Silent connections are bounded in number and
    in time.
    """
    with _pollable(listener) as (poll, arrivals):
        while expected:
            now = time.monotonic()
            _drop_silent(poll, arrivals, now, len(expected) + _MAX_STRANGERS)
            if now >= deadline:
                missing = ", ".join(map(str, sorted({rank for _, rank in expected})))
                raise LinkError(f"rank {missing} did not connect in time")
            oldest = next(iter(arrivals.values()), None)
            until = min(deadline, oldest.until) if oldest else deadline
            for number, _ in poll.poll((until - now) * 1000 + 1):
                if number == listener.fileno():
                    _take(listener, poll, arrivals)
                    continue
                arrival = arrivals[number]
                if arrival.hears_more():
                    continue
                poll.unregister(number)
                del arrivals[number]
                key = _who(bytes(arrival.said), secret)
                if key in expected:
                    expected.discard(key)
                    yield key, arrival.connection
                else:
                    _log.warning("turned away a connection that is no rank's of this trainer")
                    arrival.connection.close()


@dataclass
class _Arrival:
    """Connection of a peer that has not yet said who it is."""

    connection: socket.socket
    until: float
    """Time until which it may be silent, ``time.monotonic()``."""
    said: bytearray = field(default_factory=bytearray)

    def hears_more(self) -> bool:
        """Read more of the greeting; return whether it is incomplete. No byte after it is read."""
        try:
            heard = self.connection.recv(_HELLO.size - len(self.said))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said += heard
        return bool(heard) and len(self.said) < _HELLO.size


def _take(listener: socket.socket, poll: select.poll, arrivals: dict[int, _Arrival]) -> None:
    try:
        connection, _ = listener.accept()
    except ConnectionAbortedError:  # it has gone again
        return
    connection.setblocking(False)
    arrivals[connection.fileno()] = _Arrival(connection, time.monotonic() + _HELLO_SECONDS)
    poll.register(connection, select.POLLIN)


def _drop_silent(poll: select.poll, arrivals: dict[int, _Arrival], now: float, most: int) -> None:
    """Close connections that were silent for too long, and the oldest beyond ``most``."""
    for number, arrival in list(arrivals.items()):  # the oldest first
        if now < arrival.until and len(arrivals) <= most:
            return
        _log.debug("turned away a connection that does not say whose it is")
        poll.unregister(number)
        del arrivals[number]
        arrival.connection.close()


@contextmanager
def _pollable(
    listener: socket.socket,
) -> Iterator[tuple[select.poll, dict[int, _Arrival]]]:
    poll, arrivals = select.poll(), dict[int, _Arrival]()
    poll.register(listener, select.POLLIN)
    try:
        yield poll, arrivals
    finally:
        for arrival in arrivals.values():
            arrival.connection.close()


def _who(said: bytes, secret: bytes) -> tuple[Channel, int] | None:
    if len(said) < _HELLO.size:
        return None
    shown, rank, channel = _HELLO.unpack(said)
    if not hmac.compare_digest(shown, secret) or channel not in set(Channel):
        return None
    return Channel(channel), rank


def _listen(store: Any) -> socket.socket:
    spans_hosts = _spans_hosts()
    for host in _hosts(store):
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            if spans_hosts and ipaddress.ip_address(address[0]).is_loopback:
                continue
            return socket.create_server((str(address[0]), 0), family=family, backlog=1024)
        except (OSError, ValueError) as error:  # a name that is none is a ValueError
            _log.info("cannot listen at %s: %s", host, error)
    raise LinkError(
        "this rank found no address that the others may reach it at; GLOO_SOCKET_IFNAME names the "
        "network interface to use"
    )


def _spans_hosts() -> bool:
    """Return whether ranks are known to be on several hosts: torchrun says so."""
    size, here = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    return size.isdigit() and here.isdigit() and int(here) < int(size)


def _hosts(store: Any) -> Iterator[str]:
    """Yield addresses at which other ranks may reach this one, best first.

    The choice is gloo's, except that a route to the application's store counts more than the host's
    own name, which often is loopback's.
    """
    for interface in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if interface:
            try:
                yield _address_of(interface)
            except OSError as error:
                _log.warning("GLOO_SOCKET_IFNAME names %s: %s", interface, error)
    if towards := _store_host(store) or os.environ.get("MASTER_ADDR"):
        try:
            yield local_address_towards(f"[{towards}]:1" if ":" in towards else f"{towards}:1")
        except (OSError, ValueError) as error:
            _log.info("no route to %s: %s", towards, error)
    yield socket.gethostname()
    try:
        yield local_address_towards(_ANYWHERE)
    except OSError as error:
        _log.info("no route to other hosts: %s", error)
    yield _LOOPBACK


def _store_host(store: Any) -> str | None:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", None)
    return host if isinstance(host, str) and host else None


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = interface.encode()[:15].ljust(_IFREQ.size, b"\0")
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
    return socket.inet_ntoa(_IFREQ.unpack(answer)[1])
