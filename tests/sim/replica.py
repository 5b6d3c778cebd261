"""A replica: orders, and an engine that may fail.

A model of ``rollout_side``: agent.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future, Process
from tests.sim.clone_source import CloneSource
from tests.sim.data import PROGRESS_SECONDS, layout_of
from tests.sim.drain import SimDrain
from tests.sim.in_place import InPlace
from tests.sim.probes import Probes
from tests.sim.receiver import Receiver
from tests.sim.registration import SimRegistration
from tests.sim.sleep import SimSleep
from tests.sim.store import Copy, Store
from tests.sim.undo import SimUndo
from tests.unit.coordinator.decisions.machine import SPEC
from weft_rl.contract.errors import (
    DigestMismatchError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    StaleEpochError,
    WeftError,
)
from weft_rl.contract.manifest import WSUM64
from weft_rl.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import HeldVersion, OutOfService, ReplicaWork, Sleep
from weft_rl.coordinator.decisions.state import effects
from weft_rl.coordinator.decisions.state.transfer import Group, switch_id
from weft_rl.coordinator.decisions.state.values import ContentDigest, RecordedFacts

if TYPE_CHECKING:
    from tests.sim.world import World

_REAP_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """What does not change when a replica restarts."""

    num_receivers: int
    base_copies: int
    in_place: bool = False
    """It loads bases as they come; it has one receiver. What it retains, one at most, it
    reads back from its engine, and what a delta has changed it can take back."""


class SimReplica(Process):
    """One process of one replica; it starts with ``base@0`` and no adapters."""

    def __init__(self, world: World, name: str, incarnation: str, kind: Kind) -> None:
        super().__init__(world.clock, name)
        self.world = world
        self.incarnation = incarnation
        self.kind = kind
        self._vector = VersionVector()
        self.served: dict[PolicyVersion, ContentDigest] = {}
        self.store = Store(kind.num_receivers, kind.base_copies)
        self.in_place = InPlace(self)
        self.undo = SimUndo(self)
        #: The threads that receive and send, which may hang while the process beats.
        self.worker = Process(world.clock, f"{name}'s worker")
        #: The engine's own thread, through which orders go; it may hang, too.
        self.engine = Process(world.clock, f"{name}'s engine")
        #: What it is to hang in next, and for how long.
        self.hangs_next: tuple[str, float] = ("", 0.0)
        self._owed: dict[object, tuple[str, float]] = {}
        self._seen_at = 0.0
        self.takes_no_orders = False
        self._probes = Probes(self)
        self._clones = CloneSource(self)
        self.receivers: dict[tuple[str, int], Receiver] = {}
        self.failed: deque[str] = deque(maxlen=64)
        self.dirty_reason = ""
        self.ready = self.is_known = False
        self.is_of_another_pool = False
        self.refusing = ""
        self.order = (0, 0)
        self.asleep: Sleep | None = None
        #: Whether it sleeps, or slept, at level 2, and no base has loaded since.
        self.base_discarded = False
        self.sleep = SimSleep(self)
        self.drain = SimDrain(self)
        # Looked at now and then, since a heartbeat does not wait for the engine.
        self.memory: tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]] = ((), (), ())
        self.pins_told: tuple[int, ...] = ()
        self.pins: tuple[int, ...] = ()
        self.generation = self.last_epoch = 0
        self._switching: deque[Future] = deque()
        self.spawn(SimRegistration(self).stay())
        self.spawn(self._look_after_memory())

    def crash(self) -> None:
        """End it at once."""
        self.worker.crash()
        self.engine.crash()
        super().crash()

    @property
    def vector(self) -> VersionVector:
        """Versions that it serves."""
        return self._vector

    @vector.setter
    def vector(self, vector: VersionVector) -> None:
        self._vector = dataclasses.replace(vector, revision=self._vector.revision + 1)

    # -- what the engine does ------------------------------------------------------

    def ask_engine(self, what: str, seconds: float = 0.0) -> Generator[Any, Any, None]:
        """Have the engine do something that takes so long, or longer where it hangs."""
        call = object()
        self._owed[call] = what, self.clock.now
        if self.hangs_next[0] == what:
            self.engine.freeze(self.hangs_next[1])
            self.world.trace(self.engine.name, f"hangs for {self.hangs_next[1]} s at: {what}")
            self.hangs_next = ("", 0.0)
        yield self.engine.spawn(self._do(seconds))
        del self._owed[call]
        self._seen_at = self.clock.now

    def _do(self, seconds: float) -> Generator[Any, Any, None]:
        while seconds > 0:
            yield min(seconds, PROGRESS_SECONDS)
            seconds -= PROGRESS_SECONDS
            self._seen_at = self.clock.now

    def work(self) -> ReplicaWork | None:
        """What it says that it is at."""
        if not self._owed:
            return None
        what, begun_at = min(self._owed.values(), key=lambda owed: owed[1])
        return ReplicaWork(what, self.clock.now - max(begun_at, self._seen_at))

    def owes_for(self) -> float:
        """How long the engine has owed an answer, and hung, by now."""
        begun = [begun_at for _, begun_at in self._owed.values()]
        return min(self.engine.frozen_for(), self.clock.now - min(begun)) if begun else 0.0

    def _look_at_memory(self) -> None:
        bases = tuple(dict.fromkeys(base.version.version for base in self.store.bases))
        former = (base.version.version for base in self.undo.former)
        undoable = tuple(number for number in dict.fromkeys(former) if number not in bases)
        self.memory = bases, self.store.transfer_ids(), undoable

    def _look_after_memory(self) -> Generator[Any, Any, None]:
        while True:
            yield _REAP_SECONDS
            if not self._switching:
                self.store.pin_bases(self.pins_told)
                self._look_at_memory()
                self.pins = self.pins_told

    def held(self) -> frozenset[HeldVersion]:
        """What it serves and retains, with its digests."""
        found = {base.version: base.digest for base in (*self.undo.former, *self.store.bases)}
        served = PolicyVersion(BASE_POLICY, self.vector.base)
        for version, digest in self.served.items():
            if version.policy != BASE_POLICY or (version == served and not self.dirty_reason):
                found[version] = digest
        return frozenset(HeldVersion(version, digest.value) for version, digest in found.items())

    def obey(self, generation: int, number: int, order: OutOfService | None) -> None:
        """Refuse requests, or take them again, unless a newer order was heard."""
        if (generation, number) >= self.order:
            self.order = generation, number
            self.refusing = order.refusal if order else ""

    # -- orders ----------------------------------------------------------------

    def serve(self, method: str, args: dict[str, Any], timeout: float) -> tuple[Future, Any]:
        """Take a call from the network, as one that may be late or repeated."""
        future = Future()
        if method == "describe":
            held = self.store.held(args["version"]) is not None
            future.set(held, None if held else NotFoundError("no copy of it is held here"))
            return future, None
        if method == "facts":
            self._facts(args["version"], args["digest"], future)
            return future, None
        if args["generation"] < self.generation:
            future.set(error=StaleEpochError("an older coordinator"))
            return future, None
        order = args["order"]
        to_switch = isinstance(order, effects.CallCommit | effects.CallSwitch)
        if to_switch and order.incarnation != self.incarnation:
            future.set(error=StaleEpochError("another process of it is meant"))
            return future, None
        match order:
            case effects.CallJoin():
                self._hear_epoch(order.group)
                self.spawn(self._take_order_to_join(order, future))
            case effects.CallSend():
                self._hear_epoch(order.group)
                self._clones.send(order, future)
            case effects.CallLoad():
                self.spawn(self._load_in_place(order, future))
            case effects.CallDiscard():
                future = self.spawn(self._discard(order.transfer_id))
            case effects.CallRefuse():
                if order.incarnation != self.incarnation:
                    future.set(error=StaleEpochError("another process of it is meant"))
                    return future, None
                self.obey(args["generation"], order.order_number, order.out_of_service)
                future.set((self.refusing, self.order[1]))
            case effects.CallSleep() | effects.CallWake():
                if order.incarnation != self.incarnation:
                    future.set(error=StaleEpochError("another process of it is meant"))
                    return future, None
                future = self.spawn(self.sleep.carry_out(order))
            case effects.CallRetire():
                future = self.spawn(self._drop(order))
            case effects.CallCommit():
                future = self.spawn(self.in_turn(self._commit(order)))
            case effects.CallSwitch():
                future = self.spawn(self.in_turn(self._switch(order)))
        return future, None

    def _facts(self, version: PolicyVersion, digest: bytes, answer: Future) -> None:
        held = HeldVersion(version, digest) in self.held()
        adapter = None if version.policy == BASE_POLICY else SPEC
        layout = layout_of(version.policy)
        content = ContentDigest(WSUM64, digest, layout.total_bytes)
        facts = RecordedFacts(content, layout.digest, adapter)
        answer.set(facts if held else None, None if held else NotFoundError("not held here"))

    def _drop_mistaken(self, mistaken: tuple[HeldVersion, ...]) -> None:
        for held in mistaken:
            if held in self.held() and self.vector.holds(held.version):
                self.world.trace(self.name, f"drops {held.version}, which is mistaken")
                self.vector = self.vector.without_adapter(held.version)
                self.served.pop(held.version, None)
                self.store.adapters.pop(held.version, None)

    def _take_order_to_join(
        self, order: effects.CallJoin, answer: Future
    ) -> Generator[Any, Any, None]:
        yield from self.ask_engine("join")
        while self.takes_no_orders and (left := self.worker.frozen_until - self.clock.now) > 0:
            yield left
        if order.group.is_probe:
            self._probes.answer(order.group)
        else:
            self._join(order.group, order.first_rank)
        answer.set(True)

    def _join(self, group: Group, first_rank: int) -> None:
        for index in range(self.kind.num_receivers):
            old = self.receivers.get((group.trainer_id, index))
            if old is not None:
                if old.group.group_id == group.group_id or old.group.epoch > group.epoch:
                    continue
                old.leave()
            receiver = Receiver(self, group, first_rank + index, index, old)
            self.receivers[group.trainer_id, index] = receiver

    def _hear_epoch(self, group: Group) -> None:
        self.last_epoch = max(self.last_epoch, group.epoch)

    def _load_in_place(self, order: effects.CallLoad, answer: Future) -> Generator[Any, Any, None]:
        yield from self.ask_engine("pause")
        try:
            self.in_place.order(order)
            self._wake_weights()
            answer.set(True)
        except NotReadyError as error:
            answer.set(error=error)

    def _drop(self, order: effects.CallRetire) -> Generator[Any, Any, VersionVector]:
        yield from self.ask_engine("retire")
        self._drop_mistaken(order.mistaken_versions)
        self._retire(order.versions, order.ended_policies)
        return self.vector

    def _retire(self, versions: tuple[PolicyVersion, ...], ended: tuple[str, ...]) -> None:
        for version in versions:
            entry = self.vector.adapters.get(version.policy, AdapterVersions())
            is_free = entry.alias != version.version or version.policy in ended
            if is_free and version.policy != BASE_POLICY:
                self.world.checks.retiring(self, version)
                self.vector = self.vector.without_adapter(version)
                self.served.pop(version, None)
                self.store.adapters.pop(version, None)

    # -- switching: one at a time -------------------------------------------------

    def in_turn(self, work: Generator[Any, Any, None]) -> Generator[Any, Any, Any]:
        """Carry out an order once those before it are."""
        mine = Future()
        self._switching.append(mine)
        if self._switching[0] is not mine:
            yield mine
        try:
            yield from work
        except WeftError as error:
            error.metadata["incarnation"] = self.incarnation
            raise
        finally:
            self._switching.popleft()
            if self._switching and self.alive:
                self._switching[0].set()
        return self.vector, self.memory[0], self.memory[2]

    def discard_weights(self) -> None:
        """As it sleeps at level 2."""
        self.base_discarded = True
        if self.kind.in_place:  # its copy is what the engine served
            self.store.bases.clear()
            self.undo.clear()
            self._look_at_memory()

    def load_own_base(self) -> None:
        """From a copy of its own, or from its files; else it is dirty."""
        base = PolicyVersion(BASE_POLICY, self.vector.base)
        if base.version and self.store.held(base) is None:
            self.dirty_reason = "its weights were discarded as it slept"
        self.base_discarded = False

    def _wake_weights(self) -> None:
        if self.asleep is not None:
            self.asleep = dataclasses.replace(self.asleep, weights_awake=True)

    def _discard(self, transfer_id: str) -> Generator[Any, Any, Any]:
        def drop() -> Generator[Any, Any, None]:
            yield from self.ask_engine("discard")
            yield 0.0
            self.store.discard(transfer_id)
            self.in_place.discard(transfer_id)

        yield from self.in_turn(drop())
        return self.incarnation, self.vector

    def _commit(self, call: effects.CallCommit) -> Generator[Any, Any, None]:
        version = call.version
        if self._serves(version, call.content_digest):
            self.store.discard(call.transfer_id)
            return
        if call.transfer_id in self.failed:
            raise NotReadyError(f"{call.transfer_id} failed to load here before")
        copies = self.store.all_staged(call.transfer_id)
        if copies is None:
            raise NotReadyError(f"nothing is staged for {call.transfer_id}")
        if any(copy.digest != call.content_digest for copy in copies):
            raise DigestMismatchError("other bytes are staged")
        refusal = self.world.refusal(version)
        if refusal is not None:
            self.failed.append(call.transfer_id)
            raise refusal
        yield from self._load(call.transfer_id)
        yield from self.ask_engine("switch")
        held = self.vector.adapters.get(version.policy, AdapterVersions()).versions
        alias = call.alias if call.alias in held else version.version
        is_late = self._is_late(call.transfer_id)
        made = copies[0]
        if self.kind.in_place and made.delta_from:
            made = self.undo.apply(made)
        self.world.checks.loaded(self, made, alias, is_late=is_late)
        if version.policy == BASE_POLICY:
            self._serve_base(made, is_late=is_late)
        else:
            self.store.keep(copies[0])
            self.vector = self.vector.with_adapter(version, alias)
            self.served[version] = copies[0].digest
        self.world.trace(self.name, f"serves {version}")

    def _switch(self, call: effects.CallSwitch) -> Generator[Any, Any, None]:
        version = call.version
        held = self.store.held(version)
        is_late = self._is_late(call.transfer_id)
        if version.policy != BASE_POLICY:
            if not self.vector.holds(version):
                raise NotReadyError(f"{version} is not served here", reason="NOT_RETAINED")
            yield from self.ask_engine("switch")
            is_late = self._is_late(call.transfer_id)
            self.world.checks.standing_for(self, version, is_late=is_late)
            self.vector = self.vector.with_adapter(version)
            self.world.trace(self.name, f"serves {version} by its name")
        elif not self._serves(version):
            former = None if held else self.undo.find(version)
            if held is None and former is None:
                raise NotReadyError(f"no copy of {version} is held here", reason="NOT_RETAINED")
            yield from self._load("")
            is_late = self._is_late(call.transfer_id)
            if former is not None:
                if former not in self.undo.former:  # what was to be loaded in place came between
                    raise NotReadyError(f"{version} cannot be gone back to", reason="NOT_RETAINED")
                held = self.undo.take_back(former)
                self.store.bases = [held]
            assert held is not None
            self.world.checks.loaded(self, held, version.version, is_late=is_late)
            self._serve_base(held, is_late=is_late)
            self.world.trace(self.name, f"serves {version} again")

    def _is_late(self, transfer_id: str) -> bool:
        """Whether nobody waits for an order any more: its coordinator has died, or gave
        this replica up."""
        transfers = self.world.coordinator.state.transfers
        restore = switch_id(transfer_id, self.name)
        transfer = transfers.get(transfer_id) or transfers.get(restore)
        return transfer is None or self.name not in transfer.switching

    def _load(self, transfer_id: str) -> Generator[Any, Any, None]:
        self._wake_weights()
        outcome = self.world.load_outcome()
        yield from self.ask_engine("load", self.world.random.uniform(0.001, outcome.seconds))
        if not outcome.failure:
            return
        if transfer_id:
            self.failed.append(transfer_id)
        if outcome.failure == "clean":
            raise LoadFailedError("the engine said no", metadata={"dirty": "false"})
        self.dirty_reason = "the engine broke"
        if self.kind.in_place and self.world.sends_deltas:  # there is nothing to read back
            self.store.bases.clear()
            self.undo.clear()
        raise LoadFailedError(self.dirty_reason, metadata={"dirty": "true"})

    def _serve_base(self, copy: Copy, *, is_late: bool) -> None:
        self.served.pop(PolicyVersion(BASE_POLICY, self.vector.base), None)
        self.vector = self.vector.with_base(copy.version.version)
        self.dirty_reason, self.base_discarded = "", False
        self.in_place.discard(copy.transfer_id)  # it is loaded
        before = self.store.bases
        self.store.keep(copy)
        if self.kind.in_place and copy.delta_from:  # it was changed where it lay
            self.store.bases, before = self.store.bases[:1], []
        self.served[copy.version] = copy.digest
        for base in before:
            if base not in self.store.bases:
                self.world.checks.dropping(self, base.version, is_late=is_late)
        self._look_at_memory()

    def _serves(self, version: PolicyVersion, digest: ContentDigest | None = None) -> bool:
        if not self.vector.holds(version):
            return False
        is_other = digest is not None and self.served.get(version, digest) != digest
        if version.policy == BASE_POLICY:
            return not self.dirty_reason and not is_other and not self.base_discarded
        if is_other:
            raise DigestMismatchError(f"{version} is served with other bytes")
        return True

    def stands_for(self, version: PolicyVersion) -> bool:
        """Whether the base, or an adapter's bare name, is that version here."""
        if version.policy == BASE_POLICY:
            return self._serves(version)
        return self.vector.adapters.get(version.policy, AdapterVersions()).alias == version.version
