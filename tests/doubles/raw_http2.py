"""A client that speaks HTTP/2 as badly as a test wants it to."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from weft_rl.rpc.security.credentials import Credentials

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE, MAX_CONCURRENT_STREAMS = 4, 3
#: One message without content, as gRPC frames it.
EMPTY = b"\0\0\0\0\0"


@dataclass(frozen=True)
class Frame:
    """What a server has sent."""

    kind: int
    flags: int
    stream: int
    data: bytes


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    """A frame's bytes."""
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


def _field(name: str, value: str) -> bytes:
    """A header as HPACK has it, neither indexed nor compressed."""
    texts = (name.encode(), value.encode())
    return b"\0" + b"".join(bytes([len(text)]) + text for text in texts)


class RawClient:
    """One TLS connection on which HTTP/2 has begun; the receive window of a stream may be 0,
    so that nothing is ever taken."""

    def __init__(self, target: str, credentials: Credentials, *, window: int = 65_535) -> None:
        host, _, port = target.rpartition(":")
        context = ssl.create_default_context(cafile=credentials.tls_ca)
        if credentials.tls_cert:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key)
        context.set_alpn_protocols(["h2"])
        self.socket = context.wrap_socket(
            socket.create_connection((host, int(port)), timeout=5), server_hostname=host
        )
        settings = frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window))
        self.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        self._streams = iter(range(1, 2**31, 2))

    def send(self, data: bytes) -> None:
        """Write bytes, of frames or not."""
        self.socket.sendall(data)

    def call(self, method: str, message: bytes = EMPTY, *, whole: bool = True) -> int:
        """Begin a call; returns its stream."""
        fields = {
            ":method": "POST", ":scheme": "https", ":path": f"/{method}", ":authority": "x",
            "te": "trailers", "content-type": "application/grpc",
        }  # fmt: skip
        block = b"".join(map(_field, fields, fields.values()))
        stream = next(self._streams)
        self.send(frame(HEADERS, _END_HEADERS, stream, block))
        self.send(frame(DATA, _END_STREAM if whole else 0, stream, message))
        return stream

    def frames(self, seconds: float) -> Iterator[Frame]:
        """What comes within a time; pings are answered, as whoever is alive does. Ends where
        the server hangs up."""
        until = time.monotonic() + seconds
        try:
            while True:
                head = self._read(9, until)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                data = self._read(int.from_bytes(head[:3], "big"), until)
                if kind == PING and not flags & _ACK:
                    self.send(frame(PING, _ACK, 0, data))
                yield Frame(kind, flags, stream, data)
        except (TimeoutError, OSError, EOFError):
            return

    def _read(self, size: int, until: float) -> bytes:
        data = b""
        while len(data) < size:
            self.socket.settimeout(max(0.01, until - time.monotonic()))
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def seconds_until_closed(self, seconds: float) -> float:
        """How long the server keeps the connection, at most ``seconds``."""
        began = time.monotonic()
        for _ in self.frames(seconds):
            pass
        return time.monotonic() - began

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
