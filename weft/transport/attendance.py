"""A rank's stream to the coordinator: reports go up, directions come down."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from weft.contract.errors import StaleEpochError, TransferTimeoutError, WeftError
from weft.rpc.status import error_from_rpc
from weft.v1 import rendezvous_pb2 as pb
from weft.v1.rendezvous_pb2_grpc import RendezvousServiceStub

_log = logging.getLogger(__name__)

# Reports are a few dozen bytes, at most three a bucket; one that cannot be queued
# means that the stream is dead.
_MAX_QUEUED = 10_000
_WELCOME_SECONDS = 10.0


class Attendance:
    """One rank's Attend stream, open as long as its group is kept.

    ``on_message`` is called on the stream's own thread for every direction but the
    welcome, and must not block; ``on_closed`` once, on the same thread, when the
    stream ends for any reason but ``close``.
    """

    def __init__(
        self,
        stub: RendezvousServiceStub,
        credential: pb.GroupCredential,
        rank: int,
        *,
        on_message: Callable[[pb.AttendResponse], None],
        on_closed: Callable[[WeftError], None],
    ) -> None:
        self._queue: queue.Queue[pb.AttendRequest | None] = queue.Queue(_MAX_QUEUED)
        self._on_message, self._on_closed = on_message, on_closed
        self._closing = False
        self._welcome = threading.Event()
        self._error: WeftError | None = None
        #: ``time.monotonic()`` when the rank said something last.
        self.sent_at = time.monotonic()
        hello = pb.Hello(credential=credential, rank=rank)
        self._queue.put_nowait(pb.AttendRequest(hello=hello))
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
        """Report; returns at once. Reports after the stream's end are dropped: the
        coordinator has taken the rank for dead by then."""
        self.sent_at = time.monotonic()
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self._call.cancel()

    def close(self) -> None:
        """End the stream and its thread; blocks at most 5 s."""
        self._closing = True
        self._queue.put(None)
        self._call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _requests(self) -> Iterator[pb.AttendRequest]:
        while (request := self._queue.get()) is not None:
            yield request

    def _read(self) -> None:
        error: WeftError = StaleEpochError("the coordinator closed the group's stream")
        try:
            for response in self._call:
                if response.HasField("welcome"):
                    self._welcome.set()
                else:
                    self._on_message(response)
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        except Exception as unexpected:  # noqa: BLE001 (the edge of a thread)
            _log.exception("a direction from the coordinator could not be followed")
            error = WeftError(f"internal error on the group's stream: {unexpected!r}")
            self._call.cancel()
        self._error = error
        self._queue.put(None)
        self._welcome.set()
        if not self._closing:
            self._on_closed(error)
