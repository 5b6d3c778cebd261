"""Live side groups: access by the ranks' tokens, what ranks report, what they are told.

The hot path (a report for every bucket and receiver) ends here: only what a
decision needs becomes an event.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

from weft_rl.containers import LruMapping
from weft_rl.contract.errors import (
    REASONS,
    CapacityError,
    InvalidRequestError,
    NotAllowedError,
    RequestConflictError,
    StaleEpochError,
    WeftError,
)
from weft_rl.contract.group import LinkUsage
from weft_rl.contract.manifest import DIGEST_BYTES, SendPlan
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.transfer import Group, RankReport, Transfer
from weft_rl.coordinator.decisions.state.values import ContentDigest, Failure, VersionLayout
from weft_rl.coordinator.messages.wire import group_to_proto
from weft_rl.coordinator.runtime.key_value_store import KeyValueStore
from weft_rl.rpc.codec import LINK_USAGE, POLICY_VERSION, duration_to_proto, send_plan_to_proto
from weft_rl.tracing import untraced
from weft_rl.v1 import rendezvous_pb2, types_pb2

_MAX_REMEMBERED: Final = 256
_MAX_ID: Final = 128
_MAX_QUEUED: Final = 256
_MAX_LAYOUTS: Final = 8


class RankStream:
    """Bounded queue of the messages for one rank's stream; releases coalesce."""

    def __init__(self, group_id: str, rank: int) -> None:
        self.group_id = group_id
        self.rank = rank
        self._queue: deque[rendezvous_pb2.AttendResponse] = deque()
        self._released: rendezvous_pb2.AttendResponse | None = None
        self._ended = False
        self._error: WeftError | None = None
        self._wake = asyncio.Event()

    def send(self, message: rendezvous_pb2.AttendResponse) -> None:
        """Queue a message; a rank that reads nothing is cut off."""
        if len(self._queue) >= _MAX_QUEUED:
            self.end(CapacityError("the rank does not read its stream", reason="TOO_SLOW"))
            return
        self._queue.append(message)
        self._wake.set()

    def release(self, transfer_id: str, num_buckets: int) -> None:
        """Tell a sender how far it may reuse memory; only the newest count is kept."""
        released = rendezvous_pb2.Released(transfer_id=transfer_id, num_buckets=num_buckets)
        self._released = rendezvous_pb2.AttendResponse(released=released)
        self._wake.set()

    @property
    def has_ended(self) -> bool:
        """True once the stream is to be closed."""
        return self._ended

    def end(self, error: WeftError | None) -> None:
        """Close the stream after the queued messages: with ``error``, or normally if it is None."""
        if not self._ended:
            self._ended, self._error = True, error
            self._released = None  # of no use to a stream that closes
        self._wake.set()

    async def next(self) -> rendezvous_pb2.AttendResponse | None:
        """Return the next message; None when the stream is to be closed normally.

        Raises:
            WeftError: The stream is to be closed with this error.
        """
        while True:
            if self._queue:
                return self._queue.popleft()
            if self._released is not None:
                message, self._released = self._released, None
                return message
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()


class Watermark:
    """Count of the buckets of one transfer that every receiver has verified."""

    def __init__(
        self,
        transfer_id: str,
        num_receivers: int,
        num_buckets: int,
        first_bucket: int = 0,
        num_senders: int = 1,
        plan: SendPlan | None = None,
    ) -> None:
        self.transfer_id, self._num_senders, self._plan = transfer_id, num_senders, plan
        self.num_verified = self._first = first_bucket
        self._num_receivers = num_receivers
        self._reports = [0] * num_buckets
        self._next: dict[int, int] = {}

    @property
    def num_reported(self) -> Mapping[int, int]:
        """Number of buckets, from bucket 0, that each receiver has reported, of those that did."""
        return self._next

    def report(self, rank: int, bucket: int) -> Collection[int]:
        """Count a report of all buckets up to one; return the senders that have waited for it: of
        the buckets by which the watermark has advanced, or all for the last bucket.

        Raises:
            InvalidRequestError: ``PROTOCOL``: the bucket was reported before, or does not exist.
        """
        expected = self._next.get(rank, self._first)
        if not expected <= bucket < len(self._reports) or rank < self._num_senders:
            raise InvalidRequestError(
                f"rank {rank} reported bucket {bucket}, its next is {expected}", reason="PROTOCOL"
            )
        self._next[rank] = bucket + 1
        for index in range(expected, bucket + 1):
            self._reports[index] += 1
        before = self.num_verified
        while (
            self.num_verified < len(self._reports)
            and self._reports[self.num_verified] == self._num_receivers
        ):
            self.num_verified += 1
        if self._plan is None or before < self.num_verified == len(self._reports):
            return range(self._num_senders if before < self.num_verified else 0)
        return {wire.sender for wire in self._plan.buckets[before : self.num_verified]}

    def is_through(self, rank: int) -> bool:
        """Return whether a receiver has reported every bucket."""
        return self._next.get(rank, self._first) == len(self._reports)


class LiveGroup:
    """One live group: its store, its ranks' streams, and the progress of its receivers."""

    def __init__(self, group: Group) -> None:
        self.group_id, self.member_name = group.group_id, group.member_name
        # By digest, so that how long a look-up takes tells nothing of a token.
        self.ranks = {token_digest(group.token_of(rank)): rank for rank in range(group.size)}
        self.size, self.num_senders = group.size, group.num_senders
        self.store = KeyValueStore()
        self.links: dict[int, RankStream] = {}
        self.layouts: LruMapping[bytes, VersionLayout] = LruMapping(_MAX_LAYOUTS)
        self.plan: SendPlan | None = None
        self.watermark: Watermark | None = None
        #: Buckets that each sender keeps, as it has said when it came.
        self.num_in_flight: dict[int, int] = {}
        self.reports: dict[int, RankReport] = {}
        self.num_told: dict[int, int] = {}
        #: Bytes sent since the last look, by the ranks of both ends.
        self.hops: dict[tuple[int, int], LinkUsage] = {}

    @property
    def senders(self) -> list[RankStream]:
        """Streams of the senders that attend."""
        return [self.links[rank] for rank in range(self.num_senders) if rank in self.links]

    def take_progress(self) -> events.RanksHeard | None:
        """Return what its ranks have said and verified since the last call; None if nothing."""
        reports, self.reports = self.reports, {}
        transfer_id, new = "", dict[int, int]()
        if (mark := self.watermark) is not None:
            transfer_id, told = mark.transfer_id, self.num_told
            new = {rank: n for rank, n in mark.num_reported.items() if told.get(rank) != n}
            told.update(new)
        hops, self.hops = self.hops, {}
        if not reports and not new and not hops:
            return None
        return events.RanksHeard(self.group_id, reports, transfer_id, new, hops)


def token_digest(token: str) -> bytes:
    """Return the digest by which a token is looked up."""
    return hashlib.sha256(token.encode()).digest()


class LiveGroups:
    """All live groups. Used on the event loop; no method blocks.

    Args:
        post: Takes the events that streams give rise to.
        trace_context: Returns the traceparent of a transfer; empty where nobody traces.
    """

    def __init__(
        self,
        post: Callable[[events.Event], None],
        trace_context: Callable[[str], str] = untraced,
    ) -> None:
        self._post = post
        self._trace_context = trace_context
        self._live: dict[str, LiveGroup] = {}
        self._dropped: LruMapping[str, str] = LruMapping(_MAX_REMEMBERED)

    def open_group(self, group: Group) -> None:
        """Open a group to its members."""
        self._live[group.group_id] = LiveGroup(group)

    def drop_group(self, group_id: str, why: str, *, is_failure: bool = True) -> None:
        """Close a group's store, and its streams: with EPOCH_FENCED, or normally."""
        live = self._live.pop(group_id, None)
        if live is None:
            return
        self._dropped.put(group_id, why)
        live.store.close(why)
        error = StaleEpochError(f"the group was dropped: {why}") if is_failure else None
        for link in live.links.values():
            link.end(error)

    def close(self, why: str) -> None:
        """Drop every group."""
        for group_id in list(self._live):
            self.drop_group(group_id, why)

    def _authorised(self, group_id: str, token: str) -> tuple[LiveGroup, int]:
        """Return a group, and the rank whose token this is."""
        live = self._live.get(group_id)
        if live is None:
            why = self._dropped.get(group_id) or "it is not known here (any more)"
            raise StaleEpochError(f"group {group_id[:64]!r} was dropped: {why}")
        rank = live.ranks.get(token_digest(token))
        if rank is None:
            raise NotAllowedError(f"the token does not authorise group {group_id[:64]!r}")
        return live, rank

    def store(self, group_id: str, token: str) -> KeyValueStore:
        """Return a group's store, for any of its ranks.

        Raises:
            NotAllowedError, StaleEpochError: Wrong token; no such group.
        """
        return self._authorised(group_id, token)[0].store

    def layout(self, group_id: str, token: str, digest: bytes) -> VersionLayout | None:
        """Return the layout of a transfer of the group, for any of its ranks, or None."""
        return self._authorised(group_id, token)[0].layouts.get(digest)

    def attend(self, group_id: str, token: str, rank: int, num_in_flight: int = 0) -> RankStream:
        """Open a rank's stream.

        Args:
            num_in_flight: Buckets that a sender keeps.

        Raises:
            NotAllowedError, StaleEpochError: Not the rank's own token; no such group.
            InvalidRequestError: ``PROTOCOL``: the group has no such rank, or a sender does
                not say how many buckets it keeps.
            RequestConflictError: The rank attends already.
        """
        live, authorised = self._authorised(group_id, token)
        if rank >= live.size:
            raise InvalidRequestError(
                f"rank {rank} of a group of {live.size} members", reason="PROTOCOL"
            )
        if rank != authorised:
            raise NotAllowedError(
                f"the token is of rank {authorised} of group {group_id[:64]!r}, not of rank {rank}"
            )
        if rank in live.links:
            raise RequestConflictError(f"rank {rank} attends already")
        if rank < live.num_senders:
            if not num_in_flight:
                raise InvalidRequestError(
                    f"rank {rank} sends, and says how many buckets it keeps in flight: at least 1",
                    reason="PROTOCOL",
                )
            live.num_in_flight[rank] = num_in_flight
        link = live.links[rank] = RankStream(group_id, rank)
        welcome = rendezvous_pb2.Welcome(num_attending=len(live.links))
        link.send(rendezvous_pb2.AttendResponse(welcome=welcome))
        self._post(events.RankAttends(group_id, rank))
        return link

    def leave(self, link: RankStream, why: str) -> None:
        """Remove a stream that has ended; a second call is ignored."""
        live = self._live.get(link.group_id)
        if live is not None and live.links.get(link.rank) is link:
            del live.links[link.rank]
            self._post(events.RankGone(link.group_id, link.rank, why))

    def receive(self, link: RankStream, message: rendezvous_pb2.AttendRequest) -> None:
        """Handle a message from a rank.

        Raises:
            InvalidRequestError: ``PROTOCOL``.
        """
        group_id, rank = link.group_id, link.rank
        match message.WhichOneof("message"):
            case "bucket_verified":
                self._verified(link, message.bucket_verified)
            case "prepared":
                prepared = message.prepared
                self._post(
                    events.RankPrepared(
                        group_id, prepared.transfer_id, rank, prepared.num_buckets_verified
                    )
                )
            case "progress":
                self._progress(link, message.progress)
            case "sent":
                self._sent(link, message.sent)
            case "load_due":
                self._post(events.RankLoadDue(group_id, message.load_due.transfer_id, rank))
            case "staged":
                self._staged(link, message.staged)
            case "failed":
                failed = message.failed
                # A reason that is none of ours would be answered to the trainer as a bug here.
                reason = failed.reason if failed.reason in REASONS else "TRANSFER_ABORTED"
                self._post(
                    events.RankFailed(group_id, failed.transfer_id, rank, reason, failed.message)
                )
            case other:
                raise InvalidRequestError(
                    f"{other or 'an empty message'} is not expected on an open stream",
                    reason="PROTOCOL",
                )

    def _verified(self, link: RankStream, report: rendezvous_pb2.BucketVerified) -> None:
        live = self._live.get(link.group_id)
        mark = live.watermark if live else None
        if live is None or mark is None or mark.transfer_id != report.transfer_id:
            return  # of a transfer that has ended meanwhile
        for sender in mark.report(link.rank, report.bucket):
            if sender in live.links:
                live.links[sender].release(mark.transfer_id, mark.num_verified)

    def _progress(self, link: RankStream, said: rendezvous_pb2.Progress) -> None:
        live = self._live.get(link.group_id)
        if live is not None:
            transfer_id = said.transfer_id[:_MAX_ID]
            live.reports[link.rank] = RankReport(
                transfer_id, said.activity, said.bucket, said.done, said.total
            )

    def _sent(self, link: RankStream, said: rendezvous_pb2.SentReport) -> None:
        live = self._live.get(link.group_id)
        if live is None:
            return
        for each in said.hops:
            hop, between = LINK_USAGE.decode(each.usage), (link.rank, each.rank)
            if each.rank < live.size:
                live.hops[between] = live.hops[between] + hop if between in live.hops else hop

    def take_progress(self) -> list[events.RanksHeard]:
        """Return what ranks have said of their work since the last call, one event a group.

        A group has one event, however many buckets its ranks have verified.
        """
        told = [live.take_progress() for live in self._live.values()]
        return [heard for heard in told if heard is not None]

    def _staged(self, link: RankStream, staged: rendezvous_pb2.Staged) -> None:
        live = self._live.get(link.group_id)
        mark = live.watermark if live else None
        if live is None or mark is None or mark.transfer_id != staged.transfer_id:
            return
        if link.rank >= live.num_senders and not mark.is_through(link.rank):
            raise InvalidRequestError(
                f"rank {link.rank} is staged before it reported every bucket", reason="PROTOCOL"
            )
        given = staged.content_digest
        if len(given.value) != DIGEST_BYTES:
            raise InvalidRequestError(
                f"rank {link.rank} has a digest of {len(given.value)} bytes; it has {DIGEST_BYTES}",
                reason="PROTOCOL",
            )
        digest = ContentDigest(int(given.algorithm), given.value, given.size_bytes)
        self._post(events.RankStaged(link.group_id, staged.transfer_id, link.rank, digest))

    # -- what the driver carries out -------------------------------------------

    def send_prepare(self, group_id: str, transfer: Transfer, time_left: float) -> None:
        """Notify every receiver of a transfer, and make its manifest available."""
        live = self._live.get(group_id)
        if live is None:
            return
        live.layouts.put(transfer.layout.digest, transfer.layout)
        live.plan = transfer.send_plan
        prepare = rendezvous_pb2.Prepare(
            transfer_id=transfer.transfer_id,
            version=POLICY_VERSION.encode(transfer.policy_version),
            layout_digest=transfer.layout.digest,
            nonce=transfer.ids.nonce,
            kind=types_pb2.PolicyKind.ValueType(int(transfer.kind)),
            timeout=duration_to_proto(time_left),
            num_buckets_in_flight=min(live.num_in_flight.values()),
            trace_context=self._trace_context(transfer.transfer_id),
            carries_runs=transfer.purpose.carries_runs,
            send_plan=send_plan_to_proto(transfer.send_plan) if transfer.send_plan else None,
        )
        for takes_whole in (False, True):
            prepare.takes_whole = takes_whole
            message = rendezvous_pb2.AttendResponse(prepare=prepare)  # a copy
            for rank, link in live.links.items():
                is_such = (live.member_name(rank) in transfer.whole_for) is takes_whole
                if rank >= live.num_senders and is_such:
                    link.send(message)

    def send_start(
        self,
        group_id: str,
        transfer_id: str,
        num_receivers: int,
        num_buckets: int,
        first_bucket: int,
    ) -> None:
        """Notify every rank that bytes may flow, and count from ``first_bucket``."""
        live = self._live.get(group_id)
        if live is not None:
            live.watermark = Watermark(
                transfer_id, num_receivers, num_buckets, first_bucket, live.num_senders, live.plan
            )
            live.num_told = {}
            start = rendezvous_pb2.Start(transfer_id=transfer_id, first_bucket=first_bucket)
            self._send(live, rendezvous_pb2.AttendResponse(start=start))
            for sender in live.senders if first_bucket else ():
                sender.release(transfer_id, first_bucket)

    def send_reform(self, group_id: str, transfer_id: str, renewed: Group, message: str) -> None:
        """Tell each sender to resume in another group, at the same rank."""
        live = self._live.get(group_id)
        for link in live.senders if live is not None else ():
            reform = rendezvous_pb2.Reform(
                transfer_id=transfer_id,
                group=group_to_proto(renewed, [link.rank]),
                message=message[:2000],
            )
            link.send(rendezvous_pb2.AttendResponse(reform=reform))

    def send_abort(self, group_id: str, transfer_id: str, failure: Failure) -> None:
        """Tell every rank to give the transfer up."""
        live = self._live.get(group_id)
        if live is not None:
            abort = rendezvous_pb2.Abort(
                transfer_id=transfer_id, reason=failure.reason, message=failure.message[:2000]
            )
            self._send(live, rendezvous_pb2.AttendResponse(abort=abort))

    def _send(self, live: LiveGroup, message: rendezvous_pb2.AttendResponse) -> None:
        for link in live.links.values():
            link.send(message)

    def num_verified(self, group_id: str, transfer_id: str) -> int:
        """Return how many buckets of a transfer under way every receiver has verified."""
        live = self._live.get(group_id)
        mark = live.watermark if live else None
        return mark.num_verified if mark and mark.transfer_id == transfer_id else 0
