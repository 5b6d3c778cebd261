"""Hand-off of a base that is loaded in place to the ranks of a replica that do not receive it.

The receiving rank listens on a Unix socket. Each other rank connects once a transfer, is told where
the buckets lie, maps them, and says when it is done with each. A bucket's memory is received into
again once all ranks are done with it. A rank that fails, or goes, ends the load of all.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import torch

from rollout_side.memory.handoff import (
    FINISHING_SECONDS,
    HandoffQueue,
    copy_error,
    synchronize,
)
from rollout_side.memory.ranks.messages import (
    MESSAGES,
    Arrived,
    Buffers,
    Complete,
    Layout,
    Loaded,
    LoadRequest,
    Message,
    RankConnection,
    Working,
)
from rollout_side.memory.segment import Segment
from weft_rl.contract.errors import LoadFailedError, NotReadyError, PeerUnavailableError, WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.ipc.connection import PeerError, PeerGoneError, connect_unix
from weft_rl.ipc.handshake import Handshake, derive
from weft_rl.ipc.listener import Listener
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.progress import PROGRESS_SECONDS
from weft_rl.transport.wire.buckets import in_manifest_order

_M = TypeVar("_M")
_log = logging.getLogger(__name__)

# A rank that has connected says at once what it wants.
_HELLO_SECONDS = 10.0
# Connections of other processes that have not shown who they are.
_MAX_STRANGERS = 64


def address_of(secret: str) -> str:
    """Return the address of the receiving rank's socket.

    It is abstract, so no file can be left over. Every process of this network namespace can list it
    and connect to it; in a container with the host's network, or of the same user, that includes
    processes that are not ours.
    """
    return f"\0weft-handoff-{derive(secret.encode(), 'name').hex()[:32]}"


def connect(secret: str, timeout_seconds: float) -> RankConnection:
    """Connect to the receiving rank; block for at most ``timeout_seconds``."""
    deadline = time.monotonic() + timeout_seconds
    handshake = Handshake(secret.encode())
    try:
        connected = connect_unix(address_of(secret), socket.SOCK_STREAM, timeout_seconds)
        connection = RankConnection(connected, MESSAGES, "the receiving rank")
        try:
            handshake.begin(connection)
            handshake.check_answer(connection, deadline)
        except BaseException:
            connection.close()
            raise
    except (OSError, PeerError) as error:
        raise PeerUnavailableError(f"the receiving rank cannot be reached: {error}") from error
    return connection


# -- the receiving rank --------------------------------------------------------------


class RankServer:
    """Server that gives hand-off queues' buckets to the replica's other ranks, on its own threads.

    Args:
        secret: Secret that the replica's ranks know, and nobody else.
        find: Returns the hand-off queue of a transfer that is loaded in place.
    """

    def __init__(self, secret: str, find: Callable[[str], HandoffQueue | None]) -> None:
        self._find, self._handshake = find, Handshake(secret.encode())
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(address_of(secret))
        listening.listen(socket.SOMAXCONN)
        self._listener = Listener(
            listening,
            self._admit,
            name="weft-ranks",
            max_silent=_MAX_STRANGERS,
            hello_bytes=self._handshake.hello_bytes,
        )

    def close(self) -> None:
        """Accept no further rank; a load under way ends with its queue. Blocks for some
        milliseconds, at most a second."""
        self._listener.close()

    def _admit(self, connected: socket.socket) -> None:
        """Serve a rank on a thread of its own; close the connection of anybody else."""
        try:
            connection = RankConnection(connected, MESSAGES)
            self._handshake.hear(connection)
            self._handshake.answer(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="weft-rank", daemon=True
            ).start()
        except RuntimeError as error:  # also where this process can have no further thread
            _log.warning("turned away who has connected as a rank of this replica: %s", error)
            connected.close()

    def _serve(self, connection: RankConnection) -> None:
        handoff: HandoffQueue | None = None
        try:
            if not connection.poll(_HELLO_SECONDS):
                raise NotReadyError("a rank has connected and said nothing")
            wanted = connection.hear(LoadRequest)
            connection.name_peer(f"rank {wanted.rank} of the replica")
            handoff = self._find(wanted.transfer_id)
            if handoff is None:
                raise NotReadyError(
                    f"transfer {wanted.transfer_id} is not, or no longer, loaded in place"
                )
            _give(connection, handoff, wanted.rank)
        except PeerGoneError as error:
            if handoff is not None:
                handoff.fail(LoadFailedError(f"a rank of the replica has ended its load: {error}"))
        except WeftError as error:
            if handoff is not None:
                handoff.fail(error)
            connection.fail(error)
        except BaseException as error:  # noqa: BLE001 (the edge of a thread)
            _log.exception("a rank cannot be given what it is to load")
            typed = LoadFailedError(f"{type(error).__name__}: {error}")
            if handoff is not None:
                handoff.fail(typed)
            connection.fail(typed)
        finally:
            connection.close()


def _give(connection: RankConnection, handoff: HandoffQueue, rank: int) -> None:
    """Give one rank every bucket; returns once it has loaded all."""
    connection.say(Layout(handoff.manifest))
    known: Sequence[Segment] = ()
    for _, shared, digests in handoff.shared_buckets(rank):
        if shared.buffers is not known:
            known = shared.buffers
            # Made for each rank: on an accelerator every process that maps it counts.
            connection.say(Buffers(tuple(segment.ref for segment in known)))
        connection.say(Arrived(shared.number, tuple(digests)))
        _wait_for(Loaded, connection, handoff)
    _wait_for(Complete, connection, handoff)
    handoff.complete(rank)


def _wait_for(
    kind: type[Loaded] | type[Complete], connection: RankConnection, handoff: HandoffQueue
) -> None:
    """Wait for a rank's message of this kind; meanwhile pass on its reports that it works."""
    while True:
        while not connection.poll(PROGRESS_SECONDS):
            if (error := handoff.error) is not None:
                raise copy_error(error)
        if isinstance(connection.hear(kind, Working), kind):
            return
        handoff.report_progress()


# -- the other ranks -----------------------------------------------------------------


class RankHandoff:
    """``Handoff`` of a rank that does not receive. It waits as long as the receiving rank does,
    whose deadline is that of all.

    Connects on the loader's thread, when that first asks for something.

    Args:
        secret: Secret of the replica's ranks, as ``RankServer`` has it.
        rank: Number of this rank.
        transfer_id: Transfer that brings the buckets.
        version: Version that the buckets belong to.
    """

    def __init__(self, secret: str, rank: int, transfer_id: str, version: PolicyVersion) -> None:
        self.transfer_id, self.version = transfer_id, version
        self._secret, self._rank = secret, rank
        self._lock = threading.Lock()
        self._connection: RankConnection | None = None
        self.error: WeftError | None = None
        self._digests: list[Sequence[int]] = []
        #: See ``Handoff``; of this rank alone.
        self.is_complete = False
        self._progress_at = 0.0

    @cached_property
    def manifest(self) -> Manifest:
        """See ``Handoff``; blocks for it, on the loader's thread."""
        self._connect()
        self._send(LoadRequest(self.transfer_id, self._rank))
        return self._receive(Layout).manifest

    @property
    def content_digest(self) -> bytes:
        return content_digest(in_manifest_order(self.manifest, self._digests))

    @property
    def is_begun(self) -> bool:
        return bool(self._digests)

    def fail(self, error: WeftError) -> None:
        with self._lock:
            if self.error is not None or self.is_complete:
                return
            self.error, connection = copy_error(error), self._connection
        if connection is not None:
            connection.fail(error)

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        segments: list[Segment] = []
        for index, bucket in enumerate(self.manifest.buckets):
            message = self._receive(Buffers, Arrived)
            if isinstance(message, Buffers):
                segments = [ref.attach() for ref in message.refs]
                message = self._receive(Arrived)
            assert isinstance(message, Arrived), "it has received one or the other"
            if message.number >= len(segments):
                raise PeerUnavailableError(f"bucket {index} lies in a buffer that was never told")
            self._digests.append(message.digests)
            try:
                yield index, segments[message.number].data[: bucket.wire_bytes]
            finally:
                synchronize()
            self._send(Loaded())
        threading.Thread(target=self._say_finishing, name="weft-finishing", daemon=True).start()

    def _say_finishing(self) -> None:
        """Report that this process runs while its engine finishes its layers. The loader's thread
        cannot report then."""
        until = time.monotonic() + FINISHING_SECONDS
        with contextlib.suppress(PeerError, WeftError):
            while time.monotonic() < until:
                with self._lock:
                    if self.is_complete or self.error is not None:
                        return
                    assert self._connection is not None, "buckets were loaded"
                    self._connection.say(Working())
                time.sleep(PROGRESS_SECONDS)

    def report_progress(self) -> None:
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            self._send(Working())

    def complete(self) -> None:
        with self._lock:
            self._check()
            self.is_complete = True
            connection = self._connection
        assert connection is not None, "buckets were loaded"
        with contextlib.suppress(PeerError, WeftError):
            connection.say(Complete())  # all of it is loaded here, whoever has gone
        connection.close()

    def _connect(self) -> None:
        connection = connect(self._secret, _HELLO_SECONDS)
        with self._lock:
            if self.error is None:
                self._connection = connection
        if self._connection is None:
            connection.close()
            self._check()

    def _send(self, message: Message) -> None:
        with self._connected() as connection:
            connection.say(message)

    def _receive(self, *kinds: type[_M]) -> _M:
        with self._connected() as connection:
            return connection.hear(*kinds)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[RankConnection]:
        """Use the connection; where nothing comes any more, raise what has ended the load."""
        assert self._connection is not None, "it has connected"
        try:
            yield self._connection
        except PeerGoneError as error:
            self._check()
            raise PeerUnavailableError(f"the receiving rank has ended the load: {error}") from error

    def _check(self) -> None:
        if self.error is not None:
            raise copy_error(self.error)
