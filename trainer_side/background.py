"""Background pushes: one thread carries them out, in the order of the calls."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from trainer_side.params.snapshot import HostMemory
from trainer_side.push_request import PushRequest
from trainer_side.push_result import NOT_COPIED, CopyCost, PushResult
from trainer_side.pushes.content import Content
from trainer_side.pushing import PushExecutor, under_way
from trainer_side.ranks.ranks import Ranks
from trainer_side.sources.source import reading
from weft_rl import tracing
from weft_rl.contract.errors import InvalidRequestError, TransferTimeoutError, WeftError
from weft_rl.contract.options import check_choice

_log = logging.getLogger(__name__)

#: What becomes of an earlier push of the policy that still waits.
WhenBusy = Literal["queue", "replace"]

#: Pushes of one policy that may wait, each with a copy of the weights on the host.
MAX_WAITING = 2


@dataclass(eq=False)
class _WaitingPush:
    """A push that was asked for and has not begun."""

    number: int
    """Number of the call, counted alike on every rank."""
    request: PushRequest
    began: float
    """Time of the call, ``time.monotonic()``."""
    parent: str
    """Traceparent of the caller."""
    future: Future[PushResult] = field(default_factory=Future)
    is_copied: bool = False
    """True if the request's content is the copied one, or the error that there was instead."""
    cost: CopyCost = NOT_COPIED
    is_replaced: bool = False
    """True if a later push of the policy made it pointless before it began."""


class BackgroundPusher:
    """Thread that pushes copies of the weights, one after the other.

    At most ``MAX_WAITING`` pushes of a policy wait with a copy, beside the one under way: a caller
    that asks for another blocks until one of them has begun.

    Args:
        pushing: Carries the pushes out, on the thread.
        ranks: The trainer's ranks, over a link of their own: the thread that asks for a push uses
            it while another push is under way.
    """

    def __init__(self, pushing: PushExecutor, ranks: Ranks) -> None:
        self._pushing, self._ranks = pushing, ranks
        self._memory = HostMemory(ranks)
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # ``with`` it, an interrupt leaves it free, unlike the other
        self._condition = threading.Condition(self._lock)
        self._queue: deque[_WaitingPush] = deque()
        self._is_running = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, request: PushRequest, when_busy: WhenBusy) -> Future[PushResult]:
        """Copy the weights as they are now, and push the copy after those that wait.

        Collective. Every rank blocks before it copies until there is room at all of them, at
        most for the push's own time; and then for its copy.

        Args:
            request: Request of the push; a failure to look at its model is that of the push.
            when_busy: "replace" makes waiting pushes of the policy pointless; "queue" keeps them.
                Replaced pushes give their copies back at once, so this one finds room; they fail at
                their turn.

        Returns:
            A future of the push, with the same outcome on every rank. It holds a
            TransferTimeoutError where the push found no room at one of them in its time: nothing
            was copied.

        Raises:
            InvalidRequestError: ``PUBLISHER_CLOSED``.
        """
        self._pushing.turn.check(f"the push of {request.policy}")
        check_choice("when_busy", when_busy, WhenBusy)
        waiting = _WaitingPush(
            next(self._numbers), request, time.monotonic(), tracing.of_process().current()
        )
        waiting.future.set_running_or_notify_cancel()  # the ranks could not agree on it
        with self._lock:
            _check_open(self._is_closed)
            self._queue.append(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="weft-push", daemon=True)
                self._thread.start()
        try:
            self._wait_for_room(waiting, replace_earlier=when_busy == "replace")
        except BaseException as error:
            self._leave(waiting)
            if not isinstance(error, WeftError):
                raise
            waiting.future.set_exception(error)
        else:
            self._copy(waiting)
        return waiting.future

    def wait_idle(self, call: str, deadline: float) -> None:
        """Block until nothing runs or waits, at most until ``deadline``.

        Args:
            call: Name of the waiting call, for error messages.

        Raises:
            InvalidRequestError: ``PUBLISHER_CLOSED``; or as ``Turn.check``.
            TransferTimeoutError: Something still does.
        """
        self._pushing.turn.check(call)
        with self._lock:
            _check_open(self._is_closed)
            if not self._condition.wait_for(
                lambda: not self._queue and not self._is_running,
                max(0.0, deadline - time.monotonic()),
            ):
                raise under_way(call)

    def close(self) -> None:
        """Refuse further pushes, carry out those that wait, end the thread and leave the link."""
        with self._lock:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._ranks.abandon()

    def _wait_for_room(self, waiting: _WaitingPush, *, replace_earlier: bool) -> None:
        """Block until this push may copy; all ranks may, or all raise the error of one."""
        seconds = waiting.request.timeout_seconds
        with self._lock:
            is_room = self._condition.wait_for(
                lambda: replace_earlier or len(self._ahead(waiting)) < MAX_WAITING, seconds
            )
        self._ranks.open(waiting.began + seconds)
        self._ranks.agree(None if is_room else _no_room(waiting.request))
        if replace_earlier:
            # The sender says which have not begun: another rank may be behind it, or ahead.
            numbers = self._ranks.share(lambda: json.dumps(self._replace_ahead(waiting)).encode())
            self._drop_copies(json.loads(numbers))

    def _leave(self, waiting: _WaitingPush) -> None:
        with self._lock:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._condition.notify_all()

    def _ahead(self, waiting: _WaitingPush) -> list[_WaitingPush]:
        """Return the pushes of the same policy that wait before this one."""
        ahead = itertools.takewhile(lambda other: other is not waiting, self._queue)
        policy = waiting.request.policy
        return [w for w in ahead if w.request.policy == policy and not w.is_replaced]

    def _replace_ahead(self, waiting: _WaitingPush) -> list[int]:
        """Replace earlier waiting pushes of the same policy, at the sender; return their
        numbers."""
        with self._lock:
            replaced = self._ahead(waiting)
            for earlier in replaced:
                earlier.is_replaced = True
            return [earlier.number for earlier in replaced]

    def _drop_copies(self, numbers: Collection[int]) -> None:
        """Give back the copies of pushes that the sender has replaced; nobody reads them."""
        with self._lock:
            for waiting in self._queue:
                waiting.is_replaced |= waiting.number in numbers
            self._condition.notify_all()
        for number in numbers:
            self._memory.give_back(number)

    def _copy(self, waiting: _WaitingPush) -> None:
        """Copy the weights, or keep the error that prevented it as the push's outcome. The other
        ranks made their copies and must learn of the error in step."""
        began, lent = time.monotonic(), self._memory.lend(waiting.number)
        try:
            with reading("the model"):
                kept = waiting.request.content().kept(lent)
        except BaseException as error:
            self._fill(waiting, partial(_fail, error))
            if not isinstance(error, Exception):
                raise
        else:
            seconds = time.monotonic() - began
            waiting.cost = CopyCost(lent.num_bytes, seconds, self._memory.total_bytes)
            self._fill(waiting, lambda: kept)

    def _fill(self, waiting: _WaitingPush, content: Callable[[], Content]) -> None:
        with self._lock:
            # Without what looked at the live model: it would keep that alive.
            waiting.request = replace(waiting.request, content=content)
            waiting.is_copied = True
            self._condition.notify_all()
        if waiting.is_replaced:  # by another thread, while this one copied
            self._memory.give_back(waiting.number)

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._condition.wait_for(
                    lambda: self._queue[0].is_copied if self._queue else self._is_closed
                )
                if not self._queue:
                    return
                waiting = self._queue.popleft()
                self._is_running = True
                self._condition.notify_all()
            self._carry_out(waiting)
            del waiting
            with self._lock:
                self._is_running = False
                self._condition.notify_all()

    def _carry_out(self, waiting: _WaitingPush) -> None:
        try:
            try:
                result = self._pushing.push(
                    waiting.request,
                    began=waiting.began,
                    is_replaced=lambda: waiting.is_replaced,
                    parent=waiting.parent,
                    cost=waiting.cost,
                )
            finally:
                self._memory.give_back(waiting.number)
        except BaseException as error:  # noqa: BLE001 (it is the future's)
            if not waiting.is_replaced:
                _log.warning("the push of %s failed: %s", waiting.request.policy, error)
            waiting.future.set_exception(error)
        else:
            waiting.future.set_result(result)


def _fail(error: BaseException) -> Content:
    raise error


def _no_room(request: PushRequest) -> TransferTimeoutError:
    return TransferTimeoutError(
        f"{MAX_WAITING} pushes of {request.policy!r} wait already, and none of them began within "
        f"{request.timeout_seconds:g} s: this one was given up before its weights were copied"
    )


def _check_open(is_closed: bool) -> None:
    """Refuse a push of a Publisher that is closed.

    Raises:
        InvalidRequestError: ``PUBLISHER_CLOSED``.
    """
    if is_closed:
        raise InvalidRequestError(
            "this Publisher is closed: make another one, or push inside its `with` block",
            reason="PUBLISHER_CLOSED",
        )
