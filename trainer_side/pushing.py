"""Course of one push, in step on every rank: describe, plan, begin, send, outcome.

One file: what fails at any of these steps is begun again from the first, on every rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from trainer_side.delta_selection import DeltaSelection
from trainer_side.pool.client import PoolClient
from trainer_side.pool.coordinator_client import CoordinatorClient
from trainer_side.pool.peer import SideGroupRank
from trainer_side.push_request import (
    NO_DELTA,
    NOT_COPIED,
    CopyUsage,
    PushPlan,
    PushRequest,
    PushResult,
    check_replicas,
    plan_push,
    report_of,
)
from trainer_side.pushes.rank_push import RankPush, RankPushFactory
from trainer_side.ranks.ranks import FLAGS, SENDER, Ranks, agreeing, is_told, sharing, told
from trainer_side.sources.base_content import PushedContent
from trainer_side.sources.origin import KnownBases, TrainingBase
from weft_rl import tracing
from weft_rl.contract.errors import (
    BaseMismatchError,
    InvalidRequestError,
    PeerUnavailableError,
    StaleEpochError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.tensors import Reference
from weft_rl.rpc.codec import POLICY_VERSION
from weft_rl.tracing import Span
from weft_rl.v1 import publish_pb2 as pb

_T = TypeVar("_T")
_FINAL = b"\1"
_log = logging.getLogger(__name__)

# Why a push may end though nothing is wrong with what is pushed: members are lost, or the
# coordinator was restarted. Begun again, it waits for who is to take part.
_PASSING = frozenset(
    {
        "PEER_GONE",
        "STALLED",
        "EPOCH_FENCED",
        "TRANSFER_ABORTED",
        "TRANSFER_UNKNOWN",
        "COORDINATOR_AWAY",
        "TOO_MANY_CALLS",
    }
)


def _may_pass(error: WeftError) -> bool:
    """Return whether a push that ended with ``error`` may succeed if it is begun again: also where
    its lease ran out while this process was stopped, and nobody has taken it."""
    is_free = error.reason == "LEASE_FENCED" and bool(error.metadata.get("free"))
    return is_free or error.reason in _PASSING


_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_MAX_FAILURES_SHOWN = 3

# What ranks that send beside rank 0 tell it as they agree on a plan: that they cannot use its
# backend, that they have no place in a group that is kept.
_CANNOT_USE, _NO_PLACE = FLAGS


class PublisherLock:
    """Right to use a publisher, held by one thread of one process at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._pid = os.getpid()
        #: Guards what follows; ``with`` it, an interrupt leaves it free, unlike the condition.
        self.beside = threading.RLock()
        #: Notified whenever a push beside the training is asked for, copied, begun or over.
        self.changed = threading.Condition(self.beside)
        #: Pushes beside the training that wait or run.
        self.num_beside = 0
        #: Whether further pushes are refused.
        self.is_closed = False

    def check(self, call: str) -> None:
        """Refuse a call that could only wait for itself.

        Raises:
            InvalidRequestError: It is made from within a push, or in a forked process.
        """
        self.check_process(call)
        if self.is_held_here:
            raise InvalidRequestError(
                f"{call} was called from within a push of the same Publisher (a signal handler, "
                "named tensors, progress): it would wait for itself. Call it after the push, or "
                "make another Publisher with a trainer_id of its own"
            )

    def check_process(self, call: str) -> None:
        """Refuse a call in a forked process."""
        if not self.is_of_this_process:
            raise InvalidRequestError(
                f"{call}: this process was forked from {self._pid}, whose Publisher this is: it "
                "has the connections and the leases. Make a Publisher here"
            )

    def check_open(self) -> None:
        """Refuse a push of a Publisher that is closed."""
        if self.is_closed:
            raise InvalidRequestError(
                "this Publisher is closed: make another one, or push inside its `with` block",
                reason="PUBLISHER_CLOSED",
            )

    def wait_idle(self, call: str, deadline: float) -> None:
        """Block until no push beside the training runs or waits, at most until ``deadline``.

        Raises:
            InvalidRequestError: ``PUBLISHER_CLOSED``; or see ``check``.
            TransferTimeoutError: One still does.
        """
        self.check(call)
        with self.beside:
            self.check_open()
            seconds = max(0.0, deadline - time.monotonic())
            if not self.changed.wait_for(lambda: not self.num_beside, seconds):
                raise _under_way(call)

    @property
    def is_held_here(self) -> bool:
        """True within a push of this thread."""
        return self._owner == threading.get_ident()

    @property
    def is_of_this_process(self) -> bool:
        """True if the publisher was made in this process, not before a fork."""
        return os.getpid() == self._pid

    @contextlib.contextmanager
    def taken(self, call: str, deadline: float | None = None) -> Iterator[None]:
        """Hold the turn inside the ``with``; block for it until ``deadline``, ``time.monotonic()``.

        Raises:
            InvalidRequestError: See ``check``.
            TransferTimeoutError: Another thread held the turn all the time.
        """
        self.check(call)
        seconds = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        me = threading.get_ident()
        try:
            if not self._lock.acquire(timeout=seconds):
                raise _under_way(call)
            self._owner = me
            yield
        finally:
            if self._owner == me:
                self._owner = 0
            with contextlib.suppress(RuntimeError):  # not taken, or interrupted before it was
                self._lock.release()


def _under_way(call: str) -> TransferTimeoutError:
    """Return the error of a call that found no turn in its time."""
    return TransferTimeoutError(
        f"{call}: another push of this Publisher is still under way, and the time of this one is "
        "up: nothing was begun"
    )


def _with_text(error: WeftError, text: str) -> WeftError:
    return error_from_reason(error.reason, error.message + text, error.metadata)


def _shown_before(failures: Sequence[WeftError], error: WeftError) -> str:
    """Return the reasons for which a push was begun again before it ended with ``error``, as the
    end of that error's message; empty if there are no others."""
    others = dict.fromkeys(each.message for each in failures if each.message != error.message)
    shown = [*others][-_MAX_FAILURES_SHOWN:]
    return "; before that: " + "; ".join(shown) if shown else ""


class PushExecutor:
    """Executor of pushes, one at a time; thread-safe.

    Args:
        ranks: Ranks of the trainer; left when this is closed.
        client: The sender's client, closed with this; None at other ranks.
        packings: Maker of this rank's pushes.
        peer: This rank as a further sender; closed with this.
        deltas: Planner of this rank's deltas; closed with this.
    """

    def __init__(
        self,
        ranks: Ranks,
        client: PoolClient | None,
        packings: RankPushFactory,
        peer: SideGroupRank,
        deltas: DeltaSelection,
    ) -> None:
        #: Of the publisher.
        self.turn = PublisherLock()
        self._ranks, self._sender_client = ranks, client
        self._packings, self._peer, self._deltas = packings, peer, deltas
        self._origins = KnownBases()
        self._said: dict[str, tuple[str, ...]] = {}

    def push(
        self,
        request: PushRequest,
        *,
        began: float | None = None,
        is_replaced: Callable[[], bool] = lambda: False,
        parent: str = "",
        cost: CopyUsage = NOT_COPIED,
    ) -> PushResult:
        """Push one version; collective; block until every replica has switched or failed to.

        One that is asked for by a caller who waits comes after those beside the training. Each has
        the request's time, from this call on.

        Args:
            request: Request of the push; a failure to look at its model is that of every rank.
            began: Time at which it was asked for, ``time.monotonic()``; None is now.
            is_replaced: Function called at the sender once the push's turn has come; true if a
                later push replaced it.
            parent: Traceparent of the enclosing span, if that is not this thread's.
            cost: Cost of the copy that is sent, for the report.

        Raises:
            TransferAbortedError: ``REPLACED``.
            WeftError: The same on every rank; nothing changed.
        """
        now = time.monotonic()
        began, deadline = now if began is None else began, now + request.timeout_seconds
        call = f"the push of {request.policy}"
        failures: list[WeftError] = []
        try:
            if not request.beside:  # in the order of the calls, on every rank
                self.turn.wait_idle(call, deadline)
            with (
                self.turn.taken(call, deadline),
                self._traced("weft.push", parent=parent, policy=request.policy) as span,
                self._reported(request.policy),
                self._at_call(),
            ):
                self._ranks.open(deadline, request.arguments)
                is_base = request.policy == BASE_POLICY
                if is_base:
                    self._deltas.begin()
                while True:
                    plan = None
                    try:
                        plan = self._agree(request, is_replaced, deadline)
                        if is_base:
                            plan = self._deltas.plan(plan)
                        origin, begun = self._begin(request, plan, deadline, span)
                        transfer = self._carry_out(begun, plan.push, plan.finite, deadline)
                        version = POLICY_VERSION.decode(begun.version)
                        about_base = self._about_base(request, plan, origin, version, transfer)
                        seconds = time.monotonic() - began
                        usage = self._deltas.usage(plan, transfer) if is_base else NO_DELTA
                        report = report_of(
                            transfer, plan, seconds, cost, usage, failures, about_base
                        )
                        if is_base:
                            self._deltas.committed(plan, transfer)
                    except WeftError as error:  # tried again until the deadline, if it may pass
                        if is_base and plan is not None and self._deltas.failed(plan, error):
                            self._ranks.go_on()
                            continue
                        if not _may_pass(error):
                            if before := _shown_before(failures, error):
                                raise _with_text(error, before) from error
                            raise
                        self._begin_again(request, error, plan, deadline, failures)
                        failures.append(error)
                    else:
                        span.set(replicas=report.num_replicas, backend=report.backend)
                        result = PushResult(version, report)
                        self._log_success(result, begun, (*plan.push.remarks, *about_base))
                        return result
        except KeyboardInterrupt as interrupt:
            # Where it was, many calls deep, tells nobody anything.
            named = KeyboardInterrupt(f"a push of {request.policy} was interrupted")
            raise (told(named) if is_told(interrupt) else named) from None

    @contextlib.contextmanager
    def _at_call(self) -> Iterator[None]:
        """Clean up after a call of all ranks that fails, or is interrupted anywhere, inside the
        ``with``: the other ranks are told if they do not know."""
        try:
            yield
        except BaseException as error:
            self._ranks.leave(error)
            if self._interrupted(error):
                self._peer.close()
            if self._sender_client is not None:
                self._sender_client.end(error)
            raise
        finally:
            self._ranks.close_call()

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not come to its next call, for ``error``."""
        self._ranks.leave(error)

    def _reported(self, policy: str) -> contextlib.AbstractContextManager[None]:
        """Report a push inside the ``with``, at the sender only."""
        client = self._sender_client
        return contextlib.nullcontext() if client is None else client.reporter.push(policy)

    def _interrupted(self, error: BaseException) -> bool:
        """Return whether ``error`` is an interrupt; if so, leave the ranks and abort the peer.
        Nobody was told of an interrupt, and the other ranks would wait for this one."""
        if isinstance(error, Exception):
            return False
        self._ranks.leave(error)
        self._peer.abort()
        return True

    def between_pushes(
        self, call: str, work: Callable[[Ranks, CoordinatorClient | None], _T], deadline: float
    ) -> _T:
        """Run ``work`` in step with the other ranks, once no push is under way or waits; see
        ``InStep``."""
        client = self._sender_client
        self.turn.wait_idle(call, deadline)
        with self.turn.taken(call, deadline), self._at_call():
            return work(self._ranks, client.coordinator if client is not None else None)

    def close(self) -> None:
        """Wait for the push under way, then leave the other ranks and the pool."""
        with self.turn.taken("close"):
            self._ranks.close()
            self._peer.close()
            self._origins.close()
            self._deltas.close()
            if self._sender_client is not None:
                self._sender_client.close()

    def _traced(
        self, name: str, *, parent: str = "", **values: tracing.Value
    ) -> contextlib.AbstractContextManager[Span]:
        """Open a span at the sender only: a push is one trace, however many ranks it has."""
        tracer = tracing.NO_TRACER if self._sender_client is None else tracing.of_process()
        return tracer.span(name, parent=parent, **values)

    def _begin_again(
        self,
        request: PushRequest,
        error: WeftError,
        plan: PushPlan | None,
        deadline: float,
        failures: Sequence[WeftError],
    ) -> None:
        """Pause, then have all ranks begin a failed push again, or raise its ``error`` on all of
        them.

        Args:
            plan: The failed push's plan, if it came so far.
            failures: Errors that it was begun again for before.
        """
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** len(failures), _LONGEST_PAUSE_SECONDS)

        def decide() -> bytes:
            is_of_all = request.require == "all" and error.reason in ("PEER_GONE", "STALLED")
            is_own = error.metadata.get("member") == self._client.coordinator.trainer_id
            if is_of_all or (error.reason == "STALLED" and is_own):
                return _FINAL
            if deadline - time.monotonic() < 2 * pause:
                return _FINAL
            if plan is not None and not (plan.what.can_begin_again or self._deltas.has_read):
                return _FINAL + (
                    b"; named tensors cannot be read again: give a function that makes the "
                    b"iterator, and such a push is begun again by itself"
                )
            time.sleep(pause)
            return b""

        self._ranks.go_on()
        verdict = self._ranks.share(decide)
        if verdict:
            why = verdict.removeprefix(_FINAL).decode()
            raise _with_text(error, why + _shown_before(failures, error)) from error
        _log.warning("the push of %s is begun again: %s", request.policy, error)

    def _log_success(
        self, result: PushResult, begun: pb.BeginTransferResponse, lasting: tuple[str, ...]
    ) -> None:
        """Log a push and its remarks; a lasting remark of a policy only when the lasting ones have
        changed."""
        version, report = result
        known, self._said[version.policy] = self._said.get(version.policy), lasting
        for remark in report.remarks:
            if remark not in lasting or known != lasting:
                _log.warning("%s: %s", version, remark)
        _log.info(
            "pushed %s in %.3f s: %d bytes to %d replicas, epoch %d",
            version,
            report.seconds,
            report.total_bytes,
            report.num_replicas,
            begun.group.epoch,
        )

    @property
    def _client(self) -> PoolClient:
        assert self._sender_client is not None
        return self._sender_client

    def _agree(
        self, request: PushRequest, is_replaced: Callable[[], bool], deadline: float
    ) -> PushPlan:
        """Agree on the push's plan with every rank: content, layout and senders. Its backend is one
        that every sending rank can use."""
        ranks = self._ranks
        without: list[str] = []

        def describe() -> bytes:
            if not without and is_replaced():
                return b""
            target = self._client.describe(deadline, without)
            if request.policy == BASE_POLICY:
                self._client.coordinator.add_dtypes(target, deadline)
            return target.SerializeToString()

        while True:
            described = ranks.share(describe, all_wait=True)
            if not described:
                raise told(
                    TransferAbortedError(
                        f"a later push of {request.policy!r} replaced this one before it began; "
                        "nothing was sent",
                        reason="REPLACED",
                    )
                )
            target = pb.DescribeTargetResponse.FromString(described)
            with self._traced("weft.push.plan"), agreeing(ranks) as agreement:
                reference = partial(self._reference, target, deadline)
                plan = plan_push(request, target, self._packings, reference)
                agreement.same = plan.push.agreed
                if ranks.rank != SENDER and plan.push.sender is not None:
                    can_use = self._peer.can_use(target)
                    has_place = self._peer.has_place(plan.backend)
                    agreement.flags = (not can_use) * _CANNOT_USE | (not has_place) * _NO_PLACE
            if not agreement.told & _CANNOT_USE:
                if agreement.told & _NO_PLACE and self._sender_client is not None:
                    self._sender_client.leave_group()
                return plan
            without.append(plan.backend)

    def _reference(self, target: pb.DescribeTargetResponse, deadline: float) -> Reference:
        return self._client.coordinator.reference(target, deadline)

    def _begin(
        self, request: PushRequest, plan: PushPlan, deadline: float, span: Span
    ) -> tuple[TrainingBase, pb.BeginTransferResponse]:
        """Begin the transfer at rank 0; return on every rank the base that an adapter was trained
        on, and what was begun."""
        span.set(
            kind="base" if plan.adapter is None else "adapter",
            bytes=plan.push.num_bytes,
            backend=plan.backend,
        )

        def begin() -> bytes:
            origin = self._origin(request, plan, deadline)
            begun = self._client.begin(
                request.policy,
                plan.push,
                plan.adapter,
                deadline,
                min_replicas=check_replicas(request.require),
                check_finite=plan.finite,
                trained_on=origin.version,
                refuse_other_base=plan.adapter is not None and request.base.is_required,
            )
            return origin.encode(begun.SerializeToString())

        origin, answer = TrainingBase.decode(self._ranks.share(begin, all_wait=True))
        begun = pb.BeginTransferResponse.FromString(answer)
        span.set(version=begun.version.version, transfer_id=begun.transfer_id)
        _log.debug(
            "pushing %s: %s, %d bytes to %s, epoch %d",
            POLICY_VERSION.decode(begun.version),
            plan.push.description,
            plan.push.num_bytes,
            ", ".join(begun.replica_ids),
            begun.group.epoch,
        )
        return origin, begun

    def _origin(self, request: PushRequest, plan: PushPlan, deadline: float) -> TrainingBase:
        """Find the base that an adapter was trained on."""
        if plan.adapter is None:
            return TrainingBase(None)
        digest = plan.target.base_checkpoint_digest
        must_know = request.base.is_required
        origin = self._origins.of(
            plan.what.base,
            request.base.version,
            digest,
            deadline,
            must_know=must_know,
            may_wait=request.base.is_compared,
            on_reading=self._client.reporter.reads,
        )
        if origin.version is None and must_know:
            raise BaseMismatchError(
                f"it is not known which base {request.policy!r} was trained on: {origin.why}"
            )
        return origin

    def _about_base(
        self,
        request: PushRequest,
        plan: PushPlan,
        origin: TrainingBase,
        version: PolicyVersion,
        transfer: pb.Transfer,
    ) -> tuple[str, ...]:
        """Note the base that was pushed, or return remarks on the one that an adapter is served
        over."""
        if plan.adapter is None:
            content = None
            if self._sender_client is not None and transfer.HasField("content_digest"):
                content = PushedContent(plan.push.packing.manifest, transfer.content_digest.value)
            self._origins.pushed(plan.what.base, version.version, content)
        elif request.base.is_compared and transfer.HasField("served_over_base_version"):
            return origin.remarks(
                transfer.served_over_base_version, is_other=transfer.over_another_base
            )
        return ()

    def _carry_out(
        self, begun: pb.BeginTransferResponse, push: RankPush, finite: bool, deadline: float
    ) -> pb.Transfer:
        """Send at the ranks that send, assist at the others; return the outcome on every rank."""
        ranks, is_under_way = self._ranks, begun.HasField("group")
        ended: pb.Transfer | None = None
        with contextlib.ExitStack() as beside:
            beside.callback(push.release)  # last, once this rank's thread has ended
            if push.is_prepared_together:
                self._prepare(begun, push, deadline)
            if ranks.rank != SENDER:
                if is_under_way and push.sender is not None:
                    beside.enter_context(self._peer.sending(begun, push, finite, deadline))
                else:
                    push.assist(is_under_way=is_under_way)
            try:
                with sharing(ranks) as shared:
                    if ranks.rank == SENDER:
                        sender = None
                        with self._client.carrying_out(begun, push):
                            if is_under_way and push.sender is not None:
                                # When the group is gone, only the coordinator knows why, or
                                # whether the version was committed all the same.
                                gone = contextlib.suppress(StaleEpochError, PeerUnavailableError)
                                with gone, self._traced("weft.push.send"):
                                    sender, sending = self._client.begin_sending(
                                        begun, push, finite, deadline
                                    )
                                    sender.send(sending)
                            ended = self._client.outcome(begun, push, deadline, sender)
                        shared.payload = ended.SerializeToString()
                return pb.Transfer.FromString(shared.payload)
            except PeerUnavailableError as error:
                if ended is None or push.is_prepared_together:  # it has ended for the others, too
                    raise
                _log.warning("the push is served, but not all ranks could be told: %s", error)
                return ended
            except BaseException as error:
                self._interrupted(error)  # before this rank's thread is waited for
                raise

    def _prepare(self, begun: pb.BeginTransferResponse, push: RankPush, deadline: float) -> None:
        """Come to the push's group at the ranks that send, and gather what has to be; collective.
        The pool has taken the push: only now is anything held for it."""
        try:
            with agreeing(self._ranks):
                if begun.HasField("group"):
                    self._come(begun, push.sender, deadline)
                    push.prepare()
        except BaseException as error:
            if self._ranks.rank == SENDER:
                self._client.give_up(begun, error, has_begun=False)
            else:  # a member that sends nothing would be waited for, where others agreed
                self._peer.close()
            raise

    def _come(self, begun: pb.BeginTransferResponse, number: int | None, deadline: float) -> None:
        """Join the push's group if this rank sends; called before steps that may take long."""
        if number is None:
            return
        if self._ranks.rank == SENDER:
            self._client.attend(begun, deadline)
            return
        try:
            self._peer.join(begun, number)
        except BaseException as error:
            self._ranks.abandon(error)  # the others may be gathering by now, and wait for us there
            raise
