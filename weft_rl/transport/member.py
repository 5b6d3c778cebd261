"""A rank's place in a side group: channel, store, process group and stream as one thing.

On the stream reports go up and directions come down. The thread that works reports on it,
never the stream's own: so one that hangs is silent, and is found out. A long step is
therefore cut so that the thread can report in between.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import grpc
import torch

from weft_rl.containers import LruMapping
from weft_rl.contract.errors import (
    PeerUnavailableError,
    StaleEpochError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.group import MAX_HOPS, GroupTicket, LinkUsage, Senders
from weft_rl.contract.manifest import Manifest
from weft_rl.interrupts import PROGRESS_SECONDS, Flag, report_while
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import LINK_USAGE
from weft_rl.rpc.manifest_codec import manifest_from_chunks
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.transport.group import SENDER_RANK, SideGroup, window
from weft_rl.transport.rendezvous_store import RendezvousStore
from weft_rl.transport.wire.lane_options import LaneOptions
from weft_rl.v1 import rendezvous_pb2 as pb
from weft_rl.v1.rendezvous_pb2_grpc import RendezvousServiceStub

_log = logging.getLogger(__name__)

# Reports are a few dozen bytes, at most three a bucket; one that cannot be queued
# means that the stream is dead.
_MAX_QUEUED = 10_000
_WELCOME_SECONDS = 10.0
# A coordinator that answers does so in a round trip.
_FAREWELL_SECONDS = 0.5


class GroupEndedError(StaleEpochError):
    """Normal end of a side group: nothing was under way in it."""

    def __init__(self) -> None:
        super().__init__(
            "the coordinator ended the side group: a member left it, or it is replaced"
        )


class AttendStream:
    """One rank's Attend stream, open as long as its group is kept.

    ``on_message`` is called on the stream's own thread for every direction but the
    welcome, and must not block; ``on_closed`` once, on the same thread, when the
    stream ends for any reason but ``close``. ``num_in_flight`` is what a sender announces:
    how many buckets it keeps.
    """

    def __init__(
        self,
        stub: RendezvousServiceStub,
        credential: pb.GroupCredential,
        rank: int,
        *,
        on_message: Callable[[pb.AttendResponse], None],
        on_closed: Callable[[WeftError], None],
        num_in_flight: int = 0,
    ) -> None:
        self._queue: queue.SimpleQueue[pb.AttendRequest | None] = queue.SimpleQueue()
        self._on_message, self._on_closed = on_message, on_closed
        self._closing = False
        self._welcome = Flag()
        self._error: WeftError | None = None
        #: ``time.monotonic()`` when the rank said something last.
        self.sent_at = time.monotonic()
        hello = pb.Hello(
            credential=credential,
            rank=rank,
            protocol_revision=PROTOCOL_REVISION,
            num_buckets_in_flight=num_in_flight,
        )
        self._queue.put(pb.AttendRequest(hello=hello))
        self._call = stub.Attend(self._requests())
        self._thread = threading.Thread(target=self._read, name=f"weft-attend-{rank}", daemon=True)
        self._thread.start()

    def wait_welcome(self, timeout_seconds: float = _WELCOME_SECONDS) -> None:
        """Block until the coordinator attends this rank.

        Raises:
            TransferTimeoutError: It did not in time.
            WeftError: It refused.
        """
        if not self._welcome.wait(timeout_seconds):
            raise TransferTimeoutError(
                f"the coordinator did not answer on the group's stream in {timeout_seconds:.0f} s"
            )
        if self._error is not None:
            raise self._error

    def send(self, request: pb.AttendRequest) -> None:
        """Queue a report of the thread that works for the coordinator; returns at once. Reports
        after the stream's end are dropped: the coordinator has taken the rank for dead by then."""
        self.sent_at = time.monotonic()
        self.send_aside(request)

    def send_aside(self, request: pb.AttendRequest) -> None:
        """Queue a report of another thread, which says nothing of the one that works."""
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(request)
        else:
            self._call.cancel()

    def close(self) -> None:
        """End the stream and its thread; blocks at most 5 s.

        The coordinator is told so, and answers by its end: a call that is cancelled at once looks
        like one that broke.
        """
        self._closing = True
        self._queue.put(None)
        is_own = threading.current_thread() is self._thread
        if not is_own:
            self._thread.join(_FAREWELL_SECONDS)
        self._call.cancel()
        if not is_own:
            self._thread.join(5.0 - _FAREWELL_SECONDS)

    def _requests(self) -> Iterator[pb.AttendRequest]:
        while (request := self._queue.get()) is not None:
            yield request

    def _read(self) -> None:
        error: WeftError = GroupEndedError()
        try:
            for response in self._call:
                if response.HasField("welcome"):
                    self._welcome.set()
                else:
                    self._on_message(response)
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        except Exception as unexpected:  # noqa: BLE001 (the edge of a thread)
            _log.exception("a message from the coordinator could not be handled")
            error = WeftError(f"internal error on the group's stream: {unexpected!r}")
            self._call.cancel()
        self._error = error
        self._queue.put(None)
        self._welcome.set()
        if not self._closing:
            self._on_closed(error)


class Progress:
    """Reporter of what a rank does; any of the rank's threads may use it.

    Nothing is sent where the rank has sent something else less than ``PROGRESS_SECONDS``
    ago: a push that is fast is told by its buckets alone.

    Args:
        attendance: The rank's stream.
    """

    def __init__(self, attendance: AttendStream) -> None:
        self._attendance = attendance

    def report(
        self,
        activity: pb.Activity.ValueType,
        transfer_id: str = "",
        bucket: int = 0,
        done: int = 0,
        total: int = 0,
    ) -> None:
        """Report an activity, unless the last report is younger than ``PROGRESS_SECONDS``; returns
        at once. See ``weft.v1.Progress``."""
        if time.monotonic() - self._attendance.sent_at < PROGRESS_SECONDS:
            return
        progress = pb.Progress(
            transfer_id=transfer_id, activity=activity, bucket=bucket, done=done, total=total
        )
        self._attendance.send(pb.AttendRequest(progress=progress))


# How long one store call may wait for another member's key while connecting.
_FORMING_SECONDS = 30.0
# NCCL's abort was measured at 0.1 to 0.5 s.
_SETTLE_SECONDS = 5.0


class Membership:
    """One rank's place in a side group, from joining to leaving.

    Each sender has a lane: a group of its own with all receivers, so that no sender's bytes go
    to another. A sender is in its own lane; a receiver is in all, and must send and receive
    nothing in them but in the order of the transfer's buckets, as all others do.

    Args:
        ticket: The place; a channel of its own to the coordinator is opened.
        device: Device of this rank's buffers.
        on_message: Called with each direction, on the stream's thread; must not block.
        on_closed: Called once when the stream ends unasked; the group has been
            aborted with the same error by then.
        credentials: Credentials that the channel and streams show; by default this process's.

    Raises:
        PeerUnavailableError: The coordinator does not answer.
    """

    def __init__(
        self,
        ticket: GroupTicket,
        device: torch.device,
        *,
        on_message: Callable[[pb.AttendResponse], None],
        on_closed: Callable[[WeftError], None],
        credentials: Credentials | None = None,
    ) -> None:
        self.credential = pb.GroupCredential(group_id=ticket.group_id, token=ticket.token)
        self._channel: grpc.Channel = open_channel(ticket.coordinator, credentials)
        self.stub = RendezvousServiceStub(self._channel)
        self._user_on_closed = on_closed
        is_sender = ticket.rank < ticket.num_senders
        #: By the rank of the sender.
        self.lanes: dict[int, SideGroup] = {}
        try:
            for sender in (ticket.rank,) if is_sender else range(ticket.num_senders):
                self.lanes[sender] = self._open_lane(ticket, sender, device, credentials)
            self.attendance = AttendStream(
                self.stub,
                self.credential,
                ticket.rank,
                on_message=on_message,
                on_closed=self._closed,
                num_in_flight=window(device, ticket.backend) if is_sender else 0,
            )
        except BaseException as error:  # an interrupt, too, leaves no thread behind
            self._close_lanes()
            self._channel.close()
            if isinstance(error, RuntimeError):  # what torch makes of a store that does not answer
                raise PeerUnavailableError(
                    f"the side group could not be formed: {error}"
                ) from error
            raise
        self.progress = Progress(self.attendance)

    def abort(self, error: WeftError) -> None:
        """Make every wait in the group, now and later, raise ``error``; never blocks."""
        for lane in self.lanes.values():
            lane.abort(error)

    def check(self) -> None:
        """Raise the error that ``abort`` was called with, if it was called."""
        for lane in self.lanes.values():
            lane.check()

    def leave(self) -> bool:
        """Close the stream, the lanes and the channel; blocks at most 10 s.

        Returns:
            True if the memory of operations that were under way is safe to use again.
        """
        self.attendance.close()
        settled = self._close_lanes()
        self._channel.close()
        return settled

    def _open_lane(
        self,
        ticket: GroupTicket,
        sender: int,
        device: torch.device,
        credentials: Credentials | None,
    ) -> SideGroup:
        others = ticket.num_senders - 1  # senders that are not in this lane

        def on_sent(sent: Mapping[int, LinkUsage]) -> None:
            said = [
                pb.SentBytes(rank=rank + others, usage=LINK_USAGE.encode(usage))
                for rank, usage in islice(sent.items(), MAX_HOPS)
            ]
            self.attendance.send_aside(pb.AttendRequest(sent=pb.SentReport(hops=said)))

        return SideGroup(
            RendezvousStore(self.stub, self.credential, _FORMING_SECONDS, f"{sender}/"),
            SENDER_RANK if ticket.rank == sender else ticket.rank - others,
            ticket.size - others,
            LaneOptions(
                host=ticket.host,
                credentials=credentials,
                senders=Senders(sender, ticket.num_senders),
                site=ticket.site,
                on_sent=on_sent,
            ),
            backend=ticket.backend,
            device=device,
        )

    def _close_lanes(self) -> bool:
        self.abort(TransferAbortedError("this rank left the side group"))  # all at once
        deadline = time.monotonic() + _SETTLE_SECONDS
        settled = [
            lane.close(max(0.0, deadline - time.monotonic())) for lane in self.lanes.values()
        ]
        return all(settled)

    def _closed(self, error: WeftError) -> None:
        self.abort(error)
        self._user_on_closed(error)


#: Layouts kept: one for the base and one for each of some adapters.
MAX_KEPT = 32


class FetchedManifests:
    """Cache of a process's most recently used manifests; used by one thread at a time."""

    def __init__(self) -> None:
        self._kept: LruMapping[bytes, Manifest] = LruMapping(MAX_KEPT)

    def get(
        self,
        layout_digest: bytes,
        stub: RendezvousServiceStub,
        credential: pb.GroupCredential,
        timeout_seconds: float,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Return a manifest, from memory or (blocking) from the coordinator.

        Args:
            on_progress: Called now and then meanwhile: a list of many tensors is slow to write, and
                to read.

        Raises:
            NotReadyError: The coordinator does not know it (MANIFEST_UNKNOWN).
            InvalidManifestError: The digest names another manifest than came.
        """
        manifest = self._kept.get(layout_digest)
        if manifest is None:
            request = pb.GetManifestRequest(credential=credential, layout_digest=layout_digest)

            def fetch() -> Manifest:
                responses = stub.GetManifest(request, timeout=timeout_seconds)
                return manifest_from_chunks(response.chunk for response in responses)

            try:
                manifest = report_while(fetch, on_progress)
            except grpc.RpcError as error:
                raise error_from_rpc(error) from error
            self._kept.put(layout_digest, manifest)
        return manifest
