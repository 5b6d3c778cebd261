"""Versions that a worker process holds: staged versions, retained bases, servable adapters.

The receiver's thread puts staged versions in; the worker's methods (on the engine's thread) take
them out. Nothing here knows vLLM. One file: all of it is one account of memory, under one lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rollout_side.engine import MemoryUsage
from rollout_side.memory.handoff import HandoffQueue, HandoffSlot
from rollout_side.memory.rank_deltas import RankFollowers
from rollout_side.memory.segment import Memory, Segment, SegmentPool, spare_bytes
from rollout_side.memory.served_delta import ServedSlot, StagedDelta
from rollout_side.memory.versions import (
    AdapterEntry,
    PartialTransfer,
    PartialTransfers,
    RetainedBases,
    SendableVersion,
    ServedBase,
    StagedHandle,
    StagedVersion,
    bucket_starts,
    is_adapter,
)
from weft_rl.contract.errors import (
    CapacityError,
    NotFoundError,
    NotReadyError,
    TransferAbortedError,
)
from weft_rl.contract.names import PolicyVersion, is_replica_sender
from weft_rl.progress import OnProgress, ignore_progress

_log = logging.getLogger(__name__)


def check_adapter_room(
    num_bytes: int, capacity: int, held: Mapping[PolicyVersion, int], waiting: int
) -> None:
    """Refuse an adapter that does not fit in the store.

    Args:
        held: Bytes of each adapter that can be served.
        waiting: Bytes that wait for their commit.
    """
    in_use = sum(held.values())
    if in_use + waiting + num_bytes > capacity:
        names = ", ".join(map(str, sorted(held)))
        raise CapacityError(
            f"the adapter store holds {in_use:,} of {capacity:,} bytes "
            f"({names or 'nothing'}) and {waiting:,} wait for their commit: no room for "
            f"{num_bytes:,} more; forget a policy (weft forget POLICY), keep fewer versions "
            "(weft retain POLICY N), or start the replica with a larger --adapter-memory-gib"
        )


def check_base_room(
    num_bytes: int, capacity: int, in_use: int, pinned: Sequence[PolicyVersion]
) -> None:
    """Refuse a base that does not fit beside what is staged and retained.

    Args:
        in_use: Bytes that are staged or retained.
        pinned: Versions among them that no push may take.
    """
    if in_use + num_bytes > capacity:
        names = ", ".join(sorted(map(str, pinned)))
        text = f", {names} pinned" if names else ""
        raise CapacityError(
            f"staging holds {in_use:,} of {capacity:,} bytes{text}: no room for {num_bytes:,} "
            "more; start the replica with a larger --staging-memory-gib"
        )


class Reservations:
    """Memory reserved for each transfer until it is staged or has ended."""

    def __init__(self, lock: threading.RLock) -> None:
        self._ended = threading.Condition(lock)
        self._num_bytes: dict[str, int] = {}
        self._clones: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for all transfers."""
        return sum(self._num_bytes.values())

    def add(self, transfer_id: str, num_bytes: int, *, clone: bool) -> None:
        """Reserve memory for a transfer."""
        self._num_bytes[transfer_id] = num_bytes
        if clone:
            self._clones.add(transfer_id)

    def end(self, *transfer_ids: str) -> None:
        """End the reservations of transfers; succeeds for those that have none."""
        for transfer_id in transfer_ids:
            self._num_bytes.pop(transfer_id, None)
            self._clones.discard(transfer_id)
        self._ended.notify_all()

    def end_clones(
        self, fits: Callable[[], bool], drop: Callable[[], Sequence[str]], timeout_seconds: float
    ) -> None:
        """End the reservations of clones until there is room. Waits for clones that have not
        noticed yet that they were ended.

        Args:
            fits: Returns whether there is room by now.
            drop: Drops partial clones; returns their transfers, whose reservations end.
        """
        end = time.monotonic() + timeout_seconds
        while self._clones and not fits():
            dropped = drop()
            self.end(*dropped)
            left = end - time.monotonic()
            if not dropped and (left <= 0 or not self._ended.wait(left)):
                return


#: Interval at which a wait checks whether a thread has ended: nothing notifies it.
_LOOK_SECONDS = 0.2

#: Has a thread set the event between two pieces of work; returns False if it cannot.
Ask = Callable[[threading.Event], bool]


class WorkingThreads:
    """Threads of one worker process; thread-safe. Those that have ended are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Ask] = {}

    def add(self, thread: threading.Thread, ask: Ask = lambda turn: False) -> None:
        """Add a thread that has been started.

        Args:
            ask: Has a thread that lives on answer between two pieces of work. A thread without it
                is waited for until it ends.
        """
        with self._lock:
            self._threads = {t: a for t, a in self._threads.items() if t.is_alive()}
            self._threads[thread] = ask

    def wait_turns(self, given_up: threading.Event) -> bool:
        """Block until each thread that was known at the call has answered or ended.

        Returns:
            False if ``given_up`` was set before.
        """
        with self._lock:
            known = dict(self._threads)
        for thread, ask in known.items():
            turn = threading.Event()
            asked = False
            while thread.is_alive() and not turn.is_set():
                asked = asked or ask(turn)
                if given_up.is_set():
                    return False
                turn.wait(_LOOK_SECONDS)
        return not given_up.is_set()


#: Number of discarded transfers to remember: the order may overtake the last bucket.
_MAX_DISCARDED = 256
# A receiving thread notices at once that its clone has ended, unless it verifies a bucket.
_CLONE_END_SECONDS = 5.0


def _prepare_nothing(_staged: StagedVersion, _on_progress: Callable[[], None]) -> None:
    pass


@dataclass
class WorkerStore:
    """Staged versions and adapters of one worker process; thread-safe.

    Args:
        staging_capacity_bytes: Bound of what is being staged or waits for its commit, retained
            bases included; they are dropped, oldest first, where a push needs the room.
        adapter_capacity_bytes: Bound of the adapters that can be served.
        base_copies: Number of base versions to keep a copy of, the served one included.
        memory: Allocator of the memory for their bytes.
        num_ranks: Number of ranks of the replica; each loads what is received here in place.
    """

    staging_capacity_bytes: int
    adapter_capacity_bytes: int
    base_copies: int = 0
    memory: Memory = field(default_factory=Memory)
    num_ranks: int = 1
    writes_copies: bool = False
    """True if copies of the base are written to a spill directory: then deltas change a copy."""
    threads: WorkingThreads = field(default_factory=WorkingThreads, init=False)
    """Threads of this process that receive, load or send."""
    handoff: HandoffSlot = field(default_factory=HandoffSlot, init=False)
    """Slot of the base that is loaded in place; filled by ``put_handoff``."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _staged: dict[str, StagedVersion | StagedDelta] = field(default_factory=dict)
    _adapters: dict[PolicyVersion, AdapterEntry] = field(default_factory=dict)
    _partial: PartialTransfers = field(default_factory=PartialTransfers)
    _discarded: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_DISCARDED))
    _last_adapter_bytes: int = 0

    def __post_init__(self) -> None:
        self._segments = SegmentPool(self.memory.keeps_free)
        self._bases = RetainedBases(self.base_copies)
        self._reservations = Reservations(self._lock)
        #: The engine's own weights, as they can be sent from here.
        self.served = ServedSlot(self._lock)
        #: Prepares a switch to a version that is to be staged, if it can; calls a function now and
        #: then.
        self.prepare_switch: Callable[[StagedVersion, Callable[[], None]], None] = _prepare_nothing
        #: The replica's other ranks, as far as their weights take deltas.
        self.followers = RankFollowers(lambda: self.num_ranks)

    # -- the receiver's side ------------------------------------------------

    def reserve(
        self,
        transfer_id: str,
        num_bytes: int,
        *,
        adapter: bool,
        clone: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> Segment:
        """Reserve memory for a transfer, reused from a dropped version if one fits.

        Blocks for the page faults of fresh memory (about 0.3 s a GiB), and reports progress. Blocks
        for a moment, too, if a clone that was ended still holds the room. A partial clone gives way
        to everything but a ``clone``.

        Raises:
            CapacityError: The bound would be exceeded; names what holds the memory.
        """
        with self._lock:
            if not clone:
                self._end_clones(num_bytes, adapter=adapter)
            if not adapter:  # retained bases give way, oldest first
                room = self.staging_capacity_bytes - self._num_waiting_bytes() - num_bytes
                self._segments.put(*self._bases.give_way(room, self._segments.is_lent))
                self.served.bound(room - self._bases.num_bytes)
            self._check_room(num_bytes, adapter=adapter)
            self._reservations.add(transfer_id, num_bytes, clone=clone)
            segment = self._segments.take(num_bytes, self.memory.place(adapter=adapter))
            if segment is not None:
                return segment
        try:
            return self.memory.allocate(num_bytes, adapter=adapter, on_progress=on_progress)
        except BaseException:
            self.release(transfer_id, None)
            raise

    def make_spare(self) -> None:
        """Make memory for another adapter of the size that was staged last; blocks for its page
        faults. During a push they would take longer than receiving the adapter."""
        with self._lock:
            size = self._last_adapter_bytes
            if not size or self._segments.find(size, self.memory.place(adapter=True)):
                return
        segment = self.memory.allocate(size, adapter=True)
        with self._lock:
            self._segments.put(segment)

    def release(self, transfer_id: str, segment: Segment | None) -> None:
        """End a reservation without result; ``segment`` may be reused unless None. Pass None when
        an abandoned operation may still write to it."""
        with self._lock:
            self._reservations.end(transfer_id)
            self._segments.put(segment)

    def put_staged(self, staged: StagedVersion | StagedDelta) -> None:
        """Turn a reservation into a staged version. A delta has none, for its size is not known
        before it is read.

        Raises:
            CapacityError: There is no room for a delta.
            TransferAbortedError: Its transfer was discarded meanwhile; the memory
                may be reused.
        """
        with self._lock:
            self._reservations.end(staged.transfer_id)
            if staged.transfer_id in self._discarded:
                self._free(staged)
                raise TransferAbortedError(f"transfer {staged.transfer_id} was discarded meanwhile")
            if isinstance(staged, StagedDelta):
                self._check_room_for(staged)
            self._staged[staged.transfer_id] = staged
            if is_adapter(staged.version):
                self._last_adapter_bytes = staged.num_bytes

    def _check_room_for(self, delta: StagedDelta) -> None:
        room = self._undo_room(delta.num_bytes)
        if delta.num_bytes > room:
            raise CapacityError(
                f"{delta.version} changes elements that take {delta.num_bytes:,} bytes beside the "
                f"weights, and {max(0, room):,} of --staging-memory-gib are left"
            )

    def _undo_room(self, read_bytes: int = 0) -> int:
        """Return the bytes that are left for what takes deltas back: on a GPU also what it takes,
        and what is to spare beside it.

        Args:
            read_bytes: Bytes of a delta that was read, and is not staged yet.
        """
        room = self.staging_capacity_bytes - self._num_waiting_bytes() - self._bases.num_bytes
        base = self.served.base
        if base is not None and base.takes_deltas and base.device.type == "cuda":
            taken_bytes = self.served.undo_bytes + read_bytes
            room = min(room, taken_bytes + spare_bytes(base.device))
        return room

    def _free(self, staged: StagedVersion | StagedDelta | None) -> None:
        """Let the memory of a staged version be used again."""
        if isinstance(staged, StagedVersion):
            self._segments.put(staged.segment)

    def _end_clones(self, num_bytes: int, *, adapter: bool) -> None:
        """Drop a partial clone if its room is needed. Waits for a clone that has not noticed yet
        that it was ended."""

        def fits() -> bool:
            try:
                self._check_room(num_bytes, adapter=adapter, droppable=self._bases.num_bytes)
            except CapacityError:
                return False
            return True

        self._reservations.end_clones(fits, self._partial.drop_clones, _CLONE_END_SECONDS)

    def _check_room(self, num_bytes: int, *, adapter: bool, droppable: int = 0) -> None:
        waiting = self._num_waiting_bytes()
        if adapter:
            held = {v: e.staged.segment.num_bytes for v, e in self._adapters.items()}
            check_adapter_room(num_bytes, self.adapter_capacity_bytes, held, waiting)
        else:
            in_use = waiting + max(self._bases.num_bytes - droppable, self._bases.num_pinned_bytes)
            check_base_room(num_bytes, self.staging_capacity_bytes, in_use, self._bases.pinned)

    def put_partial(self, partial: PartialTransfer) -> None:
        """Keep a transfer that was interrupted, and its reservation, unless it was
        discarded meanwhile."""
        with self._lock:
            if partial.transfer_id in self._discarded:
                self._reservations.end(partial.transfer_id)
            else:
                self._reservations.end(*self._partial.put(partial))

    def settle_partial(self, trainer_id: str) -> None:
        """Note that operations of a trainer's former group have ended for good."""
        with self._lock:
            self._partial.settle(trainer_id)

    def take_partial(
        self, transfer_id: str, trainer_id: str, on_progress: OnProgress = ignore_progress
    ) -> PartialTransfer | None:
        """Take the verified part of a transfer, in memory that is safe to write; None if there is
        none.

        A transfer that was staged whole is un-staged. Other interrupted transfers of the trainer
        are dropped, since it carries out one at a time. Blocks for a copy if an abandoned operation
        may still write to the old memory.
        """
        with self._lock:
            self._reservations.end(*self._partial.drop_others(transfer_id, trainer_id))
            partial = self._partial.pop(transfer_id)
            staged = self._staged.pop(transfer_id, None) if partial is None else None
            if staged is not None and staged.received is not None:
                is_clone = is_replica_sender(trainer_id)
                self._reservations.add(transfer_id, staged.num_bytes, clone=is_clone)
                return staged.received
        if partial is None:
            return None
        return partial if partial.settled else partial.moved(self.memory, on_progress)

    def _num_waiting_bytes(self) -> int:
        """Return the bytes of versions that are being staged, or wait for their commit."""
        staged = (version.num_bytes for version in self._staged.values())
        return sum(staged, start=self._reservations.num_bytes)

    def put_handoff(self, handoff: HandoffQueue) -> None:
        """Begin to load a base in place; a load that is under way ends.

        Raises:
            TransferAbortedError: Its transfer was discarded meanwhile.
        """
        with self._lock:
            if handoff.transfer_id in self._discarded:
                raise TransferAbortedError(
                    f"transfer {handoff.transfer_id} was discarded meanwhile"
                )
            self.handoff.put(handoff)

    # -- retained bases, and versions to send ---------------------------------

    def keep_base(self, transfer_id: str) -> None:
        """Retain a base that was just loaded, staged or retained before; the least
        recently used beyond ``base_copies`` are dropped. Succeeds if it is gone."""
        with self._lock:
            base = self._staged.pop(transfer_id, None)
            base = base or self._bases.of_transfer(transfer_id)
            if isinstance(base, StagedDelta):  # the slot keeps what takes it back
                self.keep_delta(transfer_id)
            elif base is not None:
                if base.received is not None:
                    base.received.forget(0)  # changes that it came as; it is not received again
                self._segments.put(*self._bases.keep(base))

    def keep_delta(self, transfer_id: str, *, most: int | None = None) -> int:
        """Let go of what a delta came as, once every rank has applied it; keep what leads back, as
        far as there is room. Return the number of versions within reach.

        Args:
            most: Keep no more than so many: as many as every rank does.
        """
        with self._lock:
            staged = self._staged.get(transfer_id)
            if isinstance(staged, StagedDelta):
                del self._staged[transfer_id]
            self.served.bound(self._undo_room(), most)
            return len(self.served.reachable)

    def pin_bases(self, versions: Iterable[int]) -> None:
        """Pin the held copies of these versions and unpin all others. Unpinned copies beyond
        ``base_copies`` are dropped. The served base is copied first, where no copy is held and
        the replica holds any: blocks for that."""
        versions = tuple(versions)
        with self._lock:
            base = self.served.base
            if base is not None and base.version.version in versions:
                self._copy_served(base)
            self._segments.put(*self._bases.pin(versions))

    def _copy_served(self, base: ServedBase) -> None:
        """Copy the served base to the host, unless a copy is held, or bases are loaded in place.
        Blocks. Without room no copy is made, and a warning says so."""
        is_held = self._bases.of_version(base.version) is not None
        if self.memory.in_place or is_held or not base.is_whole:
            return
        num_bytes = base.manifest.wire_bytes
        room = self.staging_capacity_bytes - self._num_waiting_bytes() - num_bytes
        self._segments.put(*self._bases.give_way(room, self._segments.is_lent))
        try:
            self._check_room(num_bytes, adapter=False)
            segment = self.memory.allocate(num_bytes, adapter=True)
        except CapacityError as error:
            _log.warning("no copy of %s is kept: %s", base.version, error)
            return
        for bucket, start in enumerate(bucket_starts(base.manifest)):
            base.payload(bucket, segment.data[start:])
        if torch.cuda.is_available():  # where the weights are read
            torch.cuda.current_stream().synchronize()
        copy = StagedVersion(
            base.transfer_id,
            base.version,
            base.manifest,
            segment,
            base.content_digest,
            tensor_digests=base.tensor_digests,
        )
        self._segments.put(*self._bases.keep(copy))

    def retained_bases(self) -> tuple[int, ...]:
        """Return the base versions that are held here: the served one, where it can be read, then
        copies, last used first."""
        with self._lock:
            base = self.served.base
            own = [base.version.version] if base is not None and base.is_whole else []
            return (*own, *(v for v in self._bases.versions if v not in own))

    def undo_bases(self) -> tuple[int, ...]:
        """Return the base versions that are not held, but can be switched to in place; nearest
        first."""
        with self._lock:
            held = self.retained_bases()
            reachable = (base.version.version for base in self.served.reachable)
            return tuple(number for number in reachable if number not in held)

    def held(self, version: PolicyVersion) -> StagedVersion:
        """Return the held copy of a version: an adapter that can be served, or a retained base.

        Raises:
            NotFoundError: No copy is held.
        """
        with self._lock:
            entry = self._adapters.get(version)
            base = entry.staged if entry is not None else self._bases.of_version(version)
        if base is None:
            raise NotFoundError(f"no copy of {version} is held here")
        return base

    def sendable(self, version: PolicyVersion) -> SendableVersion:
        """Return the held copy of a version, or the base that is served.

        Raises:
            NotFoundError: No copy is held.
        """
        with self._lock:
            base = self.served.base
            if base is not None and base.is_whole and base.version == version:
                return self._bases.of_version(version) or base
            return self.held(version)

    def retained(self, version: PolicyVersion) -> SendableVersion:
        """Return what ``sendable`` returns, or a base that can be switched to in place, which
        cannot be sent.

        Raises:
            NotFoundError: No copy is held.
        """
        with self._lock:
            served = [] if self.served.base is None else [self.served.base]
            found = (*served, *self.served.reachable)
            reachable = (base for base in found if base.version == version)
            return next(reachable, None) or self.sendable(version)

    def base_of_content(self, layout_digest: bytes, content_digest: bytes) -> SendableVersion:
        """Return a held copy of the base that has this content, or the base that is served.

        Raises:
            NotReadyError: ``DELTA_REFUSED``: none of this content is held.
        """
        wanted = (layout_digest, content_digest)
        with self._lock:
            held: list[SendableVersion] = [*self._bases]
            if self.served.base is not None:
                held.append(self.served.base)
        for base in held:
            if (base.manifest.layout_digest, base.content_digest) == wanted:
                return base
        found = ", ".join(f"{base.version} ({base.content_digest.hex()})" for base in held)
        raise NotReadyError(
            f"the delta changes a base of content {content_digest.hex()}, and none is held here "
            f"that has it in this layout; held: {found or 'none'}. Push the version whole",
            reason="DELTA_REFUSED",
        )

    def base_for_delta(self, layout_digest: bytes, content_digest: bytes) -> SendableVersion:
        """Return the served base, if it has this content and takes deltas where it lies, else a
        held copy that has it.

        Raises:
            NotReadyError: ``DELTA_REFUSED``: there is none.
        """
        base, served = self.base_of_content(layout_digest, content_digest), self.served.base
        if served is not None and self.takes_deltas() and not self.writes_copies:
            own = served.manifest.layout_digest, served.content_digest
            base = served if own == (layout_digest, content_digest) else base
        if isinstance(base, ServedBase) and not self.takes_deltas():
            raise NotReadyError(
                f"{base.version} does not lie in the engine as plain copies of its tensors, at "
                "each rank: a delta cannot be applied there. Push the version whole",
                reason="DELTA_REFUSED",
            )
        return base

    def takes_deltas(self) -> bool:
        """Return whether the served base takes deltas where it lies: here and at all other ranks of
        the replica."""
        base = self.served.base
        if base is None or not base.takes_deltas:
            return False
        return self.num_ranks == 1 or self.followers.take_deltas(base)

    @contextmanager
    def lend(self, find: Callable[[], SendableVersion]) -> Iterator[SendableVersion]:
        """Lend a held copy, or the served base. A copy's memory is not reused inside the ``with``,
        even if the version is dropped meanwhile. If a served base is loaded anew meanwhile, its
        digest shows it.

        Args:
            find: Finds it: ``sendable``, or ``base_of_content``. Its errors are raised.
        """
        with self._lock:
            copy = find()
            lent = copy.segment if isinstance(copy, StagedVersion) else copy
            self._segments.lend(lent)
        try:
            yield copy
        finally:
            with self._lock:
                self._segments.take_back(lent)

    def fall_asleep(self, *, keep_newest: bool = False) -> bool:
        """Drop copies on the accelerator, except pinned ones, and forbid reads of the engine's
        weights. Returns False, and changes nothing, while somebody reads the weights.

        Args:
            keep_newest: Move the copy of the base used last to the host, if there is room.
        """
        with self._lock:
            base = self.served.base
            is_lent = base is not None and self._segments.is_lent(base)
            if is_lent or self.served.is_being_read:
                return False
            for staged in self._staged.values():
                if isinstance(staged, StagedVersion):
                    staged.prepared.clear()
            if keep_newest and base is not None:
                self._copy_served(base)
            self.served.fall_asleep()
            if keep_newest:
                self._bases.move_newest(lambda size: self.memory.allocate(size, adapter=True))
            self._bases.drop_on_device()
            self._segments.drop_on_device()
            return True

    # -- the engine's side --------------------------------------------------

    def handle(self, transfer_id: str) -> StagedHandle | None:
        """Return the handle by which another worker adopts a staged version, or a retained base;
        None where it has it already.

        Raises:
            NotReadyError: Nothing is staged for the transfer.
        """
        if self.is_at_every_rank(transfer_id):
            return None
        found = self._find(transfer_id)
        assert isinstance(found, StagedVersion), "of a delta each rank has its own part"
        return found.handle()

    def is_at_every_rank(self, transfer_id: str) -> bool:
        """Return whether each rank has its own part of a version, in its memory or its weights."""
        with self._lock:
            base = self.served.base
            known = [*self.served.reachable, *([] if base is None else [base])]
            is_delta = isinstance(self._staged.get(transfer_id), StagedDelta)
            return is_delta or transfer_id in [each.transfer_id for each in known]

    def adopt(self, handle: StagedHandle) -> None:
        """Map a version that another worker of this machine has staged."""
        with self._lock:
            # A retained copy that was discarded here before is mapped anew.
            if handle.transfer_id in self._discarded:
                self._discarded.remove(handle.transfer_id)
        self.put_staged(handle.attach())

    def staged(self, transfer_id: str, content_digest: bytes) -> StagedVersion | StagedDelta:
        """Return the staged version of a transfer, which stays staged, or a retained base.

        Raises:
            NotReadyError: Nothing is staged for the transfer.
            DigestMismatchError: Other bytes are staged than those to be committed.
        """
        staged = self._find(transfer_id)
        staged.check(content_digest)
        return staged

    def keep_adapter(self, transfer_id: str, config_json: str) -> AdapterEntry:
        """Move a staged adapter into the store that the engine loads from."""
        with self._lock:
            staged = self._staged.pop(transfer_id, None)
            if not isinstance(staged, StagedVersion):
                raise NotReadyError(f"nothing is staged for transfer {transfer_id}; push again")
            entry = self._adapters[staged.version] = AdapterEntry(config_json, staged)
            return entry

    def adapter(self, version: PolicyVersion) -> AdapterEntry | None:
        """Return an adapter for the engine's loader; None if it was dropped."""
        with self._lock:
            return self._adapters.get(version)

    def drop_adapter(self, version: PolicyVersion) -> None:
        """Forget an adapter version; its memory may be reused."""
        with self._lock:
            entry = self._adapters.pop(version, None)
            self._segments.put(entry.staged.segment if entry else None)

    def discard(self, transfer_id: str) -> None:
        """Forget the bytes of a transfer, staged, partial or still to come; end its load in
        place."""
        with self._lock:
            if transfer_id not in self._discarded:
                self._discarded.append(transfer_id)
            if self._partial.pop(transfer_id) is not None:
                self._reservations.end(transfer_id)  # memory that is not reused
            self._free(self._staged.pop(transfer_id, None))
            self.handoff.discard(transfer_id)

    def usage(self) -> MemoryUsage:
        """Return the memory that is held now."""
        with self._lock:
            transfer_ids = {*self._staged, *self._partial.transfer_ids, *self.handoff.transfer_ids}
            return MemoryUsage(
                adapter_bytes=sum(e.staged.segment.num_bytes for e in self._adapters.values()),
                staging_bytes=self._num_waiting_bytes()
                + self._bases.num_bytes
                + self.served.undo_bytes,
                pinned_base_bytes=self._bases.num_pinned_bytes,
                free_bytes=self._segments.num_bytes,
                staged_transfer_ids=tuple(sorted(transfer_ids)),
                retained_bases=self.retained_bases(),
                undo_bases=self.undo_bases(),
                takes_deltas=self.takes_deltas(),
            )

    def _find(self, transfer_id: str) -> StagedVersion | StagedDelta:
        with self._lock:
            found = self._staged.get(transfer_id) or self._bases.of_transfer(transfer_id)
        if found is None:
            raise NotReadyError(f"nothing is staged for transfer {transfer_id}; push again")
        return found
