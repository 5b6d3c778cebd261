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
from rollout_side.memory.ranks.channel import (
    Channel,
    accept_channel,
    address_of,
    connect_channel,
)
from rollout_side.memory.ranks.messages import (
    Arrived,
    Buffers,
    Complete,
    Layout,
    Loaded,
    Message,
    Wanted,
    Working,
)
from rollout_side.memory.segment import Segment
from weft_rl.contract.errors import LoadFailedError, NotReadyError, PeerUnavailableError, WeftError
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.ipc.arrivals import Arrivals
from weft_rl.ipc.sockets import close_in_children
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.progress import PROGRESS_SECONDS
from weft_rl.transport.wire.buckets import in_manifest_order

_M = TypeVar("_M")
_log = logging.getLogger(__name__)

# A rank that has connected shows at once who it is, and says what it wants. Until it has there may
# be so many: each has a thread.
_HELLO_SECONDS = 10.0
_MAX_STRANGERS = 64
# After an error that is not the socket's end.
_RETRY_SECONDS = 0.1


# -- the receiving rank --------------------------------------------------------------


class RankServer:
    """Server that gives hand-off queues' buckets to the replica's other ranks, on its own threads.

    Args:
        secret: Secret that the replica's ranks know, and nobody else.
        find: Returns the hand-off queue of a transfer that is loaded in place.
    """

    def __init__(self, secret: str, find: Callable[[str], HandoffQueue | None]) -> None:
        self._secret, self._find, self._is_closed = secret, find, False
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self._listener)
        self._listener.bind(address_of(secret))
        self._listener.listen(socket.SOMAXCONN)
        self._arrivals = Arrivals(self._listener, _MAX_STRANGERS)
        self._thread = threading.Thread(target=self._accept, name="weft-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no further rank; a load under way ends with its queue. Blocks for some
        milliseconds, at most a second."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        self._thread.join(1.0)

    def _accept(self) -> None:
        while True:
            try:
                arrived = self._arrivals.take(None)
            except OSError as error:
                if self._is_closed:
                    self._arrivals.close()
                    self._listener.close()
                    return
                _log.warning("no rank can connect: %s", error)
                time.sleep(_RETRY_SECONDS)
                continue
            for connected in arrived:
                self._begin(connected)

    def _begin(self, connected: socket.socket) -> None:
        """Serve whoever has connected on a thread of its own, if there may be another."""
        if not self._strangers.acquire(blocking=False):
            connected.close()
            return
        try:
            threading.Thread(
                target=self._admit, args=(connected,), name="weft-rank", daemon=True
            ).start()
        except RuntimeError as error:  # this process can have no further thread
            _log.warning("a rank is turned away: %s", error)
            self._strangers.release()
            connected.close()

    def _admit(self, connected: socket.socket) -> None:
        """Serve a rank; close the connection of anybody else."""
        try:
            channel = accept_channel(connected, self._secret, _HELLO_SECONDS)
        except WeftError as error:
            _log.warning("%s", error)
            return
        finally:
            self._strangers.release()
        self._serve(channel)

    def _serve(self, channel: Channel) -> None:
        handoff: HandoffQueue | None = None
        try:
            if not channel.poll(_HELLO_SECONDS):
                raise NotReadyError("a rank has connected and said nothing")
            wanted = channel.receive(Wanted)
            handoff = self._find(wanted.transfer_id)
            if handoff is None:
                raise NotReadyError(
                    f"transfer {wanted.transfer_id} is not, or no longer, loaded in place"
                )
            _give(channel, handoff, wanted.rank)
        except (EOFError, OSError) as error:
            if handoff is not None:
                handoff.fail(LoadFailedError(f"a rank of the replica has ended its load: {error}"))
        except WeftError as error:
            if handoff is not None:
                handoff.fail(error)
            channel.fail(error)
        except BaseException as error:  # noqa: BLE001 (the edge of a thread)
            _log.exception("a rank cannot be given what it is to load")
            typed = LoadFailedError(f"{type(error).__name__}: {error}")
            if handoff is not None:
                handoff.fail(typed)
            channel.fail(typed)
        finally:
            channel.close()


def _give(channel: Channel, handoff: HandoffQueue, rank: int) -> None:
    """Give one rank every bucket; returns once it has loaded all."""
    channel.send(Layout(handoff.manifest))
    known: Sequence[Segment] = ()
    for _, shared, digests in handoff.shared_buckets(rank):
        if shared.buffers is not known:
            known = shared.buffers
            # Made for each rank: on an accelerator every process that maps it counts.
            channel.send(Buffers([segment.ref for segment in known]))
        channel.send(Arrived(shared.number, digests))
        _wait_for(Loaded, channel, handoff)
    _wait_for(Complete, channel, handoff)
    handoff.complete(rank)


def _wait_for(kind: type[Loaded] | type[Complete], channel: Channel, handoff: HandoffQueue) -> None:
    """Wait for a rank's message of this kind; meanwhile pass on its reports that it works."""
    while True:
        while not channel.poll(PROGRESS_SECONDS):
            if (error := handoff.error) is not None:
                raise copy_error(error)
        if isinstance(channel.receive(kind, Working), kind):
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
        self._channel: Channel | None = None
        self._error: WeftError | None = None
        self._digests: list[Sequence[int]] = []
        self._is_complete = False
        self._progress_at = 0.0

    @cached_property
    def manifest(self) -> Manifest:
        """See ``Handoff``; blocks for it, on the loader's thread."""
        self._connect()
        self._send(Wanted(self.transfer_id, self._rank))
        return self._receive(Layout).manifest

    @property
    def content_digest(self) -> bytes:
        """See ``Handoff``."""
        return content_digest(in_manifest_order(self.manifest, self._digests))

    @property
    def error(self) -> WeftError | None:
        """See ``Handoff``."""
        return self._error

    @property
    def is_begun(self) -> bool:
        """See ``Handoff``."""
        return bool(self._digests)

    @property
    def is_complete(self) -> bool:
        """See ``Handoff``; of this rank alone."""
        return self._is_complete

    def fail(self, error: WeftError) -> None:
        """See ``Handoff``."""
        with self._lock:
            if self._error is not None or self._is_complete:
                return
            self._error, channel = copy_error(error), self._channel
        if channel is not None:
            channel.fail(error)

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """See ``Handoff``."""
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
        with contextlib.suppress(EOFError, OSError, WeftError):
            while time.monotonic() < until:
                with self._lock:
                    if self._is_complete or self._error is not None:
                        return
                    assert self._channel is not None, "buckets were loaded"
                    self._channel.send(Working())
                time.sleep(PROGRESS_SECONDS)

    def report_progress(self) -> None:
        """See ``Handoff``."""
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            self._send(Working())

    def complete(self) -> None:
        """See ``Handoff``."""
        with self._lock:
            self._check()
            self._is_complete = True
            channel = self._channel
        assert channel is not None, "buckets were loaded"
        with contextlib.suppress(EOFError, OSError, WeftError):
            channel.send(Complete())  # all of it is loaded here, whoever has gone
        channel.close()

    def _connect(self) -> None:
        channel = connect_channel(self._secret, _HELLO_SECONDS)
        with self._lock:
            if self._error is None:
                self._channel = channel
        if self._channel is None:
            channel.close()
            self._check()

    def _send(self, message: Message) -> None:
        assert self._channel is not None, "it has connected"
        try:
            self._channel.send(message)
        except (EOFError, OSError) as error:
            raise self._ended(error) from error

    def _receive(self, *kinds: type[_M]) -> _M:
        assert self._channel is not None, "it has connected"
        try:
            return self._channel.receive(*kinds)
        except (EOFError, OSError) as error:
            raise self._ended(error) from error

    def _ended(self, error: BaseException) -> WeftError:
        """Return the error to raise because nothing comes any more."""
        if self._error is not None:
            return copy_error(self._error)
        return PeerUnavailableError(f"the receiving rank has ended the load: {error}")

    def _check(self) -> None:
        if self._error is not None:
            raise copy_error(self._error)
