"""Further sender of a trainer: a rank that sends what it holds beside rank 0."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.pool.client import PushSender
from trainer_side.pool.coordinator_client import data_address, own_site
from trainer_side.pushes.rank_push import RankPush
from weft_rl.contract.errors import (
    NotReadyError,
    PeerUnavailableError,
    TransferAbortedError,
    WeftError,
)
from weft_rl.rpc.codec import TICKET
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.group import same_stream
from weft_rl.v1 import publish_pb2 as pb

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 15.0
# The coordinator has just begun the push: it is there, and busy, or on its way back.
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.1


class SideGroupRank:
    """Place of this rank in the trainer's side group, kept across pushes while membership stays.

    Args:
        coordinator: HOST:PORT.
        data_host: Address that replicas reach this machine by; None takes the route towards the
            coordinator.
        selection: Selection of the device that buckets are packed on.
        credentials: Credentials to show to the coordinator.
    """

    def __init__(
        self,
        coordinator: str,
        data_host: str | None,
        selection: BackendSelection,
        credentials: Credentials,
    ) -> None:
        self._coordinator, self._data_host = coordinator, data_host
        self._selection, self._credentials = selection, credentials
        self._sender: PushSender | None = None

    def can_use(self, target: pb.DescribeTargetResponse) -> bool:
        """Return whether this rank, too, can use the backend that ``target`` names first; try
        it."""
        try:
            self._selection.backend(target)
        except NotReadyError as error:
            _log.info("this rank cannot send over the chosen backend: %s", error)
            return False
        return True

    def has_place(self, backend: str) -> bool:
        """Return whether this rank's place in the last push's group suits a push over a backend.
        Only what this rank knows is considered."""
        return self._sender is not None and self._sender.suits(backend, self._selection)

    def join(self, begun: pb.BeginTransferResponse, number: int) -> None:
        """Join the group as its rank ``number``, unless already in it.

        Blocks until the coordinator attends this rank; tries again for some seconds where no
        connection is made: the others would have to leave the push with this rank. If the rank
        dies before that, the other ranks find it gone as they agree; after that the coordinator
        tells them. In between they would wait for it.

        Raises:
            PeerUnavailableError: The coordinator does not answer this machine.
        """
        kept = self._sender
        if kept is not None and kept.usable and kept.ticket.group_id == begun.group.group_id:
            kept.report_packing(begun.transfer_id)
            return
        self.close()
        host = data_address(self._data_host, self._coordinator)
        ticket = TICKET.decode(
            begun.group, coordinator=self._coordinator, host=host, site=own_site()
        )
        token = [begun.group.token, *begun.group.further_tokens][number]
        ticket = replace(ticket, rank=number, token=token)
        device = self._selection.device_of(ticket.backend)
        until = time.monotonic() + _CONNECT_SECONDS
        while True:
            self._sender = PushSender(ticket, device, self._credentials)
            try:
                self._sender.wait_attended()
                return
            except PeerUnavailableError as error:
                if error.reason != "COORDINATOR_AWAY" or time.monotonic() >= until:
                    raise
                _log.info("joining the push's group again: %s", error)
                self.close()
                time.sleep(_RETRY_SECONDS)

    @contextmanager
    def sending(
        self,
        begun: pb.BeginTransferResponse,
        push: RankPush,
        finite: bool,
        deadline: float,
    ) -> Iterator[None]:
        """Send on a separate thread, from inside the ``with`` until its end.

        A group whose members are lost is formed anew with this rank, also after its last bucket.

        Whatever fails here ends the push by way of the coordinator, and so at rank 0. Tensors are
        sent as the caller's current CUDA stream has made them.
        """
        sender = self._sender
        assert sender is not None  # it has joined
        over: Future[None] = Future()
        in_stream = same_stream(self._selection.accelerator)  # packed there, or read from there

        def send() -> None:
            with in_stream():
                sender.send(sender.begin(begun, push, finite, deadline))
                sender.stand_by(over)

        def run() -> None:
            for part in (send, push.add_up):  # the sum in any case: the other ranks wait for it
                try:
                    part()
                except WeftError as error:
                    _log.info("this rank's part of %s ended: %s", begun.transfer_id, error)
                except Exception:  # noqa: BLE001 (the edge of a thread)
                    _log.exception("this rank's part of %s failed", begun.transfer_id)

        thread = threading.Thread(target=run, name="weft-send-shards", daemon=True)
        thread.start()
        try:
            push.wait_added_up(max(0.0, deadline - time.monotonic()) + _LEAVE_SECONDS)
            yield
        except BaseException as error:
            if not isinstance(error, Exception):  # nobody was told of it: receivers may be waiting
                self.abort()
            raise
        finally:
            over.set_result(None)
            thread.join(_LEAVE_SECONDS)
            if thread.is_alive() or not sender.usable:
                self.close()

    def abort(self) -> None:
        """Abort sending at once; from any thread, never blocks."""
        sender = self._sender
        if sender is not None:
            sender.abort(TransferAbortedError("this rank was interrupted"))

    def close(self) -> None:
        """Leave the group; block at most 10 s."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
