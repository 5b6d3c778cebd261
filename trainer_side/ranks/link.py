"""Link between the ranks of one trainer: how they meet, and messages between them.

TCP connections of our own. A process group could carry the same, but would leave ranks waiting for
one that is gone: gloo (torch 2.13) reports a broken connection to no rank whose message was under
way, and ends nothing before its timeout. Here a rank that leaves, or dies, is noticed at once by
those that wait for it, and ``close`` ends every wait of this rank. Ranks find each other by the
application's store.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from enum import IntEnum
from typing import Any, Final

from weft_rl.ipc.connection import (
    Codec,
    Connection,
    IncomingFrame,
    OutgoingFrame,
    PeerError,
    finish,
)
from weft_rl.ipc.handshake import Handshake
from weft_rl.ipc.listener import NewConnections
from weft_rl.rpc.channel import address_of_interface, local_address_towards

_log = logging.getLogger(__name__)

#: Frames between ranks, whose kind is the number of the call that they belong to.
_FRAMES: Final = Codec[bytes](b"WEFL", 1)
# In a call's place: whoever sends this leaves, and what follows is why.
_LEAVES: Final = 2**16 - 1
# Before the reason: the rank that had it, if it is not who sends it.
_WHO: Final = struct.Struct("<i")
_SELF: Final = -1
#: A message whose length its receiver does not know has at most so many bytes.
MAX_BYTES: Final = 2**30
#: Why a rank leaves is said in at most so many bytes.
MAX_REASON_BYTES: Final = 2**13

_SECRET_BYTES: Final = 32
#: What a rank says of itself as it connects: its number, and for which traffic.
_IDENTITY: Final = "<IB"
#: Between two looks at what the store says, of a rank that waits for another.
CHECK_SECONDS: Final = 0.1
_FIRST_PAUSE_SECONDS: Final = 0.001
#: Connections that are silent, beside those of the ranks that are expected.
_MAX_STRANGERS: Final = 256
_LOOPBACK: Final = "127.0.0.1"
# Of documentation (RFC 5737): the default route leads there, and nothing is sent.
_ANYWHERE: Final = "192.0.2.1:9"


class TrafficKind(IntEnum):
    """Traffic that runs beside others. Each has connections of its own, used by one thread at a
    time."""

    STAR = 0
    """Messages between rank 0 and each other rank."""
    PAIRS = 1
    """Messages between any two ranks."""
    SUM = 2
    """Sums over the same pairs as ``STAR``, beside it."""


class LinkError(PeerError):
    """Error of a link that cannot be used any more.

    A rank is gone, says what was not asked for, or was silent until the deadline; or this rank has
    left.

    Args:
        message: Description of what has happened.
        rank: Rank that has left and said why; -1 if none has.
        reason: Reason that it has said.
    """

    def __init__(self, message: str, rank: int = -1, reason: bytes = b"") -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason


class RankLink:
    """Connections of one rank, once it has met the others; see ``meet``.

    Thread-safe between kinds of traffic. A message that fails, or is interrupted, leaves its
    connection in the middle of it, so the link is closed.

    Args:
        connections: Connections by traffic and rank; they belong to the link from now on.
        explain: Function that returns the reason that the others are told where this rank is
            interrupted; empty for none.
    """

    def __init__(
        self,
        connections: Mapping[tuple[TrafficKind, int], Connection[bytes]],
        explain: Callable[[BaseException], bytes] = lambda error: b"",
    ) -> None:
        self._connections = dict(connections)
        self._explain = explain
        self._lock = threading.Lock()  # guards the three below
        self._inside_of = dict.fromkeys(TrafficKind, 0)
        self._why_closed = ""
        #: Ranks that had said nothing of a message that was awaited as the link was closed.
        self.silent: tuple[int, ...] = ()
        self._left: tuple[int, bytes] = (-1, b"")

    @property
    def closed(self) -> bool:
        """True if this rank has left, by ``close`` or after a failure."""
        return bool(self._why_closed)

    def swap(
        self,
        traffic: TrafficKind,
        call: int,
        outgoing: Mapping[int, memoryview],
        incoming: Mapping[int, memoryview | None],
        deadline: float,
        *,
        whoever_is_there: bool = False,
    ) -> dict[int, memoryview]:
        """Send and receive messages, all at once; block until all have come and gone.

        Args:
            call: A number that the other side must say, too.
            outgoing: Bytes to send, by rank; the caller must leave them alone.
            incoming: Memory for each rank's bytes, of their length; None where only the sender
                knows the length.
            deadline: ``time.monotonic()`` seconds.
            whoever_is_there: True if nothing is sent to ranks that are gone, and their absence is
                not reported: a rank that waits for one will report it.

        Returns:
            Received bytes by rank, in the memory that was given for them if any was.

        Raises:
            LinkError: The link is closed.
        """
        with self._inside(traffic):
            send = _OptionalFrame if whoever_is_there else OutgoingFrame
            sends = [
                send(self._connections[traffic, rank], call, content)
                for rank, content in outgoing.items()
            ]
            receives = {
                rank: _Message(self._connections[traffic, rank], rank, call, out)
                for rank, out in incoming.items()
            }
            try:
                finish([*sends, *receives.values()], deadline)
            except PeerError as error:
                begun = {each.connection for each in receives.values() if each.has_begun}
                self.silent = tuple(rank for rank, each in receives.items() if not each.has_begun)
                self._note_who_left(error, traffic, begun)
                raise
            return {rank: each.content for rank, each in receives.items()}

    def check(self, traffic: TrafficKind) -> None:
        """Check that all ranks are still there, also those that were heard before they went.

        Raises:
            LinkError: A rank is gone; names it. The link is closed.
        """
        with self._inside(traffic):
            for (each, rank), connection in self._connections.items():
                if each is traffic and connection.is_ended:
                    error = LinkError(f"rank {rank} has left")
                    self._note_who_left(error, traffic, set())
                    raise error

    def close(
        self, why: str = "this rank has left the push", reason: bytes = b"", rank: int = _SELF
    ) -> None:
        """Leave the link: ranks and own threads that wait for this rank are told.

        Callable from any thread, never blocks.

        Args:
            why: Error message of later calls of this rank.
            reason: Error of the other ranks' calls, as far as they hear it: it is said where no
                message is under way, and at once or not at all.
            rank: Rank that had the reason, if this rank only heard of it.
        """
        with self._lock:
            if self.closed:
                return
            self._why_closed = why
            said = memoryview(_WHO.pack(rank) + reason)
            for (traffic, _), each in self._connections.items():
                if reason and traffic is not TrafficKind.SUM and not self._inside_of[traffic]:
                    with contextlib.suppress(PeerError):
                        OutgoingFrame(each, _LEAVES, said).advance()
            for each in self._connections.values():  # once all were told: it is noticed first
                each.shut()  # wakes who waits for it, also here
            self._close_connections()

    def _note_who_left(
        self, error: PeerError, traffic: TrafficKind, begun: set[Connection[bytes]]
    ) -> None:
        """Note the reason of a rank that has left, if it has said one.

        It is said to ranks that first noticed another's leaving, or that wait for another.

        Args:
            traffic: Traffic whose use has ended with ``error``.
            begun: Connections in the middle of a message.
        """
        if isinstance(error, LinkError) and error.reason:
            self._left = error.rank, error.reason
            return
        with self._lock:  # nobody begins to use what is read here
            for (each, rank), connection in self._connections.items():
                is_idle = self._inside_of[each] == (1 if each is traffic else 0)
                if each is TrafficKind.SUM or not is_idle or connection in begun:
                    continue
                try:
                    _Message(connection, rank, _LEAVES, None).advance()
                except LinkError as said:
                    if said.reason:
                        self._left = said.rank, said.reason
                        return
                except PeerError:
                    continue

    @contextmanager
    def _inside(self, traffic: TrafficKind) -> Iterator[None]:
        with self._lock:
            if self.closed:
                raise LinkError(self._why_closed, *self._left)
            self._inside_of[traffic] += 1
        try:
            yield
        except PeerError as error:
            rank, reason = self._left
            self.close(str(error), reason, rank)
            raise LinkError(self._why_closed, *self._left) from error  # perhaps another thread's
        except BaseException as error:
            self.close(f"this rank was interrupted: {error!r}", self._explain(error))
            raise
        finally:
            with self._lock:
                self._inside_of[traffic] -= 1
                self._close_connections()

    def _close_connections(self) -> None:
        """Close the sockets of a closed link once none is in use. Their numbers may be those of
        other files at once."""
        if self.closed and not any(self._inside_of.values()):
            for each in self._connections.values():
                each.close()


class _OptionalFrame(OutgoingFrame):
    """Message to a rank that may be gone."""

    def advance(self) -> bool:
        try:
            return super().advance()
        except PeerError:
            return True


class _Message(IncomingFrame):
    """Message of a rank on its way in, unless the rank says in its place that it leaves."""

    def __init__(
        self, connection: Connection[bytes], rank: int, call: int, out: memoryview | None
    ) -> None:
        super().__init__(connection)
        self._rank, self._call, self._wanted = rank, call, out

    def accept(self, kind: int, num_bytes: int) -> memoryview | None:
        out = self._wanted
        if kind == _LEAVES and _WHO.size < num_bytes <= _WHO.size + MAX_REASON_BYTES:
            return None
        most = MAX_BYTES if out is None else len(out)
        if kind != self._call or num_bytes > most or (out and num_bytes < most):
            raise LinkError(
                f"rank {self._rank} takes part in something else: {num_bytes} bytes of call "
                f"{kind}, where call {self._call} was awaited"
            )
        return out

    def advance(self) -> bool:
        is_whole = super().advance()
        if is_whole and self.kind == _LEAVES:
            (who,) = _WHO.unpack_from(self.content)
            who = self._rank if who == _SELF else who
            raise LinkError(f"rank {who} has left", who, bytes(self.content[_WHO.size :]))
        return is_whole


# -- meeting ---------------------------------------------------------------------------


def meet(
    store: Any,
    rank: int,
    size: int,
    deadline: float,
    check: Callable[[], None] = lambda: None,
    explain: Callable[[BaseException], bytes] = lambda error: b"",
) -> RankLink:
    """Connect to every other rank; collective, blocks until all are there.

    Args:
        store: Store of the application (``torch.distributed.Store``), under a prefix that was never
            used. Any process that reads it can take part.
        deadline: ``time.monotonic()`` seconds.
        check: Function that is called again and again meanwhile, and raises if nobody is to be
            waited for any more.
        explain: See ``RankLink``.

    Raises:
        LinkError: Not all came in time, one cannot be reached, or the store is gone.
    """
    connections: dict[tuple[TrafficKind, int], Connection[bytes]] = {}
    try:
        with closing(_listen(store)) as listener:
            _write(store, str(rank), json.dumps(listener.getsockname()[:2]))
            if rank == 0:
                _write(store, "secret", secrets.token_hex(_SECRET_BYTES))
            secret = bytes.fromhex(_read(store, "secret", deadline, check))
            handshake = Handshake(secret, _IDENTITY)
            for other in range(rank):
                address = tuple(json.loads(_read(store, str(other), deadline, check)))
                for traffic in _traffic_of(other):
                    connection = connections[traffic, other] = _connect(other, address, deadline)
                    handshake.begin(connection, rank, traffic)
            expected = {
                (traffic, other) for other in range(rank + 1, size) for traffic in _traffic_of(rank)
            }
            _accept(listener, handshake, expected, connections, deadline, check)
        for (_, other), connection in connections.items():
            if other < rank:  # once this rank has answered those that wait for it
                handshake.check_answer(connection, deadline)
            # A message waits for an answer: it must not wait for more to be sent with it.
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanished says nothing.
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException as error:
        for connection in connections.values():
            connection.close()
        if isinstance(error, OSError | PeerError | ValueError) and not isinstance(error, LinkError):
            raise LinkError(f"this rank cannot connect to the others: {error}") from error
        raise
    return RankLink(connections, explain)


def _traffic_of(lower: int) -> tuple[TrafficKind, ...]:
    """Return the traffic between a rank and any higher one."""
    return tuple(TrafficKind) if lower == 0 else (TrafficKind.PAIRS,)


def _write(store: Any, key: str, value: str) -> None:
    try:
        store.set(key, value)
    except RuntimeError as error:
        raise LinkError(f"the store of torch.distributed fails: {error}") from error


def _read(store: Any, key: str, deadline: float, check: Callable[[], None]) -> str:
    """Return what a rank writes; it is looked for again and again. The store's own wait would hear
    no interrupt, and keep the application's other threads from the store."""
    pause = _FIRST_PAUSE_SECONDS
    while (value := _look(store, key)) is None:
        if time.monotonic() >= deadline:
            who = "rank 0" if key == "secret" else f"rank {key}"
            raise LinkError(f"{who} did not come in time")
        time.sleep(pause)
        pause = min(1.5 * pause, CHECK_SECONDS)
        check()
    return value


def _look(store: Any, key: str) -> str | None:
    try:
        return str(store.get(key), "utf-8") if store.check([key]) else None
    except RuntimeError as error:
        raise LinkError(f"the store of torch.distributed fails: {error}") from error


def _connect(other: int, address: tuple[str, int], deadline: float) -> Connection[bytes]:
    left = max(0.001, deadline - time.monotonic())
    try:
        return Connection(socket.create_connection(address, left), _FRAMES, f"rank {other}")
    except OSError as error:
        raise LinkError(f"rank {other} cannot be reached at {address}: {error}") from error


def _accept(
    listener: socket.socket,
    handshake: Handshake,
    expected: set[tuple[TrafficKind, int]],
    connections: dict[tuple[TrafficKind, int], Connection[bytes]],
    deadline: float,
    check: Callable[[], None],
) -> None:
    """Accept the connections of all ranks that are ``expected``.

    Others are turned away, however slowly they speak; those that are silent are bounded in number.
    """
    arrivals = NewConnections(listener, len(expected) + _MAX_STRANGERS, handshake.hello_bytes)
    with closing(arrivals):
        while expected:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(map(str, sorted({rank for _, rank in expected})))
                raise LinkError(f"rank {missing} did not connect in time")
            arrived = arrivals.take(min(left, CHECK_SECONDS))
            if not arrived:
                check()
            try:
                while arrived:
                    _admit(arrived.pop(0), handshake, expected, connections)
            finally:  # where one of them has ended the meeting
                for connected in arrived:
                    connected.close()


def _admit(
    connected: socket.socket,
    handshake: Handshake,
    expected: set[tuple[TrafficKind, int]],
    connections: dict[tuple[TrafficKind, int], Connection[bytes]],
) -> None:
    """Admit an expected rank; close the connection of anybody else."""
    connection = Connection(connected, _FRAMES)
    try:
        rank, number = handshake.hear(connection)
        expected.remove(key := (TrafficKind(number), rank))
    except (PeerError, ValueError, KeyError):
        _log.warning("turned away a connection that is no rank's of this trainer")
        connection.close()
        return
    connection.name_peer(f"rank {rank}")
    connections[key] = connection
    handshake.answer(connection)


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
                yield address_of_interface(interface)
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
