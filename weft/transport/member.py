"""Joining a side group: channel, store, process group and stream as one thing."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import torch

from weft.contract.errors import PeerUnavailableError, WeftError
from weft.contract.group import GroupTicket
from weft.rpc.channel import open_channel
from weft.transport.attendance import Attendance
from weft.transport.group import SideGroup
from weft.transport.progress import Progress
from weft.transport.rendezvous_store import RendezvousStore
from weft.v1 import rendezvous_pb2 as pb
from weft.v1.rendezvous_pb2_grpc import RendezvousServiceStub

# How long one store call may wait for another member's key while connecting.
_FORMING_SECONDS = 30.0
# NCCL's abort was measured at 0.1 to 0.5 s.
_SETTLE_SECONDS = 5.0


class Membership:
    """One rank's place in a side group, from joining to leaving.

    Args:
        ticket: The place; a channel of its own to the coordinator is opened.
        device: Where this rank's buffers lie.
        on_message: See ``Attendance``.
        on_closed: Called once when the stream ends unasked; the group has been
            aborted with the same error by then.

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
    ) -> None:
        self.credential = pb.GroupCredential(group_id=ticket.group_id, token=ticket.token)
        self._channel: grpc.Channel = open_channel(ticket.coordinator)
        self.stub = RendezvousServiceStub(self._channel)
        self._user_on_closed = on_closed
        store = RendezvousStore(self.stub, self.credential, _FORMING_SECONDS)
        try:
            self.group = SideGroup(
                store,
                ticket.rank,
                ticket.size,
                backend=ticket.backend,
                host=ticket.host,
                device=device,
            )
        except RuntimeError as error:  # what torch makes of a store that does not answer
            self._channel.close()
            raise PeerUnavailableError(f"the side group could not be formed: {error}") from error
        self.attendance = Attendance(
            self.stub,
            self.credential,
            ticket.rank,
            on_message=on_message,
            on_closed=self._closed,
        )
        self.progress = Progress(self.attendance)

    def leave(self) -> bool:
        """Close the stream, the group and the channel; blocks at most 10 s.

        Returns:
            Whether the memory of operations that were under way is safe to use again.
        """
        self.attendance.close()
        settled = self.group.close(_SETTLE_SECONDS)
        self._channel.close()
        return settled

    def _closed(self, error: WeftError) -> None:
        self.group.abort(error)
        self._user_on_closed(error)
