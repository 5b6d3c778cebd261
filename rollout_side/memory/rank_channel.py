"""What the ranks of a replica say to each other about a base that is loaded in place.

Over a Unix socket between processes of one user; that it is so is asked of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rollout_side.memory.segment import SegmentRef
from weft.contract.errors import PeerUnavailableError, WeftError, error_from_reason
from weft.contract.layout.manifest import Manifest

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Wanted:
    """First, from a rank: what it loads."""

    transfer_id: str
    rank: int


@dataclass(frozen=True)
class Layout:
    """The answer."""

    manifest: Manifest


@dataclass(frozen=True)
class Buffers:
    """Where the next buckets lie; those of before are not used again."""

    refs: Sequence[SegmentRef]


@dataclass(frozen=True)
class Arrived:
    """A bucket that may be read until ``Loaded``."""

    number: int
    """Of its buffer."""
    digests: Sequence[int]


@dataclass(frozen=True)
class Working:
    """From a rank: it loads."""


@dataclass(frozen=True)
class Loaded:
    """From a rank: it is done with the bucket."""


@dataclass(frozen=True)
class Complete:
    """From a rank, last: its loader has done with all."""


@dataclass(frozen=True)
class Failed:
    """From either side, last. Whether weights are mixed each rank says for itself."""

    reason: str
    message: str

    def error(self) -> WeftError:
        """What the other side raised."""
        return error_from_reason(self.reason, self.message, {})


class Channel:
    """Messages over a connected socket of this user's, from one thread; ``fail`` and ``shut``
    from any.

    Raises:
        PeerUnavailableError: The other process is another user's.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._lock = threading.Lock()
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            connected.close()
            raise PeerUnavailableError(f"process {pid} of uid {uid} is no rank of this replica")
        connected.settimeout(None)
        self._pipe = Connection(connected.detach())

    def send(self, message: object) -> None:
        """As ``receive`` raises, if the other side has gone."""
        try:
            with self._lock:
                self._pipe.send(message)
        except OSError:
            while True:  # what it said before it went
                self.receive()

    def poll(self, timeout_seconds: float) -> bool:
        """Whether ``receive`` would not block; waits so long for it."""
        return self._pipe.poll(timeout_seconds)

    def receive(self) -> Any:
        """Blocks.

        Raises:
            EOFError, OSError: The other side has gone, or ``shut`` was called.
            WeftError: It has failed: why.
        """
        message = self._pipe.recv()
        if isinstance(message, Failed):
            raise message.error()
        return message

    def fail(self, error: WeftError) -> None:
        """Say why this side has ended, and end; the other side may be gone."""
        with contextlib.suppress(OSError), self._lock:
            self._pipe.send(Failed(error.reason, error.message))
        self.shut()

    def shut(self) -> None:
        """End both directions; who waits here or there learns it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, where no other thread uses it."""
        self.shut()
        self._pipe.close()
