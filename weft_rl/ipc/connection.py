"""Connection to another process beside gRPC: frames over TCP or a Unix socket.

A frame is a head and content, little-endian. The head has four letters and a version, by which
both ends know that they mean the same messages, and the frame's kind. On a stream it also has the
content's number of bytes; a socket of type ``SOCK_SEQPACKET`` keeps bounds itself, and brings one
descriptor along. Each kind has a largest size, memory is taken for what has come and not for what
is announced, and nothing that comes is executed.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from weft_rl.ipc.bytes_codec import bytes_codec

_M = TypeVar("_M")
_HEAD: Final = struct.Struct("<4sHH")
_LENGTH: Final = struct.Struct("<Q")
#: Bytes of a frame's head on a stream.
STREAM_HEAD_BYTES: Final = _HEAD.size + _LENGTH.size
_CREDENTIALS: Final = struct.Struct("3i")
# A frame that has begun to come, or to be taken, is through after so long, whatever its size.
_FRAME_SECONDS: Final = 30.0
_READ_BYTES: Final = 2**20
# More of them than are taken would be dropped by the kernel, which says so.
_MAX_FDS: Final = 1
_FD_BYTES: Final = array.array("i").itemsize
# Between two attempts to connect to who has not accepted yet.
_RETRY_SECONDS: Final = 0.005


class PeerError(RuntimeError):
    """Failure of the process at the other end of a connection: it is gone, it is not who it should
    be, or it says what is no message."""


class PeerGoneError(PeerError):
    """End of a connection, which the peer has closed."""


class PeerTimeoutError(PeerError):
    """Silence of a peer until a deadline, or its reading nothing; it may be there still."""


class Codec(Generic[_M]):
    """Encoding of the messages between two processes.

    Args:
        magic: Four letters that no other codec has.
        version: Grows with each change that an older peer would not understand.
        kinds: Messages by number, from 1 on; none where users read frames themselves.
        with_descriptor: Those of them that a descriptor comes with.
    """

    def __init__(
        self,
        magic: bytes,
        version: int,
        kinds: Mapping[int, type[_M]] | None = None,
        with_descriptor: Collection[type[_M]] = (),
    ) -> None:
        self._magic, self._version, self._kinds = magic, version, dict(kinds or {})
        self._with_descriptor = with_descriptor
        self._numbers = {kind: number for number, kind in self._kinds.items()}
        self._codecs = {number: bytes_codec(kind) for number, kind in self._kinds.items()}
        self.max_bytes = max((each.max_bytes for each in self._codecs.values()), default=0)

    def encode(self, message: _M) -> tuple[int, bytes]:
        """Return the number of a message's kind, and its content."""
        number = self._numbers[type(message)]
        return number, self._codecs[number].pack(message)

    def decode(
        self, number: int, content: bytes, num_descriptors: int = 0, peer: str = "the peer"
    ) -> _M:
        """Return the message of a frame that has come from ``peer``.

        Raises:
            PeerError: It is no message of these.
        """
        self.check_size(number, len(content), peer)
        kind = self._kinds[number]
        name = kind.__name__
        if num_descriptors != (kind in self._with_descriptor):
            raise PeerError(f"{peer} says {name} with a descriptor too many, or one too few")
        try:
            return self._codecs[number].unpack(content)
        except (struct.error, ValueError) as error:
            raise PeerError(f"{peer} says {name}, garbled: {error}") from error

    def check_size(self, number: int, num_bytes: int, peer: str = "the peer") -> None:
        """Refuse a frame of ``peer`` of an unknown kind, or longer than its kind may be."""
        if number not in self._kinds:
            raise PeerError(f"{peer} says a message of kind {number}, which there is not")
        if num_bytes > self._codecs[number].max_bytes:
            name = self._kinds[number].__name__
            raise PeerError(f"{peer} says {name} of {num_bytes:,} bytes")

    def pack_head(self, number: int) -> bytes:
        """Encode the head of a frame, without its length."""
        return _HEAD.pack(self._magic, self._version, number)

    def read_head(self, data: bytes | bytearray, peer: str = "the peer") -> int:
        """Return the kind of the frame of ``peer`` that ``data`` begins with."""
        if len(data) < _HEAD.size or data[: len(self._magic)] != self._magic:
            raise PeerError(f"{peer} says what is no message of Weft's")
        _, version, number = _HEAD.unpack_from(data)
        if version != self._version:
            raise PeerError(f"{peer} speaks version {version}, this process {self._version}")
        return int(number)


class Connection(Generic[_M]):
    """Connection to a peer, which over a Unix socket is a process of the same user.

    One thread receives; any may send, ``end`` and ``shut``. A process that is forked from this one
    has it closed.

    Args:
        connected: Socket, owned from now on.
        codec: Messages that both ends know.
        peer: Name of the peer in errors; its process is added where it is known.

    Raises:
        PeerError: The peer is another user's; the socket is closed.
    """

    def __init__(self, connected: socket.socket, codec: Codec[_M], peer: str = "the peer") -> None:
        self.socket, self.codec, self._process = connected, codec, ""
        self.name_peer(peer)
        self.is_stream = connected.type == socket.SOCK_STREAM
        self._sending = threading.Lock()
        close_in_children(connected)
        # Of one that was shut beside a thread that uses it, with its last reference.
        weakref.finalize(self, connected.close).atexit = False
        if connected.family == socket.AF_UNIX:
            self._check_user()
        connected.setblocking(False)

    def name_peer(self, name: str) -> None:
        """Name the peer anew in errors, once it has said who it is."""
        self.peer = f"{name}{self._process}"

    def _check_user(self) -> None:
        raw = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        self._process = f" (pid {pid})"
        self.name_peer(self.peer)
        if uid != os.geteuid():
            self.socket.close()
            raise PeerError(f"{self.peer} is of uid {uid}, this process of {os.geteuid()}")

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``selectors``."""
        return self.socket.fileno()

    def send(self, message: _M, fd: int | None = None) -> None:
        """Send a message; over a stream blocks while the peer is slow to read, at most 30 s.

        Args:
            fd: Descriptor that goes along; not over a stream.

        Raises:
            PeerTimeoutError: The peer reads nothing.
            PeerGoneError: The peer is gone.
        """
        number, content = self.codec.encode(message)
        outgoing = OutgoingFrame(self, number, memoryview(content), fd)
        with self._sending:
            try:
                finish([outgoing], time.monotonic() + (_FRAME_SECONDS if self.is_stream else 0.0))
            except PeerError:
                if self.is_stream:  # the peer may have part of a frame
                    self.shut()
                raise

    def receive(self, timeout_seconds: float | None = None) -> tuple[_M, int | None]:
        """Receive a message, and the descriptor that came along, owned by the caller.

        Args:
            timeout_seconds: Longest wait for its beginning; None waits without limit.

        Raises:
            PeerTimeoutError: The peer said nothing in time, or stopped within a message.
            PeerGoneError: The peer is gone.
            PeerError: The peer said what is no message.
        """
        incoming = IncomingFrame(self)
        if not self.poll(timeout_seconds):
            raise _timeout([incoming])
        finish([incoming], time.monotonic() + _FRAME_SECONDS)
        fds = incoming.descriptors
        try:
            content = bytes(incoming.content)
            message = self.codec.decode(incoming.kind, content, len(fds), self.peer)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return message, fds[0] if fds else None

    def receive_message(self, timeout_seconds: float | None = None) -> _M:
        """Receive a message; a descriptor that comes along is closed. Raises as ``receive``."""
        message, fd = self.receive(timeout_seconds)
        if fd is not None:
            os.close(fd)
        return message

    def poll(self, timeout_seconds: float | None) -> bool:
        """Return whether ``receive`` finds the beginning of a message, or the end; waits for that
        at most ``timeout_seconds``, None without limit."""
        return bool(_polled({self.fileno(): select.POLLIN}, timeout_seconds))

    @property
    def is_ended(self) -> bool:
        """True if the peer has called ``end``, or is gone; messages may still be unread."""
        return bool(_polled({self.fileno(): select.POLLRDHUP}, 0.0))

    def end(self) -> None:
        """Tell the peer that nothing follows; the peer may still be heard."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """Shut both directions: threads that wait at either end learn it at once."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, once no other thread uses it."""
        self.socket.close()

    def gone(self, error: OSError | None = None) -> PeerGoneError:
        """Make the error that says how the connection has ended; None and a reset (the peer had not
        read all) mean that the peer has closed it."""
        if error is None or isinstance(error, ConnectionResetError):
            return PeerGoneError(f"{self.peer} closed its socket")
        return PeerGoneError(f"{self.peer} is gone: {error}")


class OutgoingFrame:
    """Frame on its way out.

    Args:
        connection: Connection that nothing else is sent over meanwhile.
        kind: Number of its kind.
        content: Bytes that the caller leaves alone until all are sent.
        fd: Descriptor that goes along.
    """

    events = select.POLLOUT

    def __init__(
        self, connection: Connection[Any], kind: int, content: memoryview, fd: int | None = None
    ) -> None:
        self.connection = connection
        head = connection.codec.pack_head(kind)
        if connection.is_stream:
            head += _LENGTH.pack(len(content))
        self._parts = [memoryview(head), content]
        fds = [] if fd is None else [array.array("i", [fd])]
        self._beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in fds]

    def advance(self) -> bool:
        """Send as much as goes without waiting; return whether all is sent.

        Raises:
            PeerGoneError: The peer is gone.
        """
        while self._parts:
            try:
                num_bytes = self.connection.socket.sendmsg(
                    self._parts, self._beside, socket.MSG_NOSIGNAL
                )
            except BlockingIOError:
                return False
            except OSError as error:
                raise self.connection.gone(error) from error
            while self._parts and num_bytes >= len(self._parts[0]):
                num_bytes -= len(self._parts.pop(0))
            if self._parts:
                self._parts[0] = self._parts[0][num_bytes:]
        return True


class IncomingFrame:
    """Frame on its way in.

    Args:
        connection: Connection that nothing else is received from meanwhile.
    """

    events = select.POLLIN

    def __init__(self, connection: Connection[Any]) -> None:
        self.connection = connection
        self.kind = -1
        """Number of its kind; -1 until its head has come."""
        self.descriptors: list[int] = []
        """Descriptors that came along, the caller's once all has come."""
        self._read = bytearray()
        self._out: memoryview | None = None
        self._num_missing = STREAM_HEAD_BYTES

    @property
    def has_begun(self) -> bool:
        """True if some of the frame has come."""
        return self.kind >= 0 or bool(self._read)

    @property
    def content(self) -> memoryview:
        """Content, once all has come."""
        return memoryview(self._read) if self._out is None else self._out

    def accept(self, kind: int, num_bytes: int) -> memoryview | None:
        """Accept a frame by its head; return memory of its length to receive it in, or None.

        Raises:
            PeerError: It may not be of this kind, or not so long.
        """
        self.connection.codec.check_size(kind, num_bytes, self.connection.peer)
        return None

    def advance(self) -> bool:
        """Receive as much as there is without waiting; return whether all has come.

        Raises:
            PeerGoneError: The peer is gone.
            PeerError: The bytes are no frame, or none that is accepted.
        """
        try:
            if not self.connection.is_stream:
                self._receive_record()
                return True
            while self._num_missing or self.kind < 0:
                if not self._num_missing:
                    self._begin()
                elif not (num_bytes := self._receive_some()):
                    raise self.connection.gone()
                else:
                    self._num_missing -= num_bytes
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.connection.gone(error) from error
        return True

    def _begin(self) -> None:
        kind = self.connection.codec.read_head(self._read, self.connection.peer)
        (self._num_missing,) = _LENGTH.unpack_from(self._read, _HEAD.size)
        self._out = self.accept(kind, self._num_missing)
        self.kind, self._read = kind, bytearray()

    def _receive_some(self) -> int:
        sock = self.connection.socket
        if self._out is not None:
            return sock.recv_into(self._out[-self._num_missing :])
        part = sock.recv(min(self._num_missing, _READ_BYTES))
        self._read += part
        return len(part)

    def _receive_record(self) -> None:
        """Receive a frame of a socket that keeps bounds, which comes whole."""
        codec = self.connection.codec
        data, carried, told, _ = self.connection.socket.recvmsg(
            _HEAD.size + codec.max_bytes,
            socket.CMSG_SPACE(_MAX_FDS * _FD_BYTES),
            socket.MSG_CMSG_CLOEXEC,
        )
        for level, kind, content in carried:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _FD_BYTES
                self.descriptors.extend(array.array("i", content[:whole]))
        try:
            if not data:
                raise self.connection.gone()
            if told & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(self.descriptors) > _MAX_FDS:
                raise PeerError(f"{self.connection.peer} said more than a message holds")
            self.kind = codec.read_head(data, self.connection.peer)
        except PeerError:
            for fd in self.descriptors:
                os.close(fd)
            raise
        self._read += data[_HEAD.size :]


def finish(frames: Sequence[OutgoingFrame | IncomingFrame], deadline: float) -> None:
    """Send and receive frames, all at once; block until all have gone and come.

    Args:
        deadline: ``time.monotonic()`` seconds.

    Raises:
        PeerTimeoutError: A peer was silent, or read nothing, until the deadline; names it.
        PeerGoneError: A peer is gone.
        PeerError: A peer sends other than what is accepted.
    """
    while pending := [each for each in frames if not each.advance()]:
        frames, events = pending, dict[int, int]()
        for each in pending:
            number = each.connection.fileno()
            events[number] = events.get(number, 0) | each.events
        left = deadline - time.monotonic()
        if left <= 0 or not _polled(events, left):
            raise _timeout(pending)


def _timeout(pending: Sequence[OutgoingFrame | IncomingFrame]) -> PeerTimeoutError:
    said = []
    for kind, what in (
        (OutgoingFrame, "read nothing, or too slowly,"),
        (IncomingFrame, "was silent"),
    ):
        peers = dict.fromkeys(each.connection.peer for each in pending if isinstance(each, kind))
        if peers:
            said.append(f"{', '.join(peers)} {what} until the deadline")
    return PeerTimeoutError("; ".join(said))


def _polled(events: Mapping[int, int], timeout_seconds: float | None) -> list[tuple[int, int]]:
    poll = select.poll()
    for number, wanted in events.items():
        poll.register(number, wanted)
    return poll.poll(None if timeout_seconds is None else max(0.0, timeout_seconds * 1e3))


def connect_unix(address: str, kind: socket.SocketKind, timeout_seconds: float) -> socket.socket:
    """Return a socket that is connected to an address; blocks while the listener's backlog is full.
    The kernel waits for that only where a socket has no timeout.

    Raises:
        BlockingIOError: The backlog was full for as long.
        OSError: Nobody listens.
    """
    deadline = time.monotonic() + timeout_seconds
    connecting = socket.socket(socket.AF_UNIX, kind)
    try:
        connecting.settimeout(timeout_seconds)
        while True:
            try:
                connecting.connect(address)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                return connecting
    except BaseException:
        connecting.close()
        raise


def over_tls(
    context: ssl.SSLContext,
    connected: socket.socket,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
) -> ssl.SSLSocket:
    """Make a handshake over a socket, and return one that encrypts in its place; blocks as long as
    the socket may.

    Raises:
        OSError: There is no connection any more, or the handshake failed.
    """
    # Where the peer has reset it, ``wrap_socket`` would leave the descriptor open, and to nobody.
    connected.getpeername()
    return context.wrap_socket(connected, server_side=server_side, server_hostname=server_hostname)


_SOCKETS: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Close a socket in each child that this process forks from now on, which takes nothing from
    this process."""
    _SOCKETS.add(sock)


def _close_inherited() -> None:
    for sock in _SOCKETS:
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
