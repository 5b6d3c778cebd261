"""Answer of a worker to the question whether its threads make progress.

The coordinator asks after one of them stalled a transfer, by a group in which nothing is sent. A
thread of its own attends that group, but only once every thread that may be stuck has answered or
ended.
"""

from __future__ import annotations

import logging
import threading

from rollout_side.memory.working_threads import WorkingThreads
from weft_rl.contract.errors import PeerUnavailableError, TransferTimeoutError, WeftError
from weft_rl.contract.group import GroupTicket
from weft_rl.rpc.channel import open_channel
from weft_rl.transport.member import Attendance
from weft_rl.v1 import rendezvous_pb2 as pb
from weft_rl.v1.rendezvous_pb2_grpc import RendezvousServiceStub

_log = logging.getLogger(__name__)

#: Between two attempts to attend where the coordinator is away; doubled each time.
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


class Probe:
    """One probe, from the order to attend it until the coordinator drops its group.

    Args:
        ticket: Place in the probe's group; nothing is sent over the backend.
        threads: Threads that must have answered before.
    """

    def __init__(self, ticket: GroupTicket, threads: WorkingThreads) -> None:
        self.ticket = ticket
        self._threads = threads
        self._left = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"weft-probe-{ticket.epoch}", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """End the probe soon; does not wait."""
        self._left.set()

    def _run(self) -> None:
        if not self._threads.wait_turns(self._left):
            return
        pause = FIRST_SECONDS
        while not self._left.is_set():
            try:
                self._attend()
                return
            except (PeerUnavailableError, TransferTimeoutError) as error:
                _log.info("the coordinator is not told that this worker answers: %s", error)
            except WeftError as error:  # the group was dropped: answered, or asked anew
                _log.debug("probe %s has ended: %s", self.ticket.group_id, error)
                return
            except Exception:  # noqa: BLE001 (the edge of a thread)
                _log.exception("probe %s could not be answered", self.ticket.group_id)
            self._left.wait(pause)
            pause = min(LONGEST_SECONDS, 2 * pause)

    def _attend(self) -> None:
        """Attend until the group is dropped.

        Raises:
            WeftError: The group was dropped, or the coordinator went away.
        """
        ticket = self.ticket
        errors: list[WeftError] = []
        ended = threading.Event()

        def closed(error: WeftError) -> None:
            errors.append(error)
            ended.set()

        with open_channel(ticket.coordinator) as channel:
            attendance = Attendance(
                RendezvousServiceStub(channel),
                pb.GroupCredential(group_id=ticket.group_id, token=ticket.token),
                ticket.rank,
                on_message=lambda response: None,
                on_closed=closed,
            )
            try:
                attendance.wait_welcome()
                while not self._left.is_set() and not ended.wait(FIRST_SECONDS):
                    pass
            finally:
                attendance.close()
        if errors:
            raise errors[0]
