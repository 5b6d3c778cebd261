"""Hand-off queue from the thread that receives a base to the threads that load it.

Each rank of the replica has one loader (``RankHandoff`` is that of the other ranks). A base that is
loaded in place has no copy that waits for a commit: each bucket is loaded from the memory that it
was received in, and that memory is then used again. Nothing here knows where buckets come from, or
how they are loaded. One file: a loader takes buckets from either end, the queue of its own process
or its copy in another rank's, and both end alike.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from rollout_side.memory.messages import (
    MESSAGES,
    Arrived,
    Buffers,
    Complete,
    Follow,
    Layout,
    Loaded,
    LoadRequest,
    Message,
    RankConnection,
    Working,
)
from rollout_side.memory.segment import Segment
from weft_rl.contract.errors import (
    DigestMismatchError,
    LoadFailedError,
    NotReadyError,
    PeerUnavailableError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.interrupts import PROGRESS_SECONDS
from weft_rl.ipc.connection import PeerError, PeerGoneError, connect_unix
from weft_rl.ipc.handshake import Handshake, derive
from weft_rl.ipc.listener import Listener
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire.buckets import in_manifest_order

#: Seconds without progress in which an engine may finish its layers after the last bucket.
FINISHING_SECONDS = 60.0


class SharedBucket(NamedTuple):
    """Place where other processes find a bucket."""

    buffers: Sequence[Segment]
    """All buffers that a side group receives in: the same object for each of its buckets."""
    number: int
    """Number of the buffer that the bucket lies in, from its first byte on."""


class _QueuedBucket(NamedTuple):
    wire: torch.Tensor
    shared: SharedBucket | None


@dataclass
class _Loader:
    num_taken: int = 0
    num_loaded: int = 0
    is_complete: bool = False


class HandoffQueue:
    """Receiving rank's end of a transfer that is loaded in place: its ordered buckets. Each is put
    once, and taken once by each rank's loader.

    It outlives a side group: what was put stays, and the receiver of the next group resumes there.
    The receiver bounds the memory: it puts no more buckets than it has buffers.

    Args:
        transfer_id: Transfer that brings the buckets.
        version: Version that the buckets belong to.
        manifest: Manifest of that version.
        deadline: ``time.monotonic()`` at which both sides give up.
        num_loaders: Number of ranks of the replica. The first is this process's; others are given
            no bucket before it was.
    """

    def __init__(
        self,
        transfer_id: str,
        version: PolicyVersion,
        manifest: Manifest,
        deadline: float,
        num_loaders: int = 1,
    ) -> None:
        self.transfer_id, self.version, self.manifest = transfer_id, version, manifest
        self._changed = threading.Condition()
        self._deadline = deadline
        self._digests: list[Sequence[int]] = []
        #: Buckets by index, until every loader is done with them.
        self._waiting: dict[int, _QueuedBucket] = {}
        self._loaders = [_Loader() for _ in range(num_loaders)]
        #: What ended it before it was loaded whole.
        self.error: WeftError | None = None
        self._on_progress: Callable[[int], None] = lambda bucket: None

    # -- either side, any thread ---------------------------------------------------

    @property
    def digests(self) -> list[Sequence[int]]:
        """Digests of the tensors of each bucket that was put; a copy."""
        with self._changed:
            return list(self._digests)

    @property
    def num_loaders(self) -> int:
        """Number of ranks that load what is put."""
        return len(self._loaders)

    @property
    def tensor_digests(self) -> list[int]:
        """Digests of the version's tensors, in the manifest's order, once the loader was given all
        buckets."""
        return in_manifest_order(self.manifest, self.digests)

    @property
    def content_digest(self) -> bytes:
        """Content digest of the version, once the loader was given all buckets."""
        return content_digest(self.tensor_digests)

    @property
    def is_begun(self) -> bool:
        """True if this process's loader was given a bucket."""
        return self._loaders[0].num_taken > 0

    @property
    def is_complete(self) -> bool:
        """True if every rank has loaded all buckets and is done."""
        return all(loader.is_complete for loader in self._loaders)

    def report_to(self, on_progress: Callable[[int], None]) -> None:
        """Set the callback for the bucket that is being loaded; it replaces the former one."""
        self._on_progress = on_progress

    def resume(self, deadline: float) -> None:
        """Let the transfer resume in another group, until ``deadline`` if that is later.

        Raises:
            WeftError: The error that has ended the transfer.
        """
        with self._changed:
            self._check()
            self._deadline = max(self._deadline, deadline)
            self._changed.notify_all()

    def fail(self, error: WeftError) -> None:
        """End the transfer on all ranks: every wait, now and later, raises ``error``. The first
        error counts, and a complete load is not undone."""
        with self._changed:
            if self.error is None and not self.is_complete:
                self.error = copy_error(error)
            self._waiting.clear()
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake a waiting receiver, so that it calls its ``check`` now."""
        with self._changed:
            self._changed.notify_all()

    # -- the receiver's thread -----------------------------------------------------

    def put(
        self,
        index: int,
        wire: torch.Tensor,
        digests: Sequence[int],
        shared: SharedBucket | None = None,
    ) -> None:
        """Hand over a verified bucket; a bucket that was put before is dropped.

        Args:
            wire: uint8, the bucket's payload and trailer. Loaders read it until
                ``is_loaded(index)``.
            digests: Digests of the bucket's tensors.
            shared: Place where other ranks find the bucket, if there are any.

        Raises:
            DigestMismatchError: It has other bytes than the first time, which may be loaded.
            WeftError: The error that has ended the transfer.
        """
        with self._changed:
            self._check()
            if index < len(self._digests):
                if self._digests[index] != digests:
                    raise DigestMismatchError(
                        f"bucket {index} of {self.version} came again with other bytes, after it "
                        "was loaded in place; push again"
                    )
                return
            assert index == len(self._digests), "buckets are put in order"
            self._digests.append(digests)
            self._waiting[index] = _QueuedBucket(wire, shared)
            self._changed.notify_all()

    def is_loaded(self, index: int) -> bool:
        """Return whether every loader is done with a bucket, so that its memory may be written."""
        with self._changed:
            self._check()
            return index < self._num_loaded()

    def wait_loaded(self, index: int, check: Callable[[], None]) -> None:
        """Block until ``is_loaded(index)``.

        Args:
            check: Called before each wait, and after ``wake``; raises to end the wait.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: The error that has ended the transfer, or what ``check`` raised.
        """
        self._wait(lambda: index < self._num_loaded(), f"load bucket {index}", check)

    def wait_complete(self, check: Callable[[], None]) -> None:
        """Block until every loader is done with all buckets; raises as ``wait_loaded`` does.

        Once this process's loader was given the last bucket, it is inside the engine, which
        finishes its layers and cannot report. For ``FINISHING_SECONDS`` this method reports in its
        place. Another rank's process reports for itself, as long as it runs.
        """
        given_at, own = 0.0, self._loaders[0]

        def finishing() -> None:
            nonlocal given_at
            if own.num_taken == len(self.manifest.buckets) and not own.is_complete:
                given_at = given_at or time.monotonic()
                if time.monotonic() - given_at < FINISHING_SECONDS:
                    self.report_progress()

        self._wait(lambda: self.is_complete, "load the last bucket", check, finishing)

    def _wait(
        self,
        done: Callable[[], bool],
        what: str,
        check: Callable[[], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        with self._changed:
            while True:
                self._check()
                if done():
                    return
                check()
                on_progress()
                if not self._wait_once():
                    raise TransferTimeoutError(
                        f"the engine did not {what} of {self.version} before the deadline"
                    )

    # -- a loader's thread ---------------------------------------------------------

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every bucket with its index, in order, to this process's loader; block for each.
        Once only, on the loader's thread.

        A bucket's memory may be written again when the next one is asked for, or the iterator is
        closed. On an accelerator both wait until the calling thread's current stream has done all
        its work.

        Raises:
            TransferTimeoutError: The deadline has passed.
            WeftError: The error that has ended the transfer.
        """
        for index in range(len(self.manifest.buckets)):
            with self._taken(0) as waiting:
                try:
                    yield index, waiting.wire
                finally:
                    synchronize()

    def shared_buckets(self, loader: int) -> Iterator[tuple[int, SharedBucket, Sequence[int]]]:
        """Yield the index, place and tensor digests of every bucket for another rank's loader.
        Otherwise as ``buckets``."""
        if not 0 < loader < len(self._loaders) or self._loaders[loader].num_taken:
            raise NotReadyError(f"rank {loader} has no load of {self.version} to begin; push again")
        for index in range(len(self.manifest.buckets)):
            with self._taken(loader) as waiting:
                assert waiting.shared is not None, "buckets are shared where there are more ranks"
                yield index, waiting.shared, self._digests[index]

    def report_progress(self) -> None:
        """Report, on the loader's thread, that it works; may be called at any rate."""
        self._on_progress(max(0, self._num_taken() - 1))

    def complete(self, loader: int = 0) -> None:
        """Report that a rank's loader is done with all buckets.

        Raises:
            WeftError: The error that has ended the transfer before.
        """
        with self._changed:
            self._check()
            state = self._loaders[loader]
            assert state.num_taken == len(self.manifest.buckets), "the loader left buckets out"
            state.num_loaded, state.is_complete = state.num_taken, True
            self._changed.notify_all()

    @contextmanager
    def _taken(self, loader: int) -> Iterator[_QueuedBucket]:
        """Lend the next bucket to a loader, which is done with it at the end."""
        waiting = self._take(loader)
        self.report_progress()
        try:
            yield waiting
        finally:
            with self._changed:
                state = self._loaders[loader]
                state.num_loaded = state.num_taken
                if state.num_loaded <= self._num_loaded():
                    self._waiting.pop(state.num_loaded - 1, None)
                self._changed.notify_all()

    def _take(self, loader: int) -> _QueuedBucket:
        state = self._loaders[loader]
        with self._changed:
            while True:
                self._check()
                if state.num_taken < (self._loaders[0].num_taken if loader else len(self._digests)):
                    state.num_taken += 1
                    self._changed.notify_all()
                    return self._waiting[state.num_taken - 1]
                if not self._wait_once():
                    self.error = TransferTimeoutError(
                        f"bucket {state.num_taken} of {self.version} did not arrive before the "
                        "deadline"
                    )
                    self._changed.notify_all()

    # -- how, with the lock held ---------------------------------------------------

    def _num_taken(self) -> int:
        return min(loader.num_taken for loader in self._loaders)

    def _num_loaded(self) -> int:
        return min(loader.num_loaded for loader in self._loaders)

    def _check(self) -> None:
        if self.error is not None:
            raise copy_error(self.error)

    def _wait_once(self) -> bool:
        """Wait for a change, or for a moment; return False if the deadline has passed."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._changed.wait(min(left, PROGRESS_SECONDS))
        return True


def copy_error(error: WeftError) -> WeftError:
    """Copy an error without its traceback, whose frames would keep buckets alive. Several threads
    can raise copies of one error."""
    return error_from_reason(error.reason, error.message, error.metadata)


def synchronize() -> None:
    """Block until the calling thread's current CUDA stream has done its work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


class HandoffSlot:
    """Slot of a worker's hand-off queue, of which there is at most one; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handoff: HandoffQueue | None = None

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """Transfer that is loaded in place, or was and waits for its commit; empty if there is
        none."""
        handoff = self._handoff
        return (handoff.transfer_id,) if handoff is not None else ()

    def put(self, handoff: HandoffQueue) -> None:
        """Put a new queue in the slot; the former one is ended."""
        with self._lock:
            former, self._handoff = self._handoff, handoff
        if former is not None:
            former.fail(TransferAbortedError(f"{handoff.version} is loaded in place instead"))

    def of(self, transfer_id: str) -> HandoffQueue | None:
        """Return a transfer's queue; None if it is not, or no longer, loaded in place."""
        handoff = self._handoff
        return handoff if handoff is not None and handoff.transfer_id == transfer_id else None

    def forget(self, transfer_id: str) -> HandoffQueue | None:
        """Remove and return the queue of a transfer, which is committed; None if it is not held."""
        with self._lock:
            handoff = self.of(transfer_id)
            if handoff is not None:
                self._handoff = None
            return handoff

    def discard(self, transfer_id: str) -> None:
        """Remove a transfer's queue, and end it."""
        if (handoff := self.forget(transfer_id)) is not None:
            handoff.fail(TransferAbortedError(f"{transfer_id} was discarded"))


_log = logging.getLogger(__name__)

# A loader ends at its next bucket, so this bounds the load of one bucket.
_END_SECONDS = 20.0


class InPlaceLoad:
    """Thread that loads a hand-off's buckets on one rank; it begins at once.

    Args:
        handoff: Hand-off to load from.
        load: Called once on that thread, with the hand-off. If it has changed nothing, it raises
            what the hand-off raised, or any typed error. If weights may be mixed, it raises
            LoadFailedError with metadata ``dirty`` "true". Any other error counts as that.
    """

    def __init__(self, handoff: Handoff, load: Callable[[Handoff], None]) -> None:
        self.handoff = handoff
        self.seconds = 0.0
        """Seconds that the load took, once it has ended."""
        self._load = load
        self._changed = False
        self._thread = threading.Thread(
            target=self._run, name=f"weft-load-{handoff.version}", daemon=True
        )
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """Thread that loads."""
        return self._thread

    @property
    def transfer_id(self) -> str:
        """Transfer that brings the buckets."""
        return self.handoff.transfer_id

    @property
    def is_running(self) -> bool:
        """True if the thread may still touch the weights."""
        return self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """True if all was loaded; on the receiving rank, by every rank."""
        return self.handoff.is_complete

    @property
    def is_void(self) -> bool:
        """True if the load ended before its first bucket."""
        return self.handoff.error is not None and not self.handoff.is_begun

    def check(self) -> None:
        """Check that the load has not ended with an error.

        Raises:
            NotReadyError: The load has ended with an error.
        """
        if (error := self.handoff.error) is not None:
            raise NotReadyError(
                f"transfer {self.transfer_id} has ended on this replica: {error.message}"
            )

    def end(self, timeout_seconds: float = _END_SECONDS) -> bool:
        """End the load, unless it is complete; block until the thread has ended.

        Returns:
            Whether the weights have changed: loaded whole, or mixed.
        """
        self.handoff.fail(TransferAbortedError("the load in place was ended"))
        self._thread.join(timeout_seconds)
        return self._changed or self._thread.is_alive()

    def confirm(self, expected_digest: bytes) -> float:
        """Check that the version to be committed was loaded; return the seconds that it took.

        Raises:
            LoadFailedError: Metadata ``dirty``: other bytes, or not all, are loaded.
            NotReadyError: The load is not complete and has changed nothing; it is ended.
        """
        if not self.is_complete:
            changed = self.end()
            what = f"{self.handoff.version} cannot be committed: it was not loaded whole"
            if changed:
                raise LoadFailedError(
                    f"{what}, and the weights are mixed", metadata={"dirty": "true"}
                )
            raise NotReadyError(what)
        digest = self.handoff.content_digest
        if digest != expected_digest:
            error = DigestMismatchError(
                f"{self.handoff.version} was loaded with digest {digest.hex()}, but the commit is "
                f"for {expected_digest.hex()}"
            )
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error
        self._thread.join(_END_SECONDS)
        return self.seconds

    def _run(self) -> None:
        handoff, began = self.handoff, time.perf_counter()
        try:
            self._load(handoff)
            self.seconds, self._changed = time.perf_counter() - began, True
            handoff.complete()
        except WeftError as error:
            self._changed |= error.metadata.get("dirty") == "true"
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 (the edge of a thread)
            _log.exception("loading %s in place failed", handoff.version)
            self._changed = True
            self._fail(
                LoadFailedError(
                    f"loading {handoff.version} in place failed: {type(error).__name__}: {error}",
                    metadata={"dirty": "true"},
                )
            )

    def _fail(self, error: WeftError) -> None:
        _log.warning("loading %s in place failed: %s", self.handoff.version, error)
        self.handoff.fail(error)


# -- the other ranks of the replica ------------------------------------------------------
#
# The receiving rank listens on a Unix socket. Each other rank connects once a transfer, is told
# where the buckets lie, maps them, and says when it is done with each. A bucket's memory is
# received into again once all ranks are done with it. A rank that fails, or goes, ends the load of
# all.


_M = TypeVar("_M")

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
        follow: Keeps the connection of a rank whose weights take deltas; blocks until it is not
            used any more.
    """

    def __init__(
        self,
        secret: str,
        find: Callable[[str], HandoffQueue | None],
        follow: Callable[[RankConnection, Follow], None],
    ) -> None:
        self._find, self._follow, self._handshake = find, follow, Handshake(secret.encode())
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
            wanted = connection.hear(LoadRequest, Follow)
            assert isinstance(wanted, LoadRequest | Follow), "it has heard one or the other"
            connection.name_peer(f"rank {wanted.rank} of the replica")
            if isinstance(wanted, Follow):
                self._follow(connection, wanted)
                return
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
    """End of a rank that does not receive, as ``HandoffQueue`` is the receiving rank's. It waits as
    long as that does, whose deadline is that of all. Connects on the loader's thread, when that
    first asks for something."""

    def __init__(self, secret: str, rank: int, transfer_id: str, version: PolicyVersion) -> None:
        self.transfer_id, self.version = transfer_id, version
        self._secret, self._rank = secret, rank
        self._lock = threading.Lock()
        self._connection: RankConnection | None = None
        self.error: WeftError | None = None
        self._digests: list[Sequence[int]] = []
        #: Whether all is loaded on this rank.
        self.is_complete = False
        self._progress_at = 0.0

    @cached_property
    def manifest(self) -> Manifest:
        """Manifest of the version; blocks for it, on the loader's thread."""
        self._connect()
        self._send(LoadRequest(self.transfer_id, self._rank))
        return self._receive(Layout).manifest

    @property
    def tensor_digests(self) -> list[int]:
        return in_manifest_order(self.manifest, self._digests)

    @property
    def content_digest(self) -> bytes:
        return content_digest(self.tensor_digests)

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


#: One rank's end of a transfer that is loaded in place.
Handoff = HandoffQueue | RankHandoff
