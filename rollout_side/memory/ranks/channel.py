"""Channel between two ranks of a replica, each of which has proven that it knows the replica's
secret.

It is a Unix socket in the abstract namespace. Every process of this network namespace can list it
and connect to it. In a container with the host's network, or of the same user, that includes
processes that are not ours. So nothing that a process sends is read as a message before it has
proven what only the ranks can know. The socket's name reveals nothing of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import Final, TypeVar

from rollout_side.memory.ranks.messages import HEAD, Failed, Message, pack, read_head, unpack
from weft_rl.contract.errors import PeerUnavailableError, WeftError
from weft_rl.ipc.sockets import close_in_children, connect_unix

_CREDENTIALS: Final = struct.Struct("3i")
_PROOF_BYTES: Final = 32
# What has begun to come, or to be taken, is through after so long; a manifest is the longest.
_MESSAGE_SECONDS: Final = 30.0
_KEPT_BYTES: Final = 2**20
_M = TypeVar("_M")


def address_of(secret: str) -> str:
    """Return the address of the receiving rank's socket: abstract, so no file can be left over."""
    return f"\0weft-handoff-{_derived(secret, 'name').hex()[:32]}"


def _derived(secret: str, what: str) -> bytes:
    """Derive a value that reveals neither the secret nor the other values derived from it."""
    return hmac.digest(secret.encode(), what.encode(), hashlib.sha256)


def connect_channel(secret: str, timeout_seconds: float) -> Channel:
    """Connect to the receiving rank; block for at most ``timeout_seconds``.

    Args:
        secret: Secret of the replica's ranks.

    Raises:
        PeerUnavailableError: Nobody listens, or no rank of this replica.
    """
    deadline = time.monotonic() + timeout_seconds
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connect_unix(connected, address_of(secret), timeout_seconds)
        _check_user(connected)
        connected.sendall(_derived(secret, "rank"))
        _check_proof(connected, _derived(secret, "receiving rank"), deadline)
    except OSError as error:
        connected.close()
        raise PeerUnavailableError(f"the receiving rank cannot be reached: {error}") from error
    except BaseException:
        connected.close()
        raise
    return Channel(connected)


def accept_channel(connected: socket.socket, secret: str, timeout_seconds: float) -> Channel:
    """Accept a connection at the receiving rank; block for at most ``timeout_seconds``.

    Args:
        connected: Owned from now on; closed, without a word, if the peer is no rank.

    Raises:
        PeerUnavailableError: The peer is no rank of this replica.
    """
    try:
        _check_user(connected)
        _check_proof(connected, _derived(secret, "rank"), time.monotonic() + timeout_seconds)
        connected.sendall(_derived(secret, "receiving rank"))
    except OSError as error:
        connected.close()
        raise PeerUnavailableError(f"who has connected is no rank of this replica: {error}") from (
            error
        )
    except BaseException:
        connected.close()
        raise
    return Channel(connected)


def _check_user(connected: socket.socket) -> None:
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise PeerUnavailableError(f"process {pid} of uid {uid} is no rank of this replica")


def _check_proof(connected: socket.socket, expected: bytes, deadline: float) -> None:
    shown = b""
    while len(shown) < _PROOF_BYTES:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := connected.recv(_PROOF_BYTES - len(shown))):
            break
        shown += part
    if not hmac.compare_digest(shown, expected):
        raise PeerUnavailableError("a process without the replica's secret is no rank of it")


class Channel:
    """Message channel over a connected socket. One thread uses it; any may call ``fail`` and
    ``shut``.

    Args:
        connected: Socket of which both ends have proven who they are; owned from now on.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._lock = threading.Lock()
        close_in_children(connected)
        connected.settimeout(_MESSAGE_SECONDS)
        self._socket = connected
        # Of one that ``fail`` has ended beside a thread that uses it, with its last reference.
        weakref.finalize(self, connected.close).atexit = False

    def send(self, message: Message) -> None:
        """Send a message; raises as ``receive`` does if the other side has gone.

        Raises:
            PeerUnavailableError: The other side reads nothing.
        """
        try:
            with self._lock:
                self._socket.sendall(pack(message))
        except TimeoutError as error:
            self.shut()
            raise PeerUnavailableError(f"another rank does not read: {error}") from error
        except OSError:
            while True:  # what it said before it went
                self._receive()

    def poll(self, timeout_seconds: float | None) -> bool:
        """Return whether ``receive`` would find the beginning of a message, or the end. Waits for
        that at most ``timeout_seconds``; None waits without limit."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(None if timeout_seconds is None else timeout_seconds * 1e3))

    def receive(self, *kinds: type[_M]) -> _M:
        """Receive a message of these kinds; block until it comes, or the other side is gone.

        Raises:
            EOFError, OSError: The other side has gone, or has sent half a message; or ``shut`` was
                called.
            WeftError: The error that the other side has failed with.
            PeerUnavailableError: The bytes are no message, or one of another kind.
        """
        message = self._receive()
        if isinstance(message, kinds):
            return message
        raise PeerUnavailableError(f"another rank has said {type(message).__name__} out of turn")

    def _receive(self) -> Message:
        self.poll(None)
        deadline = time.monotonic() + _MESSAGE_SECONDS
        number, num_bytes = read_head(self._read(HEAD.size, deadline))
        message = unpack(number, self._read(num_bytes, deadline))
        if isinstance(message, Failed):
            raise message.error()
        return message

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        # Grows with what comes: memory is not taken for what is only announced.
        content = bytearray()
        while len(content) < num_bytes:
            if time.monotonic() > deadline:
                raise TimeoutError("half a message has come")
            part = self._socket.recv(min(num_bytes - len(content), _KEPT_BYTES))
            if not part:
                raise EOFError("the other rank has closed its socket")
            content += part
        return bytes(content)

    def fail(self, error: WeftError) -> None:
        """Send the error that has ended this side, and shut the channel; the other side may be
        gone."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(pack(Failed(error.reason, error.message)))
        self.shut()

    def shut(self) -> None:
        """Shut both directions; threads that wait at either end learn it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the channel, once no other thread uses it."""
        self.shut()
        self._socket.close()
