"""A receiver's rank of a side group, as the Weft thread of a worker."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future, any_of
from tests.sim.data import PROGRESS_SECONDS, change_between, digest_over, sender_name
from tests.sim.in_place import AHEAD
from tests.sim.network import Stream
from tests.sim.store import Copy, Partial
from weft_rl.contract.errors import (
    CapacityError,
    DigestMismatchError,
    LoadFailedError,
    NotReadyError,
    PeerUnavailableError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.coordinator.decisions.state.transfer import Group, Transfer
from weft_rl.coordinator.decisions.state.values import PolicyKind

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica

#: Transfers whose bytes a receiver has room for.
_STAGING_ROOM = 8
_FOREVER = 1e6


class Receiver:
    """One membership; ``former`` is that in the trainer's group before."""

    def __init__(
        self, replica: SimReplica, group: Group, rank: int, index: int, former: Receiver | None
    ) -> None:
        self.replica, self.group, self.rank, self.index = replica, group, rank, index
        self.world = replica.world
        self.open = True
        self.stream: Stream | None = None
        self.former = former
        self._directions: deque[tuple[Any, ...]] = deque()
        self._wake = Future()
        self._aborted = Future()
        self._prepared: tuple[Transfer, Partial] | None = None
        #: Of a delta, the content that it is applied to.
        self._base = b""
        self._deadline = 0.0
        self.ended = Future()
        replica.worker.spawn(self._run()).then(lambda _: self.ended.set())

    def leave(self) -> None:
        """End soon."""
        self.open = False
        if self.stream is not None:
            self.stream.leave()
        self._aborted.set(error=TransferAbortedError("the replica left the side group"))
        self._put(("end", ""))

    def _put(self, message: tuple[Any, ...]) -> None:
        if message[0] == "abort":
            self._aborted.set(error=message[2])
        self._directions.append(message)
        self._wake.set()

    def _closed(self, error: WeftError) -> None:
        self.open = False
        self._put(("end", ""))

    def _run(self) -> Generator[Any, Any, None]:
        yield self.world.network.delay()
        while self.former is not None and self.open:
            # It hands over what it has verified of a transfer that goes on here.
            with contextlib.suppress(TransferAbortedError):
                late, ended = TransferTimeoutError("it hangs"), self.former.ended
                yield any_of(self.world.clock, _FOREVER, ended, self._aborted, late=late)
                self.former = self.former.former
        if not self.open:
            return
        self.stream = self.world.attend(
            self.replica, self.group, self.rank, self._put, self._closed
        )
        try:
            while True:
                while not self._directions:
                    self._wake = Future()
                    yield self._wake
                kind, transfer_id, *rest = self._directions.popleft()
                if kind == "end":
                    return
                yield from self._follow(kind, transfer_id, rest)
        finally:
            self._keep_prepared()

    def _follow(self, kind: str, transfer_id: str, rest: list[Any]) -> Generator[Any, Any, None]:
        assert self.stream is not None
        try:
            if kind == "prepare":
                yield from self._prepare(*rest)
            elif kind == "start":
                yield from self._receive(transfer_id, *rest)
            elif kind == "abort":
                self._prepared = None
                self.replica.store.drop_one(transfer_id, self.index)
        except WeftError as error:
            self._keep_prepared()
            self.stream.up(("failed", transfer_id, error.reason, error.message))

    def _keep_prepared(self) -> None:
        """What was verified: the transfer may resume in another group."""
        if self._prepared is not None:
            self.replica.store.put_partial(self._prepared[1], self.index)
            self._prepared = None

    def _prepare(self, transfer: Transfer, time_left: float) -> Generator[Any, Any, None]:
        assert self.stream is not None
        self._deadline = self.world.clock.now + time_left
        self._aborted = Future() if self.open else self._aborted
        self._prepared = None
        yield self.world.random.uniform(0.001, 0.05)
        store = self.replica.store
        partial = store.take_partial(transfer.transfer_id, transfer.trainer_id, self.index)
        if store.num_held(self.index) >= _STAGING_ROOM:
            raise CapacityError("staging is full")
        if self._takes_delta(transfer):
            try:
                self._base = self._base_to_change(transfer)
            except WeftError:
                store.put_partial(partial, self.index)
                raise
        self._prepared = transfer, partial
        goes_on = self.replica.in_place.prepare
        if self._in_place(transfer) and not goes_on(transfer.transfer_id):
            partial.contents.clear()
        self.stream.up(("prepared", transfer.transfer_id, self._has(transfer, partial.contents)))

    def _takes_delta(self, transfer: Transfer) -> bool:
        return bool(transfer.delta_from) and self.replica.name not in transfer.whole_for

    def _own(self, transfer: Transfer) -> range:
        """The buckets that are taken here, in the order of all: the others pass."""
        plan, num_buckets = transfer.send_plan, transfer.layout.num_buckets
        if plan is None or not plan.num_whole:
            return range(num_buckets)
        if self._takes_delta(transfer):
            return range(plan.num_changes)
        return range(plan.num_changes, num_buckets)

    def _has(self, transfer: Transfer, contents: list[bytes]) -> int:
        """How many buckets, from the first, need not come for it."""
        own = self._own(transfer)
        return transfer.layout.num_buckets if len(contents) == len(own) else own[len(contents)]

    def _base_to_change(self, transfer: Transfer) -> bytes:
        """The content of the copy that a delta is applied to.

        Now and then there is none, or it is not what it was, or the wrong one is taken.
        """
        world, deltas = self.world, self.world.deltas
        bases = [base.digest.value for base in self.replica.store.bases]
        base = next((value for value in bases if value == transfer.delta_from), b"")
        if base and deltas.random() < world.delta_failure:
            match deltas.choice(["gone", "full", "damaged", "wrong"]):
                case "gone":
                    self.replica.store.drop_base(base)
                    self.replica.undo.clear()
                    reason = deltas.choice(["NOT_RETAINED", "DELTA_REFUSED"])
                    raise NotReadyError("its copy was dropped", reason=reason)
                case "full":
                    raise CapacityError("there is no room beside the copy")
                case "damaged":
                    base = b"damaged!"
                case "wrong":
                    base = bases[-1]
        if not base:
            raise NotReadyError("it holds no such base", reason="DELTA_REFUSED")
        world.checks.transfers.applying(self, transfer.transfer_id, base)
        return base

    def _receive(self, transfer_id: str, first_bucket: int) -> Generator[Any, Any, None]:
        assert self.stream is not None
        if self._prepared is None or self._prepared[1].transfer_id != transfer_id:
            raise WeftError(f"{transfer_id} was started but never prepared")
        transfer, partial = self._prepared
        contents, own = partial.contents, self._own(transfer)
        # A slower member lacks those: they come again.
        del contents[max(0, first_bucket - own.start) :]
        yield from self._receive_buckets(transfer, contents, first_bucket)
        if self._in_place(transfer):
            self._say_due(transfer)
            yield from self._await_loaded(transfer)
        self._prepared = None
        made = contents
        if self._takes_delta(transfer):
            made = [change_between(self._base, content) for content in contents]
        digest = digest_over(made, transfer.layout)
        base = self._base if self._takes_delta(transfer) else b""
        copy = Copy(transfer_id, transfer.policy_version, digest, tuple(contents), base)
        self.replica.store.put_staged(copy, self.index)
        self.world.checks.transfers.staging(self, transfer_id, digest)
        self.stream.up(("staged", transfer_id, digest))

    def _apply_before_others(self) -> None:
        """What the replica finds out of its delta while the others have still to get all."""
        if self._base == b"damaged!" and self.world.mixed.random() < 0.5:
            raise DigestMismatchError("the elements here are not those that were changed")

    def _in_place(self, transfer: Transfer) -> bool:
        # A delta is read against what is served, and written at its commit.
        is_whole = transfer.kind is PolicyKind.BASE and not self._takes_delta(transfer)
        return self.replica.kind.in_place and is_whole

    def _say_due(self, transfer: Transfer) -> None:
        assert self.stream is not None
        self.stream.up(("load_due", transfer.transfer_id))

    def _await_loading(self, transfer: Transfer) -> Generator[Any, Any, None]:
        """Until what was received is loaded, its memory is not received into again."""
        late = TransferTimeoutError("generation is not paused")
        left = self._deadline - self.world.clock.now
        opened = self.replica.in_place.opened(transfer.transfer_id)
        yield any_of(self.world.clock, left, opened, self._aborted, late=late)

    def _await_loaded(self, transfer: Transfer) -> Generator[Any, Any, None]:
        assert self.stream is not None
        yield from self._await_loading(transfer)
        outcome = self.world.load_outcome()
        seconds = self.world.random.uniform(0.001, outcome.seconds)
        while seconds > 0:
            yield min(seconds, PROGRESS_SECONDS)
            seconds -= PROGRESS_SECONDS
            self.stream.up(("progress", transfer.transfer_id))
        if outcome.failure:
            raise LoadFailedError("the engine broke", metadata={"dirty": "true"})

    def _wait_speaking(
        self, transfer: Transfer, seconds: float, *futures: Future, late: WeftError
    ) -> Generator[Any, Any, Any]:
        """As ``any_of``; says what it waits for."""
        assert self.stream is not None
        first = any_of(self.world.clock, seconds, *futures, late=late)
        pause = TransferTimeoutError("it speaks")
        while not first.done:
            try:
                yield any_of(self.world.clock, PROGRESS_SECONDS, first, late=pause)
            except TransferTimeoutError as error:
                if error is not pause:
                    raise
                self.stream.up(("progress", transfer.transfer_id))
        return (yield first)

    def _receive_buckets(
        self, transfer: Transfer, contents: list[bytes], first_bucket: int
    ) -> Generator[Any, Any, None]:
        assert self.stream is not None
        world = self.world
        late = TransferTimeoutError("the bytes did not come")
        num_received = [0] * self.group.num_senders
        due = world.random.randint(0, AHEAD) if self._in_place(transfer) else 0
        own = self._own(transfer)
        for index in range(first_bucket, transfer.layout.num_buckets):
            if index == own.stop and self._takes_delta(transfer):
                self._apply_before_others()
            rank = transfer.sender_of(index)
            sender = sender_name(self.group, rank)
            data = world.data_of(self.group, transfer.transfer_id, sender, rank)
            is_own = index in own
            if is_own and self._in_place(transfer) and len(contents) >= due:
                self._say_due(transfer)
                due = len(contents) + transfer.layout.num_buckets
            if is_own and self._in_place(transfer) and len(contents) >= AHEAD:
                yield from self._await_loading(transfer)
            arrives = data.operation(num_received[rank])
            num_received[rank] += 1
            left = self._deadline - world.clock.now
            bucket, content = yield from self._wait_speaking(
                transfer, left, arrives, data.broken, self._aborted, late=late
            )
            yield world.random.uniform(0.001, 0.05)
            if not world.network.connected(self.replica.name, sender):
                if world.random.random() < 0.5:
                    raise PeerUnavailableError("the connection broke")
                left = self._deadline - world.clock.now
                yield from self._wait_speaking(
                    transfer, left, data.broken, self._aborted, late=late
                )
            if not is_own:
                self.stream.up(("verified", transfer.transfer_id, bucket))
                continue
            if world.random.random() < world.corruption / 3:
                if world.random.random() < 0.5:
                    raise DigestMismatchError("a bucket's digest is not that of its trailer")
                content = b"corrupt!"
            world.checks.transfers.receiving(self, transfer.transfer_id, bucket, index)
            contents.append(content)
            if self._in_place(transfer):
                self.replica.in_place.verified(transfer.transfer_id, len(contents))
            self.stream.up(("verified", transfer.transfer_id, bucket))
