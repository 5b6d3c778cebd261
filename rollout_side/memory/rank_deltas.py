"""Deltas of a replica of several ranks that loads in place: each rank reads, checks and keeps what
is its own, and writes it at the commit.

Each rank but the receiving one holds a connection to that while its weights take deltas. It is
offered the changes once they are here, and answers with the sums of what it holds. The receiving
rank adds up the sums of all: the old elements must be those that were changed, the new ones make
the digest. Only then has the delta been received, and nothing was written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch

from rollout_side.memory.handoff import connect
from rollout_side.memory.messages import (
    Follow,
    KeptDelta,
    Offered,
    RankConnection,
    RankSums,
    Settled,
)
from rollout_side.memory.segment import HostSegment, Segment
from rollout_side.memory.served_delta import ChangedElements, StagedDelta, not_the_base
from rollout_side.memory.versions import ElementShard, ServedBase
from weft_rl.contract.errors import (
    CapacityError,
    NotReadyError,
    WeftError,
)
from weft_rl.contract.manifest import Run
from weft_rl.contract.names import PolicyVersion
from weft_rl.interrupts import PROGRESS_SECONDS
from weft_rl.ipc.connection import PeerError
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire.changes import decode_changes, run_elements, run_sum

_log = logging.getLogger(__name__)

#: Runs of a wire bucket, and its coded changes.
Payload = tuple[Sequence[Run], torch.Tensor]
_CONNECT_SECONDS = 10.0
_T = TypeVar("_T")


# -- what one rank holds --------------------------------------------------------------


def covers(shards: Iterable[ElementShard], num_elements: int) -> bool:
    """Return whether shards, of which some may be equal, have every element of a tensor once."""
    found = sorted(set(shards))
    if not any(shard.row for shard in found):
        return _in_a_row([(r.begin, r.end) for r in found], 0, num_elements)
    stride = found[0].stride
    rows = num_elements // max(1, stride)
    is_alike = all(
        r.stride == stride and r.end == r.begin + (rows - 1) * stride + r.row for r in found
    )
    is_whole = is_alike and rows * stride == num_elements
    return is_whole and _in_a_row([(r.begin, r.begin + r.row) for r in found], 0, stride)


def _in_a_row(spans: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    for first, last in spans:
        if first != begin:
            return False
        begin = last
    return begin == end


@dataclass(frozen=True)
class HeldChanges:
    """Changes of those elements that lie at one rank, read against the weights there."""

    changes: Sequence[ChangedElements]
    sums: Sequence[int]
    """For each run, and each place of its tensor here: the sum of the old elements, and that of the
    new ones, as WSUM64 weighs them."""


def read_held(
    base: ServedBase, payloads: Iterable[Payload], report: Callable[[int], None] = lambda n: None
) -> HeldChanges:
    """Read the changes of what lies at this rank; writes nothing.

    Raises:
        DigestMismatchError: A payload is malformed.
    """
    changes, sums = list[ChangedElements](), list[int]()
    for number, (runs, payload) in enumerate(payloads):
        report(number)
        sizes = [base.manifest.tensors[run.tensor].meta.dtype.itemsize_bytes for run in runs]
        for run, size, own in zip(runs, sizes, decode_changes(payload, runs, sizes), strict=True):
            elements, places = run_elements(run, own.positions), base.places(run.tensor)
            if not places:
                continue
            old = torch.zeros(len(elements), dtype=places[0].bits.dtype, device=elements.device)
            found = [place.read(elements) for place in places]
            is_here = torch.zeros(len(elements), dtype=torch.bool, device=elements.device)
            for here, bits in found:
                old[here], is_here[here] = bits, True
            new = own.new_values(old)
            for here, bits in found:
                sums.append(run_sum(run, own.positions[here], bits, size))
                sums.append(run_sum(run, own.positions[here], new[here], size))
            if is_here.any():
                changes.append(
                    ChangedElements(places, elements[is_here], old[is_here], new[is_here])
                )
    return HeldChanges(changes, sums)


def add_up(
    base: ServedBase,
    payloads: Iterable[Payload],
    ranks: Sequence[tuple[Sequence[Sequence[ElementShard]], Sequence[int]]],
) -> tuple[int, ...]:
    """Return the digests of the tensors that a delta makes, in the manifest's order.

    Args:
        ranks: Shards of each tensor at each rank, and the rank's sums.

    Raises:
        DigestMismatchError: The old elements are not those that were changed, or two ranks hold
            different ones.
    """
    digests, at = list(base.tensor_digests), [0] * len(ranks)
    for runs, payload in payloads:
        listed = payload[: 8 * len(runs)].cpu().view(torch.int64).tolist()
        for run, wanted in zip(runs, listed, strict=True):
            found: dict[ElementShard, tuple[int, int]] = {}
            for number, (shards, sums) in enumerate(ranks):
                for shard in shards[run.tensor]:
                    pair = sums[at[number]], sums[at[number] + 1]
                    at[number] += 2
                    if found.setdefault(shard, pair) != pair:
                        raise not_the_base(base, run)
            if (sum(old for old, _ in found.values()) - wanted) % 2**64:
                raise not_the_base(base, run)
            change = sum(new - old for old, new in found.values())
            digests[run.tensor] = (digests[run.tensor] + change) % 2**64
    return tuple(digests)


# -- the receiving rank ---------------------------------------------------------------


class _Follower:
    def __init__(self, connection: RankConnection, told: Follow) -> None:
        self.connection, self.told = connection, told
        self.shards = shards_of(told)
        self.ended = threading.Event()
        #: Held by the thread that uses the connection.
        self.used = threading.Lock()


class RankFollowers:
    """Other ranks of the replica, whose weights take deltas beside those of the receiving rank;
    thread-safe.

    Args:
        num_ranks: Number of ranks of the replica.
    """

    def __init__(self, num_ranks: Callable[[], int]) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._followers: dict[int, _Follower] = {}
        #: What ``take_deltas`` has found, and of which layout and ranks.
        self._judged: tuple[tuple[object, ...], bool] = (), False
        #: Called when a rank has come or gone.
        self.on_change: Callable[[], None] = lambda: None

    def serve(self, connection: RankConnection, told: Follow) -> None:
        """Keep a rank's connection, in place of its former one; block until it is not used any
        more."""
        follower = _Follower(connection, told)
        with self._lock:
            former = self._followers.get(told.rank)
            self._followers[told.rank] = follower
        if former is not None:
            self._drop(told.rank, former)
        self.on_change()
        while not follower.ended.wait(PROGRESS_SECONDS) and not connection.is_ended:
            pass
        self._drop(told.rank, follower)
        with follower.used:  # before it is closed
            return

    def _drop(self, rank: int, follower: _Follower) -> None:
        with self._lock:
            if self._followers.get(rank) is follower:
                del self._followers[rank]
        follower.ended.set()
        follower.connection.shut()
        self.on_change()

    def close(self) -> None:
        """End all connections."""
        self._drop_all(self._known())

    def take_deltas(self, base: ServedBase) -> bool:
        """Return whether the other ranks hold the rest of a base, and each element is told."""
        known = self._known()
        if len(known) != self._num_ranks() - 1:
            return False
        key = base.manifest.layout_digest, *(id(follower) for _, follower in known)
        with self._lock:
            if self._judged[0] == key:
                return self._judged[1]
        verdict = self._hold_all(base, known)
        with self._lock:
            self._judged = key, verdict
        return verdict

    @staticmethod
    def _hold_all(base: ServedBase, known: Sequence[tuple[int, _Follower]]) -> bool:
        if any(f.told.layout_digest != base.manifest.layout_digest for _, f in known):
            return False
        every = [base.shards, *(follower.shards for _, follower in known)]
        return all(
            covers((shard for rank in every for shard in rank[index]), slot.meta.num_elements)
            for index, slot in enumerate(base.manifest.tensors)
        )

    def _known(self) -> list[tuple[int, _Follower]]:
        with self._lock:
            return sorted(self._followers.items())

    def stage(
        self,
        base: ServedBase,
        transfer_id: str,
        version: PolicyVersion,
        payloads: Sequence[Payload],
        report: Callable[[int], None],
        check: Callable[[], None],
    ) -> StagedDelta:
        """Stage a delta at every rank; return that of this rank. Blocks, and writes nothing.

        Raises:
            DigestMismatchError: See ``add_up``.
            WeftError: Another rank's error.
            NotReadyError: ``DELTA_REFUSED``: a rank has gone.
        """
        known = self._known()
        if len(known) != self._num_ranks() - 1:
            raise NotReadyError("a rank of this replica takes no deltas", reason="DELTA_REFUSED")
        with ExitStack() as stack:
            for _, follower in known:
                stack.enter_context(follower.used)
            stack.push(lambda kind, *_: self._drop_all(known) if kind else None)
            shared = _shared(payloads)
            offer = _offer(base, transfer_id, version, payloads, shared)
            for _, follower in known:
                self._say(follower, offer)
            own = read_held(base, payloads, report)
            ranks: list[tuple[Sequence[Sequence[ElementShard]], Sequence[int]]]
            ranks = [(base.shards, own.sums)]
            for _, follower in known:
                ranks.append((follower.shards, self._hear(follower, RankSums, check).sums))
            digests = add_up(base, payloads, ranks)
            made = content_digest(digests)
            for _, follower in known:
                self._say(follower, Settled(made, digests))
            for _, follower in known:
                self._hear(follower, KeptDelta, check)
        return StagedDelta(
            transfer_id=transfer_id,
            version=version,
            base=base,
            content_digest=made,
            tensor_digests=digests,
            changes=tuple(own.changes),
        )

    def _drop_all(self, known: Sequence[tuple[int, _Follower]]) -> None:
        """Drop ranks; they forget what they have read, and come again."""
        for rank, follower in known:
            self._drop(rank, follower)

    @staticmethod
    def _say(follower: _Follower, message: Offered | Settled) -> None:
        try:
            follower.connection.say(message)
        except PeerError as error:
            raise _gone(follower, error) from error

    @staticmethod
    def _hear(follower: _Follower, kind: type[_T], check: Callable[[], None]) -> _T:
        try:
            while not follower.connection.poll(PROGRESS_SECONDS):
                check()
            return follower.connection.hear(kind)
        except PeerError as error:
            raise _gone(follower, error) from error


def _gone(follower: _Follower, error: PeerError) -> NotReadyError:
    return NotReadyError(
        f"rank {follower.told.rank} of the replica takes no deltas any more: {error}",
        reason="DELTA_REFUSED",
    )


def _shared(payloads: Sequence[Payload]) -> HostSegment:
    """Return the payloads, one behind the other, where the other ranks can read them."""
    segment = HostSegment.allocate(max(1, sum(len(payload) for _, payload in payloads)))
    at = 0
    for _, payload in payloads:
        segment.data[at : at + len(payload)].copy_(payload)
        at += len(payload)
    return segment


def _offer(
    base: ServedBase,
    transfer_id: str,
    version: PolicyVersion,
    payloads: Sequence[Payload],
    shared: HostSegment,
) -> Offered:
    runs = (run for own, _ in payloads for run in own)
    return Offered(
        transfer_id,
        str(version),
        base.content_digest,
        tuple(n for r in runs for n in (r.tensor, r.first, r.count, r.stride, r.repeats)),
        tuple(len(own) for own, _ in payloads),
        tuple(len(payload) for _, payload in payloads),
        shared.ref,
    )


def shards_of(told: Follow) -> list[list[ElementShard]]:
    """Return the shards of each tensor at the rank that told them."""
    numbers = iter(zip(*[iter(told.shards)] * 4, strict=True))
    return [[ElementShard(*next(numbers)) for _ in range(count)] for count in told.counts]


# -- the other ranks ------------------------------------------------------------------


class DeltaFollower:
    """Thread of a rank that does not receive, which takes deltas of the base that it serves.

    Args:
        secret: Secret of the replica's ranks.
        rank: Number of this rank.
        base: Base that is served here; its content changes with the deltas.
        served: Returns what is served now; None while it cannot be read.
        put: Keeps a staged delta; raises CapacityError where there is no room.
    """

    def __init__(
        self,
        secret: str,
        rank: int,
        base: ServedBase,
        served: Callable[[], ServedBase | None],
        put: Callable[[StagedDelta], None],
    ) -> None:
        self._secret, self._rank, self._base = secret, rank, base
        self._served, self._put = served, put
        self._connection: RankConnection | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-follow", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """Thread that follows."""
        return self._thread

    def close(self) -> None:
        """End the thread; does not wait for it."""
        self._ended.set()
        if self._connection is not None:
            self._connection.shut()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._follow()
            except (WeftError, PeerError) as error:
                _log.info("this rank takes deltas no more, until it is connected again: %s", error)
            except Exception:  # noqa: BLE001 (the edge of a thread)
                _log.exception("this rank takes no deltas")
                return
            self._ended.wait(PROGRESS_SECONDS)

    def _follow(self) -> None:
        connection = self._connection = connect(self._secret, _CONNECT_SECONDS)
        try:
            shards = self._base.shards
            connection.say(
                Follow(
                    self._rank,
                    self._base.manifest.layout_digest,
                    tuple(map(len, shards)),
                    tuple(n for own in shards for shard in own for n in shard),
                )
            )
            while not self._ended.is_set():
                if connection.poll(PROGRESS_SECONDS):
                    self._take(connection, connection.hear(Offered))
        except WeftError as error:
            connection.fail(error)
            raise
        finally:
            connection.close()

    def _take(self, connection: RankConnection, offer: Offered) -> None:
        base = self._served()
        if base is None or base.content_digest != offer.base:
            raise NotReadyError(
                f"rank {self._rank} does not serve the base that the delta changes",
                reason="DELTA_REFUSED",
            )
        device = base.device
        try:
            own = read_held(base, [(runs, data.to(device)) for runs, data in _payloads(offer)])
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"{device} has no room to keep what is changed: {error}") from error
        connection.say(RankSums(tuple(own.sums)))
        settled = connection.hear(Settled)
        self._put(
            StagedDelta(
                transfer_id=offer.transfer_id,
                version=PolicyVersion.parse(offer.version),
                base=base,
                content_digest=settled.content_digest,
                tensor_digests=settled.digests,
                changes=tuple(own.changes),
            )
        )
        connection.say(KeptDelta())


def _payloads(offer: Offered) -> list[Payload]:
    segment: Segment = offer.ref.attach()
    numbers = iter(zip(*[iter(offer.runs)] * 5, strict=True))
    found, at = list[Payload](), 0
    for count, size in zip(offer.counts, offer.sizes, strict=True):
        runs = [Run(*next(numbers)) for _ in range(count)]
        found.append((runs, segment.data[at : at + size]))
        at += size
    return found
