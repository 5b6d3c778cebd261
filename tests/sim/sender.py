"""Sender of side groups: models ``weft_rl.transport.sender``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future, Process, any_of
from tests.sim.data import NUM_BUFFERS, PROGRESS_SECONDS
from weft_rl.contract.errors import PeerUnavailableError, TransferTimeoutError, WeftError
from weft_rl.contract.manifest import SendPlan
from weft_rl.coordinator.decisions.state.transfer import Group
from weft_rl.coordinator.decisions.state.values import ContentDigest, VersionLayout

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass
class Sending:
    """What is sent, and how far it came; it outlives the groups that carry it."""

    transfer_id: str
    layout: VersionLayout
    digest: ContentDigest
    deadline: float
    plan: SendPlan | None = None
    rank: int = 0
    change: bytes = b""
    """Of a delta, what its buckets carry; empty where all carry the content."""
    num_packed: int = 0
    num_released: int = 0

    @property
    def num_buckets(self) -> int:
        """Buckets of the transfer, whoever sends them."""
        return len(self.plan.buckets) if self.plan else self.layout.num_buckets

    @property
    def indices(self) -> Sequence[int]:
        """Those that are sent here."""
        return self.plan.sent_by(self.rank) if self.plan else range(self.num_buckets)

    def content(self, index: int) -> bytes:
        """What a bucket carries."""
        is_change = self.change and (self.plan is None or index < self.plan.num_changes)
        return self.change if is_change else self.digest.value


FindGroup = Callable[[str], Generator[Any, Any, Group | None]]


class Reformed(Exception):
    """Members were lost; the transfer resumes in another group."""


class Epoch:
    """One membership as a sender, and what was said in it."""

    def __init__(self, world: World, process: Process, group: Group, rank: int = 0) -> None:
        self.world, self.group, self.rank = world, group, rank
        self.started: dict[str, int] = {}
        self.released: dict[str, int] = {}
        self.broken: WeftError | None = None
        self.successor: Group | None = None
        self.num_sent = 0
        self._is_cut_off = False
        self._wake = Future()
        self._name = process.name
        self.stream = world.attend(process, group, rank, self._message, self._closed)

    def changed(self) -> Future:
        """Done when something is said next."""
        if self._wake.done:
            self._wake = Future()
        return self._wake

    def cut_off(self) -> None:
        """The connections to the receivers broke."""
        self._is_cut_off = True
        self._wake.set()

    def close(self, error: WeftError) -> None:
        """Leave the group."""
        self.broken = self.broken or error
        self.stream.leave()
        self._wake.set()

    def _closed(self, error: WeftError) -> None:
        self.broken = self.broken or error
        self._wake.set()

    def _message(self, message: tuple[Any, ...]) -> None:
        kind, transfer_id, *rest = message
        if kind == "start":
            self.started[transfer_id] = rest[0]
        elif kind == "released":
            self.released[transfer_id] = rest[0]
        elif kind == "abort":
            self.broken = rest[0]
            self._let_go(transfer_id)
        elif kind == "reform":
            self.successor = rest[0]
            self._let_go(transfer_id)
        self._wake.set()

    def _let_go(self, transfer_id: str) -> None:
        gone = PeerUnavailableError("the sender let go of the group")
        data = self.world.data_of(self.group, transfer_id, self._name, self.rank)
        self.world.clock.after(self.world.network.delay(), data.broken.set, None, gone)

    def send_buckets(self, sending: Sending) -> Generator[Any, Any, None]:
        """Send what is not verified yet, each bucket kept until all have it.

        Raises:
            Reformed: The transfer resumes elsewhere.
            WeftError: The transfer or the group has ended.
        """
        transfer_id, indices = sending.transfer_id, sending.indices
        self.num_sent = 0  # of this transfer
        yield from self._wait(lambda: transfer_id in self.started, sending)
        first = self.started[transfer_id]
        if first < sending.num_released:
            raise PeerUnavailableError("a receiver lost a bucket that it had verified")
        data = self.world.data_of(self.group, transfer_id, self._name, self.rank)
        data.epoch = self
        self.num_sent = first
        for nth in range(bisect_left(indices, first), len(indices)):
            if nth >= sending.num_packed:
                if nth >= NUM_BUFFERS:
                    yield from self._await_released(sending, indices[nth - NUM_BUFFERS] + 1)
                sending.num_packed = nth + 1
            yield self.world.random.uniform(0.001, 0.1)
            data.send(indices[nth], sending.content(indices[nth]))
            self.num_sent = indices[nth] + 1
        yield from self._await_released(sending, sending.num_buckets)
        self.stream.up(("staged", transfer_id, sending.digest))

    def _await_released(self, sending: Sending, num_buckets: int) -> Generator[Any, Any, None]:
        def all_have_it() -> bool:
            return self.released.get(sending.transfer_id, 0) >= num_buckets

        yield from self._wait(all_have_it, sending)

    def _wait(self, ready: Callable[[], bool], sending: Sending) -> Generator[Any, Any, None]:
        late = TransferTimeoutError("the deadline passed before the coordinator's word")
        has_told = False
        while True:
            if self.successor is not None:
                raise Reformed
            if self.broken is not None:
                raise self.broken
            if self._is_cut_off and not has_told:
                # Who died, and whether the push goes on, is for the coordinator to say.
                self.stream.up(("failed", sending.transfer_id, "PEER_GONE", "a peer is gone"))
                has_told = True
            if ready() and not has_told:
                return
            left = sending.deadline - self.world.clock.now
            try:
                yield any_of(
                    self.world.clock, min(left, PROGRESS_SECONDS), self.changed(), late=late
                )
            except TransferTimeoutError:
                if left <= PROGRESS_SECONDS:
                    raise
                self.stream.up(("progress", sending.transfer_id, self.num_sent))

    def give_up(self, transfer_id: str, error: WeftError) -> None:
        """Tell the others; the group is over."""
        self.stream.up(("failed", transfer_id, error.reason, error.message))
        self.broken = self.broken or error


class Sender:
    """A trainer rank's place in one group after another."""

    def __init__(self, world: World, process: Process, group: Group, rank: int = 0) -> None:
        self._world, self._process, self._rank = world, process, rank
        self.epoch = Epoch(world, process, group, rank)

    @property
    def usable(self) -> bool:
        """Whether the group can carry a further push."""
        return self.epoch.broken is None and self.epoch.successor is None

    def close(self) -> None:
        """Leave the group."""
        self.epoch.close(WeftError("the sender was closed"))

    def carry(
        self, sending: Sending, find_group: FindGroup | None = None
    ) -> Generator[Any, Any, None]:
        """Send everything, in as many groups as it takes.

        Args:
            find_group: As the real sender's.
        """
        while True:
            epoch = self.epoch
            try:
                yield from epoch.send_buckets(sending)
                return
            except Reformed:
                pass
            except WeftError as error:
                if epoch.successor is None and find_group and error.reason == "EPOCH_FENCED":
                    epoch.successor = yield from find_group(epoch.group.group_id)
                if epoch.successor is None:
                    epoch.give_up(sending.transfer_id, error)
                    raise
            assert epoch.successor is not None
            released = epoch.released.get(sending.transfer_id, 0)
            sending.num_released = max(sending.num_released, released)
            epoch.stream.leave()
            self.epoch = Epoch(self._world, self._process, epoch.successor, self._rank)

    def stand_by(self, sending: Sending, outcome: Future) -> Generator[Any, Any, None]:
        """Stay a member until the outcome is known: the survivors of a loss after the
        last bucket agree once more."""
        while not outcome.done and self.epoch.broken is None:
            changed = self.epoch.changed()
            outcome.then(lambda _, changed=changed: changed.set())  # type: ignore[misc]
            yield changed
            if self.epoch.successor is not None:
                try:
                    yield from self.carry(sending)
                except WeftError:
                    return
