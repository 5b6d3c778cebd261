"""One connection between two members of a stream group: messages, and pieces of buckets.

It is a socket that one thread reads or writes, never two at once: so it can be encrypted by the
``ssl`` module, whose sockets bear no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import socket
import ssl
import struct
import termios
import time
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from weft_rl.ipc.bytes_codec import bytes_codec
from weft_rl.ipc.connection import STREAM_HEAD_BYTES, close_in_children, over_tls
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.stream.messages import (
    KEY_BYTES,
    MESSAGES,
    PIECE_HEAD,
    Challenge,
    LaneHello,
    Message,
    PieceHead,
    Proof,
    StreamError,
)

_M = TypeVar("_M")
_LENGTH: Final = struct.Struct("<Q")
_INT: Final = struct.Struct("@i")
# Of ``struct tcp_info`` (linux/tcp.h, since Linux 4.10): bytes that were acknowledged; microseconds
# with bytes under way; of these, such in which the other end had no room.
_TCP_INFO: Final = struct.Struct("<120xQ40xQQ")
#: Bytes of the first frame of a connection.
HELLO_BYTES: Final = STREAM_HEAD_BYTES + bytes_codec(LaneHello).max_bytes
# How long a link may be silent, by the kernels' own packets: a peer that is merely busy answers
# them. Less than the coordinator grants a member that says nothing.
_DEAD_MILLISECONDS: Final = 3_000


def _options() -> tuple[tuple[int, int, int], ...]:
    """Return the options of every connection; other systems than Linux have not all of them."""
    return (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MILLISECONDS),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _DEAD_MILLISECONDS // 1000),
    )


class LaneCounters(NamedTuple):
    """Counters of what one end of a connection has sent."""

    num_bytes: int
    """Bytes that the other end has acknowledged."""
    busy_seconds: float
    """Seconds for which some were under way that it had room for."""
    num_queued: int
    """Bytes that were handed to the system and are not acknowledged."""


class Lane:
    """Connection to another member.

    Args:
        connected: Socket, owned from now on; it may have to be connected still.
        peer: Name of the other end in errors.

    Raises:
        StreamError: It is gone already.
    """

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self._socket, self.peer = connected, peer
        self._deadline: float | None = None
        close_in_children(connected)
        try:
            for level, option, value in _options():
                connected.setsockopt(level, option, value)
        except OSError as error:
            connected.close()
            raise self._gone(error) from error

    def set_deadline(self, deadline: float | None) -> None:
        """Let what follows fail at a ``time.monotonic()``; None waits for as long as the link
        lives."""
        self._deadline = deadline
        if deadline is None:
            self._socket.settimeout(None)

    def connect(self, address: Any) -> None:
        """Connect to an address; ``shut`` ends it."""
        self._hurry()
        try:
            self._socket.connect(address)
        except OSError as error:
            raise StreamError(f"{self.peer} cannot be reached: {error}") from error

    def encrypt(self, context: ssl.SSLContext, *, as_server: bool) -> bytes:
        """Encrypt what follows; blocks until both ends agree.

        Returns:
            The peer's certificate in DER; empty where it has shown none.
        """
        self._hurry()
        try:
            self._socket = over_tls(context, self._socket, server_side=as_server)
            close_in_children(self._socket)
            return self._socket.getpeercert(binary_form=True) or b""
        except (OSError, ValueError) as error:  # of ``ssl``, too
            raise StreamError(f"{self.peer} could not be met over TLS: {error}") from error

    def say(self, message: Message) -> None:
        """Send a message."""
        number, content = MESSAGES.encode(message)
        self._send(MESSAGES.pack_head(number) + _LENGTH.pack(len(content)) + content)

    def hear(self, kind: type[_M]) -> _M:
        """Receive a message of a kind.

        Raises:
            StreamError: The peer is gone or too slow, or says something else.
        """
        head = bytearray(STREAM_HEAD_BYTES)
        self._receive(memoryview(head))
        number = MESSAGES.read_head(head, self.peer)
        (num_bytes,) = _LENGTH.unpack_from(head, STREAM_HEAD_BYTES - _LENGTH.size)
        MESSAGES.check_size(number, num_bytes, self.peer)
        content = bytearray(num_bytes)
        self._receive(memoryview(content))
        message = MESSAGES.decode(number, bytes(content), peer=self.peer)
        if not isinstance(message, kind):
            raise StreamError(f"{self.peer} said {type(message).__name__} out of turn")
        return message

    def send_piece(self, piece: PieceHead, content: memoryview | bytes) -> None:
        """Send a piece of a bucket, or what it is coded as."""
        head = PIECE_HEAD.pack(*piece)
        if self.is_encrypted:
            self._send(head)
            self._send(content)
            return
        try:
            sent = self._socket.sendmsg([head, content])
            if sent < len(head):
                self._send(memoryview(head)[sent:])
                sent = len(head)
        except OSError as error:
            raise self._gone(error) from error
        self._send(memoryview(content)[sent - len(head) :])

    def receive_head(self) -> PieceHead:
        """Receive the head of the next piece. Blocks until one comes."""
        head = bytearray(PIECE_HEAD.size)
        self._receive(memoryview(head))
        return PieceHead(*PIECE_HEAD.unpack(head))

    def receive_into(self, content: memoryview) -> None:
        """Receive the bytes of a piece."""
        self._receive(content)

    @property
    def is_encrypted(self) -> bool:
        """True after ``encrypt``."""
        return isinstance(self._socket, ssl.SSLSocket)

    def sent(self) -> LaneCounters:
        """Return what has gone to the other end; zeros once it is closed, or where the system
        cannot tell."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            num_bytes, busy, without_room = _TCP_INFO.unpack(info)
            queued = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(_INT.size))
        except (OSError, ValueError, struct.error):
            return LaneCounters(0, 0.0, 0)
        return LaneCounters(num_bytes, max(0, busy - without_room) / 1e6, *_INT.unpack(queued))

    def shut(self) -> None:
        """End both directions: threads that wait at either end learn it at once."""
        with contextlib.suppress(OSError):
            # Not ``SSLSocket.shutdown``: it takes the encryption from under a thread that uses it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, once no other thread uses it."""
        self._socket.close()

    def _send(self, content: bytes | memoryview) -> None:
        self._hurry()
        try:
            self._socket.sendall(content)
        except OSError as error:
            raise self._gone(error) from error

    def _receive(self, content: memoryview) -> None:
        try:
            while content:
                self._hurry()
                if not (num_bytes := self._socket.recv_into(content)):
                    raise self._gone()
                content = content[num_bytes:]
        except OSError as error:
            raise self._gone(error) from error

    def _hurry(self) -> None:
        if self._deadline is not None:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))

    def _gone(self, error: OSError | None = None) -> StreamError:
        if isinstance(error, TimeoutError):
            return StreamError(f"{self.peer} does not answer: {error}")
        return StreamError(f"{self.peer} closed the connection" + (f": {error}" if error else ""))


class _TlsSocket(ssl.SSLSocket):
    """Socket of an encrypted lane. ``ssl`` leaves one open whose peer is gone before they meet:
    the first that it asks of a socket is its peer's name."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise


def prove_receiver(lane: Lane, secret: bytes, hello: LaneHello) -> None:
    """Prove to the member that was asked that this end knows the group's secret, as that end does,
    each to a challenge of the other: what was overheard once proves nothing.

    Raises:
        StreamError: The peer does not know it.
    """
    challenge = lane.hear(Challenge)
    if not hmac.compare_digest(challenge.proof, _proof(secret, b"sends", hello, challenge.nonce)):
        raise StreamError(f"{lane.peer} does not know the group's secret")
    lane.say(Proof(_proof(secret, b"receives", hello, challenge.nonce)))


def check_receiver(lane: Lane, secret: bytes, hello: LaneHello) -> None:
    """Let who connected prove that it knows the group's secret.

    Raises:
        StreamError: It does not.
    """
    nonce = os.urandom(KEY_BYTES)
    lane.say(Challenge(nonce, _proof(secret, b"sends", hello, nonce)))
    if not hmac.compare_digest(lane.hear(Proof).proof, _proof(secret, b"receives", hello, nonce)):
        raise StreamError(f"{lane.peer} does not know the group's secret")


def _proof(secret: bytes, role: bytes, hello: LaneHello, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + MESSAGES.encode(hello)[1] + nonce, hashlib.sha256)


@dataclass(frozen=True)
class LaneTls:
    """Encryption of a member's lanes, with the certificates of its control plane.

    The receiver is the server of TLS, whoever connects: every replica of an encrypted pool has a
    certificate, a trainer may have a token only.
    """

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    fingerprint: bytes = b""
    """SHA-256 of the certificate that it shows; empty where there is none."""

    @staticmethod
    def of(credentials: Credentials) -> LaneTls:
        """Read the certificates of a process, as they are now.

        Raises:
            InvalidRequestError: They cannot be used.
        """
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.minimum_version = ssl.TLSVersion.TLSv1_3
        # The other end is known by the certificate that it announced to the coordinator, and no
        # other: no authority can sign a second one.
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        client.sslsocket_class = _TlsSocket
        if not credentials.tls_cert:
            return LaneTls(client=client)
        pem = credentials.read_certificates()
        client.load_cert_chain(credentials.tls_cert, credentials.tls_key)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.minimum_version, server.num_tickets = ssl.TLSVersion.TLSv1_3, 0
        server.sslsocket_class = _TlsSocket
        server.load_cert_chain(credentials.tls_cert, credentials.tls_key)
        if credentials.tls_ca:
            server.verify_mode = ssl.CERT_OPTIONAL
            server.load_verify_locations(credentials.tls_ca)
        own = ssl.PEM_cert_to_DER_cert(_first_certificate(pem.cert.decode()))
        return LaneTls(server, client, fingerprint_of(own))


def fingerprint_of(certificate: bytes) -> bytes:
    """Return the fingerprint of a certificate in DER; empty of none."""
    return hashlib.sha256(certificate).digest() if certificate else b""


_END: Final = "-----END CERTIFICATE-----"


def _first_certificate(pem: str) -> str:
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    return pem[begin : pem.index(_END, begin) + len(_END)]
