"""Handshake of two processes that know the same secret."""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from typing import Any, Final

from weft_rl.ipc.connection import (
    STREAM_HEAD_BYTES,
    Connection,
    IncomingFrame,
    OutgoingFrame,
    PeerError,
    finish,
)

#: Kind of the first frame of each end; messages' kinds begin above.
_HELLO: Final = 0
_PROOF_BYTES: Final = 32


def derive(secret: bytes, what: str) -> bytes:
    """Derive a value that reveals neither the secret nor the other values derived from it."""
    return hmac.digest(secret, what.encode(), hashlib.sha256)


class Handshake:
    """Proof of both ends of a stream that they know a secret.

    The connecting end proves it first, and says who it is. Nothing that a process sends is read as
    a message before it has proven what only the others can know.

    Args:
        secret: Secret of the processes that may connect to each other.
        identity: ``struct`` format of what the connecting end says of itself.
    """

    def __init__(self, secret: bytes, identity: str = "<") -> None:
        self._secret, self._identity = secret, struct.Struct(identity)
        self._said_bytes = _PROOF_BYTES + self._identity.size
        #: Bytes that the connecting end says.
        self.hello_bytes = STREAM_HEAD_BYTES + self._said_bytes

    def begin(self, connection: Connection[Any], *identity: int) -> None:
        """Prove the secret to who listens; returns at once.

        Raises:
            PeerGoneError: The peer is gone.
        """
        self._say(connection, "connects", self._identity.pack(*identity))

    def check_answer(self, connection: Connection[Any], deadline: float) -> None:
        """Wait until the peer has proven the secret, too, at most until ``deadline``.

        Raises:
            PeerTimeoutError: The peer was silent until then.
            PeerGoneError: The peer is gone.
            PeerError: The peer does not know the secret.
        """
        self._hear(connection, _PROOF_BYTES, "accepts", deadline)

    def hear(self, connection: Connection[Any]) -> tuple[int, ...]:
        """Return the identity of a process that has connected and has said ``hello_bytes``; returns
        at once. The process waits for ``answer``.

        Raises:
            PeerTimeoutError: The peer has not said all.
            PeerGoneError: The peer is gone.
            PeerError: The peer does not know the secret.
        """
        said = self._hear(connection, self._said_bytes, "connects", time.monotonic())
        return self._identity.unpack(said)

    def answer(self, connection: Connection[Any]) -> None:
        """Prove the secret to a process that has proven it; returns at once.

        Raises:
            PeerGoneError: The peer is gone.
        """
        self._say(connection, "accepts")

    def _say(self, connection: Connection[Any], role: str, said: bytes = b"") -> None:
        content = memoryview(derive(self._secret, role) + said)
        finish([OutgoingFrame(connection, _HELLO, content)], time.monotonic())

    def _hear(
        self, connection: Connection[Any], num_bytes: int, role: str, deadline: float
    ) -> memoryview:
        hello = _HelloFrame(connection, num_bytes)
        finish([hello], deadline)
        shown, said = hello.content[:_PROOF_BYTES], hello.content[_PROOF_BYTES:]
        if not hmac.compare_digest(shown, derive(self._secret, role)):
            raise PeerError(f"{connection.peer} does not know the secret")
        return said


class _HelloFrame(IncomingFrame):
    def __init__(self, connection: Connection[Any], num_bytes: int) -> None:
        super().__init__(connection)
        self._num_bytes = num_bytes

    def accept(self, kind: int, num_bytes: int) -> None:
        if (kind, num_bytes) != (_HELLO, self._num_bytes):
            raise PeerError(f"{self.connection.peer} does not begin with a proof")
