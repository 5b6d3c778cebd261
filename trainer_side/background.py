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
from trainer_side.push_request import NOT_COPIED, CopyUsage, PushRequest, PushResult
from trainer_side.pushes.content import Content
from trainer_side.pushing import PushExecutor
from trainer_side.ranks.ranks import Ranks, is_told, told
from trainer_side.sources.source import reading
from weft_rl import tracing
from weft_rl.contract.errors import TransferTimeoutError, WeftError
from weft_rl.contract.options import check_choice
from weft_rl.interrupts import Flag

_log = logging.getLogger(__name__)

#: What becomes of an earlier push of the policy that still waits.
WhenBusy = Literal["queue", "replace"]

#: Pushes of one policy that may wait, each with a copy of the weights on the host.
MAX_WAITING = 2
# Of one wait for what has a deadline of its own.
_LONG_SECONDS = 60.0
# What another rank may take beyond a push's time to say that it has found no room.
_GRACE_SECONDS = 5.0


@dataclass(eq=False)
class _WaitingPush:
    """A push that was asked for and has not begun."""

    request: PushRequest
    began: float
    """Time of the call, ``time.monotonic()``."""
    parent: str
    """Traceparent of the caller."""
    number: int = 0
    """Number of the call, as all ranks have agreed; 0 until they have."""
    future: Future[PushResult] = field(default_factory=Future)
    is_ready: bool = False
    """True if it can be carried out at its turn: the request's content is the copied one, or the
    error that there was instead."""
    cost: CopyUsage = NOT_COPIED
    is_replaced: bool = False
    """True if a later push of the policy made it pointless before it began."""


class _AgreeingThread:
    """Agreement of the ranks on one push, on a thread of its own, after the agreement before it.

    Args:
        agree: Function that agrees, or raises.
        former: Agreement before this one, if any.
    """

    def __init__(self, agree: Callable[[], None], former: _AgreeingThread | None) -> None:
        self._agree = agree
        self._lock = threading.Lock()
        self._ended = Flag()
        self._error: BaseException | None = None
        self._then: Callable[[bool], None] | None = None
        self._thread = threading.Thread(
            target=self._run, args=(former,), name="weft-agree", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Block until it has ended; raise what it raised."""
        while not self._ended.wait(_LONG_SECONDS):
            pass
        if self._error is not None:
            raise self._error

    def then(self, call: Callable[[bool], None]) -> None:
        """Call ``call`` once it has ended, with True if it has failed, on any thread."""
        with self._lock:
            self._then = call
            is_ended = self._ended.is_set()
        if is_ended:
            call(self._error is not None)

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()

    def _run(self, former: _AgreeingThread | None) -> None:
        if former is not None:
            former.join()
        try:
            self._agree()
        except BaseException as error:  # noqa: BLE001 (it is the caller's)
            self._error = error
        with self._lock:
            self._ended.set()
            then = self._then
        if then is not None:
            then(self._error is not None)


@dataclass(frozen=True, eq=False)
class _LeftCall:
    """A call that this rank does not come to, after the pushes that wait before it."""

    error: BaseException
    is_ready = True


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
        #: The last agreement of the ranks.
        self._agreement: _AgreeingThread | None = None
        self._turn = pushing.turn
        self._lock, self._condition = pushing.turn.beside, pushing.turn.changed
        self._queue: deque[_WaitingPush | _LeftCall] = deque()
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
        self._turn.check(f"the push of {request.policy}")
        check_choice("when_busy", when_busy, WhenBusy)
        waiting = _WaitingPush(request, time.monotonic(), tracing.of_process().current())
        waiting.future.set_running_or_notify_cancel()  # the ranks could not agree on it
        with self._lock:
            self._turn.check_open()
            self._put(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="weft-push", daemon=True)
                self._thread.start()
        try:
            self._agree_whole(waiting, replace_earlier=when_busy == "replace")
        except WeftError as error:
            self._leave(waiting)
            waiting.future.set_exception(error)
        else:
            self._copy(waiting)
        return waiting.future

    def leave(self, error: BaseException, *, is_beside: bool) -> None:
        """Tell the other ranks that this one does not come to its next call, once the pushes that
        wait are over; returns at once.

        Args:
            is_beside: True if the call is one of ``submit``, which waits for none.
        """
        if self._turn.is_closed:
            return
        if is_beside:
            if self._agreement is not None:
                self._agreement.join()
            self._ranks.leave(error)
            return
        with self._lock:
            is_idle = not self._turn.num_beside
            if not is_idle and not is_told(error):
                self._put(_LeftCall(error))
        if is_idle:
            self._pushing.leave(error)

    def _put(self, waiting: _WaitingPush | _LeftCall) -> None:
        self._queue.append(waiting)
        self._turn.num_beside += 1

    def close(self) -> None:
        """Refuse further pushes, carry out those that wait, end the thread and leave the link."""
        with self._lock:
            self._turn.is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._agreement is not None:
            self._agreement.join()
        self._ranks.close()

    def _agree_whole(self, waiting: _WaitingPush, *, replace_earlier: bool) -> None:
        """Block until this push may copy; all ranks may, or all raise the error of one.

        Ranks agree on a thread of their own, which no interrupt of the caller reaches: the others
        could not know whether this one still heard of it. It ends the push on all of them.
        """
        agree = partial(self._agree, waiting, replace_earlier=replace_earlier)
        if self._ranks.size == 1:
            try:
                agree()
            except BaseException:
                self._leave(waiting)
                raise
            return
        agreement = self._agreement = _AgreeingThread(agree, self._agreement)
        try:
            agreement.wait()
        except WeftError:
            raise
        except BaseException as error:
            told(error)  # by the push, or nobody has taken it
            agreement.then(partial(self._end_interrupted, waiting, error))
            raise

    def _end_interrupted(self, waiting: _WaitingPush, error: BaseException, failed: bool) -> None:
        """End a push whose caller was interrupted, once it is known whether all ranks have it."""
        if failed:
            self._leave(waiting)
        else:
            self._fill(waiting, partial(_fail, error))

    def _agree(self, waiting: _WaitingPush, *, replace_earlier: bool) -> None:
        request, ranks = waiting.request, self._ranks
        with self._lock:
            is_room = self._condition.wait_for(
                lambda: replace_earlier or len(self._ahead(waiting)) < MAX_WAITING,
                request.timeout_seconds,
            )
        try:
            ranks.open(
                waiting.began + request.timeout_seconds + _GRACE_SECONDS,
                {**request.arguments, "when_busy": "replace" if replace_earlier else "queue"},
            )
            waiting.number = ranks.number
            ranks.agree(None if is_room else _no_room(request))
            if replace_earlier:
                # The sender says which have not begun: another rank may be behind it, or ahead.
                numbers = ranks.share(lambda: json.dumps(self._replace_ahead(waiting)).encode())
                self._drop_copies(json.loads(numbers))
        except BaseException as error:
            ranks.leave(error)
            raise
        finally:
            ranks.close_call()

    def _leave(self, waiting: _WaitingPush) -> None:
        with self._lock:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._turn.num_beside -= 1
                self._condition.notify_all()

    def _ahead(self, waiting: _WaitingPush) -> list[_WaitingPush]:
        """Return the pushes of the same policy that wait before this one."""
        ahead = itertools.takewhile(lambda other: other is not waiting, self._queue)
        policy = waiting.request.policy
        return [
            other
            for other in ahead
            if isinstance(other, _WaitingPush)
            and other.request.policy == policy
            and not other.is_replaced
        ]

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
                if isinstance(waiting, _WaitingPush):
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
            waiting.cost = CopyUsage(lent.num_bytes, seconds, self._memory.total_bytes)
            self._fill(waiting, lambda: kept)

    def _fill(self, waiting: _WaitingPush, content: Callable[[], Content]) -> None:
        with self._lock:
            # Without what looked at the live model: it would keep that alive.
            waiting.request = replace(waiting.request, content=content)
            waiting.is_ready = True
            self._condition.notify_all()
        if waiting.is_replaced:  # by another thread, while this one copied
            self._memory.give_back(waiting.number)

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._condition.wait_for(
                    lambda: self._queue[0].is_ready if self._queue else self._turn.is_closed
                )
                if not self._queue:
                    return
                waiting = self._queue.popleft()
                self._condition.notify_all()
            if isinstance(waiting, _LeftCall):
                self._pushing.leave(waiting.error)
            else:
                self._carry_out(waiting)
            del waiting
            with self._lock:
                self._turn.num_beside -= 1
                self._condition.notify_all()

    def _carry_out(self, waiting: _WaitingPush) -> None:
        try:
            try:
                result = self._pushing.push(
                    replace(waiting.request, beside=waiting.number),
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
