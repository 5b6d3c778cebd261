"""The members of a stream group: each passes the pieces that it has on to those that ask for them.

A receiver opens its connections to the one before it in the chain, and says what it has already.
Where a connection breaks, it asks the next member of ``sources_of`` for what it lacks, the sender
at last. So nobody waits for a link that is cut, and nothing comes twice but what was on its way.
One file: both ends of a hop, and what a bucket's memory waits for, are one protocol.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch._C._distributed_c10d import Store

from weft_rl.contract.group import LinkUsage
from weft_rl.interrupts import ThreadWaker
from weft_rl.ipc.connection import PeerError
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.stream import listening
from weft_rl.transport.stream.fed_receivers import FedReceiver
from weft_rl.transport.stream.lane import (
    Lane,
    LaneTls,
    check_receiver,
    fingerprint_of,
    prove_receiver,
)
from weft_rl.transport.stream.messages import (
    AGAIN,
    CHAIN,
    KEY_BYTES,
    PLACE,
    SECRET_BYTES,
    Chain,
    KeptBucket,
    LaneHello,
    PieceHead,
    Place,
    Serves,
    Station,
    StreamError,
    Wants,
)
from weft_rl.transport.stream.order import chain_of, sources_of
from weft_rl.transport.stream.piece_coding import decode_piece
from weft_rl.transport.stream.works import StreamWork
from weft_rl.transport.wire.buckets import WHOLE, BucketOptions, write_tail
from weft_rl.transport.wire.lane_options import LaneOptions

_log = logging.getLogger(__name__)


_PREFIX = "stream"
_SENDER = 0
#: Connections that bring pieces to a receiver, of all senders together; each has one at least.
_NUM_LANES = 4
#: A connection is opened, and both ends have proven who they are, within so long.
_CONNECT_SECONDS = 5.0
#: Connections that prove who they are at one time, in a small group.
_MAX_PENDING = 64
#: How long a bucket is held for a receiver that may ask for it: the next one in the chain as the
#: group forms, or one whose connection has broken.
_HOLD_SECONDS = 3.0
# Between two looks at what is told by others, whose word may be lost in an interrupt.
_LOOK_SECONDS = 5.0
_HELD_LOOK_SECONDS = 0.05
_IDLE_SECONDS = 60.0
# Between two reports of what was sent: the second and third of a group, and the later ones.
_MEASURE_SECONDS = (0.25, 0.5, 1.0)
# A connection that has lived so long was no failure.
_STEADY_SECONDS = 10.0
# Reports that are said again over another connection.
_MAX_KEPT = 64


class StreamMember:
    """Stream ``backends.Backend`` of one member, which feeds those that ask it.

    Args:
        store: The lane's rendezvous store.
        rank: Rank in the lane; the sender's is 0.
        size: Number of members.
        options: Options of the lane.

    Raises:
        StreamError: Nothing can listen at the host.
    """

    #: Threads of its own connect.
    is_formed = True

    def __init__(self, store: Store, rank: int, size: int, options: LaneOptions) -> None:
        self._options, self._senders = options, options.senders
        self._store, self._rank, self._ranks = store, rank, range(1, size)
        self._host, self._key = options.host, os.urandom(KEY_BYTES)
        self._tls = LaneTls.of(options.credentials or Credentials.from_environment())
        self._chain: Chain | None = None
        self._lock = threading.Lock()  # guards what follows
        self._works: dict[int, StreamWork] = {}
        self._num_works = 0
        #: First bucket that was not let go of.
        self._first_here = 0
        self._hops: dict[bytes, FedReceiver] = {}
        self._num_pending = 0
        #: Reports of what was sent since something was to be sent, and the time of the last.
        self._num_measured, self._measured_at = 0, time.monotonic()
        self._is_told = True  # what was sent, and nothing is to be sent
        #: ``time.monotonic()`` until which buckets are held for who may ask.
        self._held_until = 0.0
        self.error = ""
        self._lanes: set[Lane] = set()
        self._threads: set[threading.Thread] = set()
        #: Of threads that feed, which pieces are for, and of all others.
        self._feeding: set[ThreadWaker] = set()
        self._waiting: set[ThreadWaker] = set()
        self._begin()
        self._port = listening.open_lane(self._host, self._key, self._admit)
        try:
            self._start(self._run_member, "weft-stream")
        except BaseException:
            listening.shut_lane(self._host, self._key)
            raise

    # -- see ``backends.Backend`` --------------------------------------------------

    def abort(self) -> None:
        self._end("this rank left the group")

    def settle(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return bool(self.error) and not any(thread.is_alive() for thread in threads)

    def _end(self, error: str) -> None:
        """End all with an error, soon; never blocks, never raises."""
        with self._lock:
            self.error = self.error or error
            lanes, works = [*self._lanes], [*self._works.values()]
            for work in works:
                work.fail(self.error)
        for lane in lanes:
            lane.shut()
        self._ring()

    def _run_member(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 (the edge of a thread)
            # Also what the store raises when the group is over.
            if not isinstance(error, PeerError | RuntimeError):
                _log.exception("a stream group ended")
            self._end(str(error) if isinstance(error, PeerError) else f"the group: {error!r}")
        finally:
            listening.shut_lane(self._host, self._key)
            while other := self._other_thread():
                other.join()
            with self._lock:
                works = [*self._works.values()]
                self._works.clear()
            for work in works:
                work.let_go()

    def _begin(self) -> None:
        """Make what this end has of its own, before a thread uses it."""

    def _run(self) -> None:
        """Do what is this member's part until ``error`` is set, or raise it."""
        raise NotImplementedError

    def _other_thread(self) -> threading.Thread | None:
        own = threading.current_thread()
        with self._lock:
            return next((thread for thread in self._threads if thread is not own), None)

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        """Run something on a thread of its own.

        Raises:
            RuntimeError: There can be no further one.
        """

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads.add(thread)
        return thread

    def _check(self) -> None:
        if self.error:
            raise StreamError(self.error)

    def _announce(self) -> Place:
        site, fingerprint = self._options.site, self._tls.fingerprint
        place = Place(self._key, self._host, self._port, fingerprint, site)
        self._store.set(f"{_PREFIX}/{self._rank}", PLACE.pack(place).hex())
        return place

    def _station(self, rank: int) -> Station:
        assert self._chain is not None
        for station in self._chain.stations:
            if station.rank == rank:
                return station
        raise StreamError(f"there is no rank {rank} in the group")

    # -- waking ------------------------------------------------------------------------

    def _ring(self) -> None:
        self._ring_feeding()
        for waker in tuple(self._waiting):
            waker.ring()

    def _ring_feeding(self) -> None:
        for waker in tuple(self._feeding):
            waker.ring()

    @contextlib.contextmanager
    def _waker(self, wakers: set[ThreadWaker]) -> Iterator[ThreadWaker]:
        waker = ThreadWaker()
        with self._lock:
            wakers.add(waker)
        try:
            yield waker
        finally:
            with self._lock:
                wakers.discard(waker)

    @contextlib.contextmanager
    def _using(self, lane: Lane) -> Iterator[Lane]:
        """Shut a lane with the group; close it at the end."""
        with self._lock:
            self._lanes.add(lane)
            is_over = bool(self.error)
        if is_over:
            lane.shut()
        try:
            yield lane
        finally:
            with self._lock:
                self._lanes.discard(lane)
            lane.shut()
            lane.close()

    # -- feeding -----------------------------------------------------------------------

    def _admit(self, lane: Lane, hello: LaneHello) -> None:
        """Serve a connection on a thread of its own; on the listener's thread."""
        with self._lock:
            most = max(_MAX_PENDING, len(self._ranks))
            is_refused = bool(self.error) or self._num_pending >= most
            self._num_pending += not is_refused
        if is_refused:
            lane.close()
            return
        try:
            self._start(lambda: self._serve(lane, hello), "weft-stream-feed")
        except RuntimeError as error:
            _log.warning("a receiver cannot be served: %s", error)
            self._no_longer_pending()
            lane.close()

    def _no_longer_pending(self) -> None:
        with self._lock:
            self._num_pending -= 1

    def _serve(self, lane: Lane, hello: LaneHello) -> None:
        try:
            with self._using(lane):
                try:
                    self._meet(lane, hello)
                finally:
                    self._no_longer_pending()
                if hello.nth == AGAIN:
                    self._send_again(lane)
                    return
                try:  # who has not proven who it is ends no hop
                    if hello.nth:
                        self._feed(lane, hello)
                    else:
                        self._attend(lane, hello)
                finally:
                    self._drop_hop(hello.hop)
        except PeerError as error:
            _log.debug("rank %d is not fed any more: %s", hello.rank, error)
        except Exception:  # noqa: BLE001 (the edge of a thread)
            _log.exception("rank %d cannot be fed", hello.rank)

    def _meet(self, lane: Lane, hello: LaneHello) -> None:
        """Let the member that has connected prove who it is."""
        lane.set_deadline(time.monotonic() + _CONNECT_SECONDS)
        with self._waker(self._waiting) as waker:
            # It may know the chain a moment before this member does.
            waker.wait_for(lambda: bool(self._chain or self.error), _CONNECT_SECONDS)
        self._check()
        if self._chain is None or hello.rank not in self._ranks:
            raise StreamError(
                f"{lane.peer} says that it is rank {hello.rank}, too early or wrongly"
            )
        place = self._station(hello.rank).place
        lane.peer = f"rank {hello.rank} at {place.host}:{place.port}"
        if place.fingerprint:
            assert self._tls.client is not None
            shown = lane.encrypt(self._tls.client, as_server=False)
            if fingerprint_of(shown) != place.fingerprint:
                raise StreamError(f"{lane.peer} shows another certificate than it has announced")
        check_receiver(lane, self._chain.secret, hello)

    def _attend(self, lane: Lane, hello: LaneHello) -> None:
        """Register a receiver that wants to be fed, and hear what it reports."""
        wants = lane.hear(Wants)
        hop = FedReceiver(hello.rank, wants)
        with self._lock:
            first = self._first_here
            if wants.first >= first:
                for key, other in [*self._hops.items()]:
                    if other.rank == hello.rank:  # it has given that one up
                        del self._hops[key]
                        other.end()
                hop.lanes.append(lane)
                self._hops[hello.hop] = hop
                self._held_until = 0.0
        lane.say(Serves(first))
        lane.set_deadline(None)
        self._ring()
        while wants.first >= first:
            kept = lane.hear(KeptBucket)
            self._note_kept(kept.sequence, kept.ranks)

    def _drop_hop(self, key: bytes) -> None:
        with self._lock:
            hop = self._hops.pop(key, None)
            if hop is not None:
                hop.end()
                if not self.error:
                    self._held_until = time.monotonic() + _HOLD_SECONDS
        if hop is not None:
            self._ring()

    def _feed(self, lane: Lane, hello: LaneHello) -> None:
        """Send pieces over one of a hop's connections until the hop is over."""
        with self._lock:
            hop = self._hops.get(hello.hop)
            if hop is not None:
                hop.lanes.append(lane)
        if hop is None or hop.rank != hello.rank:
            raise StreamError(f"{lane.peer} begins in the middle")
        lane.set_deadline(None)
        with self._waker(self._feeding) as waker:
            while not (self.error or hop.is_over):
                with self._lock:
                    taken = hop.next_piece(self._works, self._first_here)
                    self._let_go()
                if taken is None:
                    waker.wait_for(lambda: self._has_next(hop), _LOOK_SECONDS)
                    continue
                work, index = taken
                self._send_piece(lane, work, index, is_slow=hop.is_slow)
                with self._lock:
                    hop.note_sent(work.sequence)

    def _send_again(self, lane: Lane) -> None:
        """Send all of one bucket to a receiver that has found it garbled."""
        wanted = lane.hear(Wants).first
        with self._lock:
            work = self._works.get(wanted)
        if work is None or not work.is_whole:
            raise StreamError(f"{lane.peer} asks again for bucket {wanted}, which is not here")
        _log.warning("%s has found bucket %d garbled: it is sent there again", lane.peer, wanted)
        lane.say(Serves(wanted))
        lane.set_deadline(None)
        for index in range(work.num_pieces):
            self._send_piece(lane, work, index, is_slow=False)

    @staticmethod
    def _send_piece(lane: Lane, work: StreamWork, index: int, *, is_slow: bool) -> None:
        """Send a piece coded where that came so, or the link is slow and the piece gets shorter."""
        coded = work.coded_piece(index) if is_slow else work.coded.get(index)
        num_coded = 0 if coded is None else len(coded)
        head = PieceHead(work.sequence, work.num_bytes, index, num_coded)
        lane.send_piece(head, work.piece(index) if coded is None else coded)

    def _has_next(self, hop: FedReceiver) -> bool:
        return bool(self.error) or hop.has_next(self._works)

    def _is_fed(self, work: StreamWork) -> bool:
        """Return whether all who ask were sent all of a bucket; with the lock held."""
        return bool(self._hops) and all(hop.is_fed(work) for hop in self._hops.values())

    def _let_go(self) -> None:
        """Let go of buckets, in their order, that nobody needs here; with the lock held."""
        raise NotImplementedError

    def _watch_sent(self, waker: ThreadWaker, is_due: Callable[[], bool]) -> None:
        """Block until ``is_due``, or until what was sent has been reported; a minute where nothing
        moves."""
        if self._is_told:
            began = time.monotonic()
            waker.wait_for(lambda: not self._is_told or is_due(), _IDLE_SECONDS)
            if time.monotonic() - began > _MEASURE_SECONDS[-1]:
                self._num_measured, self._measured_at = 0, time.monotonic()
            return
        nth = min(self._num_measured, len(_MEASURE_SECONDS) - 1)
        left = self._measured_at + _MEASURE_SECONDS[nth] - time.monotonic()
        if not waker.wait_for(is_due, max(0.0, left)):
            self._tell_sent()

    def _tell_sent(self) -> None:
        self._measured_at = time.monotonic()
        self._num_measured += 1
        with self._lock:
            measured = [(hop, *hop.take_sent(self._works)) for hop in self._hops.values()]
        site = self._options.site
        sent = {
            hop.rank: LinkUsage(
                num_bytes,
                seconds,
                waiting,
                between_sites=self._station(hop.rank).place.site != site,
                encrypted=hop.lanes[0].is_encrypted,
            )
            for hop, num_bytes, seconds, waiting in measured
            if num_bytes
        }
        self._is_told = not (sent or self._works)
        if sent:
            self._options.on_sent(sent)

    def _drop_first(self) -> StreamWork:
        work = self._works.pop(self._first_here)
        self._first_here += 1
        work.let_go()
        return work

    def _note_kept(self, sequence: int, ranks: tuple[int, ...]) -> None:
        """Take in that receivers have verified a bucket."""
        raise NotImplementedError


def _bytes_of(value: bytes) -> bytes:
    """Return the bytes of a value of the store, whose values are texts to torch."""
    return bytes.fromhex(value.decode())


class StreamSender(StreamMember):
    """Stream ``backends.Backend`` of the sender."""

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> StreamWork:
        write_tail(buffer, options)
        with self._lock:
            self._check()
            work = StreamWork(buffer, self._num_works, options, len(self._ranks), self._ranks)
            # Its memory is written again, so all have verified what was in it: the coordinator
            # has said so.
            while any(work.overlaps(old) for old in self._works.values()):
                self._drop_first()
            self._works[work.sequence] = work
            self._num_works += 1
            self._is_told = False
        self._ring()
        return work

    def _run(self) -> None:
        places = {_SENDER: self._announce()}
        found = self._store.multi_get([f"{_PREFIX}/{rank}" for rank in self._ranks])
        for rank, content in zip(self._ranks, found, strict=True):
            places[rank] = PLACE.unpack(_bytes_of(content))
        chain = Chain(os.urandom(SECRET_BYTES), chain_of(places, self._senders.own))
        self._chain = chain
        self._store.set(f"{_PREFIX}/chain", CHAIN.pack(chain).hex())
        self._ring()
        with self._waker(self._waiting) as waker:
            while not self.error:
                self._watch_sent(waker, lambda: bool(self.error))

    def _let_go(self) -> None:
        for work in self._works.values():
            if self._is_fed(work):
                work.sent()
        while (first := self._works.get(self._first_here)) is not None and first.is_kept:
            self._drop_first()

    def _note_kept(self, sequence: int, ranks: tuple[int, ...]) -> None:
        with self._lock:
            work = self._works.get(sequence)
            if work is None or work.is_kept:
                return
            work.unkept.difference_update(ranks)
            if work.unkept:
                return
            work.is_kept = True
            self._let_go()
        if work.on_kept is not None:
            work.on_kept()


class StreamReceiver(StreamMember):
    """Stream ``backends.Backend`` of a receiver."""

    def _begin(self) -> None:
        self._kept: dict[int, set[int]] = {}
        self._to_tell: deque[KeptBucket] = deque()
        self._is_last = False
        #: Pieces that have come.
        self._num_pieces = 0

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> StreamWork:
        with self._lock:
            self._check()
            work = StreamWork(buffer, self._num_works, options, len(self._ranks))
            work.tell_kept, work.fetch = self._tell_kept, self._fetch
            self._works[work.sequence] = work
            self._num_works += 1
            self._is_told = False
        self._ring()
        return work

    def _fetch(self, work: StreamWork, buffer: torch.Tensor, deadline: float) -> bool:
        """Receive a bucket again; see ``backends.Work``."""
        chain = self._chain
        assert chain is not None  # something has come
        source = chain.stations[0]
        memory = StreamWork(buffer, work.sequence, WHOLE, len(self._ranks))
        _log.warning(
            "bucket %d came garbled from %s: it is received again from the sender",
            work.sequence,
            " and ".join(sorted(work.passed_on_by)),
        )
        try:
            with self._connected(source, os.urandom(KEY_BYTES), AGAIN) as lane:
                lane.say(Wants(work.sequence, ()))
                lane.hear(Serves)
                lane.set_deadline(deadline)
                while not memory.is_whole:
                    head = lane.receive_head()
                    if (head.sequence, head.num_bytes) != (memory.sequence, memory.num_bytes):
                        raise StreamError(f"{lane.peer} sends another bucket than was asked for")
                    self._receive_piece(lane, memory, head)
                    memory.put(head.nth, lane.peer)
        except PeerError as error:
            _log.warning("bucket %d cannot be received again: %s", work.sequence, error)
            return False
        return True

    def _tell_kept(self, sequence: int) -> None:
        self._note_kept(sequence, (self._rank,))

    def _note_kept(self, sequence: int, ranks: tuple[int, ...]) -> None:
        with self._lock:
            self._kept.setdefault(sequence, set()).update(ranks)
            while len(self._kept) > _MAX_KEPT:
                del self._kept[min(self._kept)]
            self._to_tell.append(KeptBucket(sequence, ranks))
        self._ring()

    def _let_go(self) -> None:
        is_held = not self._is_last and time.monotonic() < self._held_until
        while (first := self._works.get(self._first_here)) is not None and first.is_whole:
            if is_held or not all(hop.is_fed(first) for hop in self._hops.values()):
                return
            self._drop_first()

    def _run(self) -> None:
        self._announce()
        chain = CHAIN.unpack(_bytes_of(self._store.get(f"{_PREFIX}/chain")))
        self._is_last = chain.stations[-1].rank == self._rank
        self._held_until = time.monotonic() + _HOLD_SECONDS
        self._chain = chain
        self._ring()
        sources, failures = sources_of(chain.stations, self._rank), list[str]()
        for source in itertools.cycle(sources):
            began, num_before = time.monotonic(), self._num_pieces
            try:
                self._follow(source)
            except PeerError as error:
                self._check()
                if self._num_pieces > num_before or time.monotonic() - began > _STEADY_SECONDS:
                    failures.clear()
                failures.append(str(error))
                _log.info("rank %d asks another member: %s", self._rank, error)
            if len(failures) > len(sources):  # one of them twice: it may have been busy
                what = "; ".join(dict.fromkeys(failures))
                raise StreamError(f"no member sends this one what it lacks: {what}")

    def _follow(self, source: Station) -> None:
        """Receive from a member until that ends, which raises."""
        hop, over = os.urandom(KEY_BYTES), list[str]()
        with contextlib.ExitStack() as stack:
            waker = stack.enter_context(self._waker(self._waiting))
            reports = stack.enter_context(self._connected(source, hop, 0))
            wants = self._wants()
            reports.say(wants)
            first = reports.hear(Serves).first
            if first > wants.first:
                raise StreamError(f"{reports.peer} has bucket {wants.first} no more")
            reports.set_deadline(None)
            for nth in range(1, max(1, _NUM_LANES // self._senders.num) + 1):
                lane = stack.enter_context(self._connected(source, hop, nth))
                lane.set_deadline(None)
                reader = self._start(partial(self._read, lane, over), "weft-stream-read")
                stack.callback(self._end_reader, lane, reader, over)
            _log.debug("rank %d is fed by %s", self._rank, reports.peer)
            with self._lock:  # what was said over a former hop may not have come to the sender
                self._to_tell = deque(
                    KeptBucket(s, tuple(ranks)) for s, ranks in self._kept.items()
                )
            while not (self.error or over):
                with self._lock:
                    told, self._to_tell = self._to_tell, deque()
                    self._let_go()
                for kept in told:
                    reports.say(kept)
                self._watch_sent(waker, lambda: bool(self.error or over or self._to_tell))
            raise StreamError(self.error or over[0])

    def _end_reader(self, lane: Lane, reader: threading.Thread, over: list[str]) -> None:
        over.append("the hop is over")  # a reader may wait for memory that nobody posts
        lane.shut()
        self._ring()
        reader.join()

    @contextlib.contextmanager
    def _connected(self, source: Station, hop: bytes, nth: int) -> Iterator[Lane]:
        """Open a connection to a member, and prove to each other who is there; it is closed at the
        end."""
        place, chain = source.place, self._chain
        assert chain is not None
        peer = f"rank {source.rank} at {place.host}:{place.port}"
        deadline = time.monotonic() + _CONNECT_SECONDS
        try:
            family, address = listening.address_of(place.host, place.port)
            connecting = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise StreamError(f"{peer} cannot be reached: {error}") from error
        with self._using(Lane(connecting, peer)) as lane:
            lane.set_deadline(deadline)
            lane.connect(address)
            hello = LaneHello(place.key, self._rank, hop, nth, os.urandom(KEY_BYTES))
            lane.say(hello)
            if self._tls.server is not None:
                shown = lane.encrypt(self._tls.server, as_server=True)
                if place.fingerprint and fingerprint_of(shown) != place.fingerprint:
                    raise StreamError(f"{peer} shows another certificate than it has announced")
            prove_receiver(lane, chain.secret, hello)
            yield lane

    def _wants(self) -> Wants:
        """Say what this member lacks; nothing receives meanwhile."""
        with self._lock:
            works = [work for work in self._works.values() if not work.is_whole]
            first = min((work.sequence for work in works), default=self._num_works)
            return Wants(first, tuple(work.held() for work in works if work.order))

    def _read(self, lane: Lane, over: list[str]) -> None:
        """Receive pieces over one connection until it ends."""
        try:
            with self._waker(self._waiting) as waker:
                while not (self.error or over):
                    head = lane.receive_head()
                    work = self._memory_of(head.sequence, waker, over)
                    if work.num_bytes != head.num_bytes:
                        raise StreamError(
                            f"{lane.peer} sends {head.num_bytes:,} bytes where "
                            f"{work.num_bytes:,} are expected"
                        )
                    coded = self._receive_piece(lane, work, head)
                    with self._lock:
                        if coded and self._hops and not work.has(head.nth):
                            work.coded[head.nth] = coded
                        work.put(head.nth, lane.peer)
                        self._num_pieces += 1
                        is_whole = work.is_whole
                        if is_whole:
                            self._let_go()
                    if is_whole:
                        self._ring()
                    else:
                        self._ring_feeding()
        except Exception as error:  # noqa: BLE001 (the edge of a thread)
            if not isinstance(error, PeerError):
                _log.exception("pieces cannot be received")
            over.append(str(error))
            self._ring()

    @staticmethod
    def _receive_piece(lane: Lane, work: StreamWork, head: PieceHead) -> bytes:
        """Receive a piece into its place; return what it was coded as, if it was."""
        piece = work.piece(head.nth)
        if not head.coded_bytes:
            lane.receive_into(piece)
            return b""
        if head.coded_bytes >= len(piece):
            raise StreamError(f"{lane.peer} sends a coded piece of {head.coded_bytes:,} bytes")
        coded = bytearray(head.coded_bytes)
        lane.receive_into(memoryview(coded))
        if not decode_piece(coded, piece):
            raise StreamError(f"{lane.peer} sends a piece that cannot be decoded")
        return bytes(coded)

    def _memory_of(self, sequence: int, waker: ThreadWaker, over: list[str]) -> StreamWork:
        """Return the work of a bucket once its memory may be written: a receive was posted, and
        what was there before was passed on."""
        found: list[StreamWork] = []

        def is_free() -> bool:
            with self._lock:
                self._let_go()
                work = self._works.get(sequence)
                if work is None:
                    return sequence < self._first_here
                before = (old for key, old in self._works.items() if key < sequence)
                if any(work.overlaps(old) for old in before):
                    return False
                found.append(work)
                return True

        while not found:
            if self.error or over or sequence < self._first_here:
                raise StreamError(self.error or f"bucket {sequence} came out of turn")
            is_held = sequence < self._num_works
            waker.wait_for(
                lambda: bool(self.error or over) or is_free(),
                _HELD_LOOK_SECONDS if is_held else _LOOK_SECONDS,
            )
        return found[-1]
