"""The coordinator's process around the real ``step``: a model of its driver.

A batch is decided, its saves reach the catalog after the disk's delay, and only
then is anything done about it; a crash on the way loses what was not saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future, Process
from tests.sim.data import LAYOUTS
from tests.sim.live_groups import LiveGroups
from tests.sim.services import Services, describe
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.transfer import TransferIds
from weft_rl.coordinator.decisions.state.values import (
    Failure,
    VersionRecord,
)
from weft_rl.coordinator.decisions.step import step

if TYPE_CHECKING:
    from tests.sim.world import World

TICK_SECONDS = 0.25
_CALL_SECONDS = {"join": 10.0, "load": 30.0, "discard": 5.0, "retire": 10.0, "refuse": 5.0}
_DESCRIBE_SECONDS = 10.0
_Switch = effects.CallCommit | effects.CallSwitch


class SimCoordinator(Process):
    """One generation of it."""

    def __init__(self, world: World, state: PoolState) -> None:
        super().__init__(world.clock, "coordinator")
        self.world = world
        self.state = state
        self.groups = LiveGroups(self.post, world)
        self._services = Services(self)
        self.calls: dict[int, Future] = {}
        self.calls_since: dict[int, float] = {}
        self._describing: set[int] = set()
        self.started_at = self.clock.now
        self.manifests: set[bytes] = set()
        self.num_calls_out = 0
        self._queue: list[events.Event] = []
        self._lazy: list[effects.Save] = []
        self._saving: list[effects.Save] = []
        self._busy = False
        self._tickets = itertools.count(1)
        self.spawn(self._tick())

    def _tick(self) -> Any:
        while True:
            for heard in self.groups.take_progress():
                self.post(heard)
            self.post(events.Tick())
            yield TICK_SECONDS

    def crash(self) -> None:
        """End it; a transaction under way may or may not be on disk."""
        if self.alive and self._saving and self.world.random.random() < 0.5:
            self._apply(self._saving)
        super().crash()

    # -- deciding ------------------------------------------------------------

    def post(self, event: events.Event) -> None:
        """Let an event be decided."""
        self._queue.append(event)
        if not self._busy and self.alive:
            self._busy = True
            self.clock.after(0.0, self._decide)

    def _decide(self) -> None:
        if not self.alive:
            return
        batch, self._queue = self._queue, []
        todo: list[effects.Effect] = []
        state, flush = self.state, False
        for event in batch:
            flush = flush or isinstance(event, events.Tick)
            before = state
            state, more = step(state, event, self.clock.now)
            self.world.checks.stepped(before, event, state, more)
            todo += more
        saves = [effect for effect in todo if isinstance(effect, effects.Save)]
        if any(save.durable for save in saves) or (flush and (self._lazy or saves)):
            self._saving, self._lazy = [*self._lazy, *saves], []
            self.clock.after(self.world.disk_delay(), self._saved, state, todo)
        else:
            self._lazy += saves
            self._carry_out_all(state, todo)

    def _saved(self, state: PoolState, todo: list[effects.Effect]) -> None:
        if self.alive:
            self._apply(self._saving)
            self._saving = []
            self._carry_out_all(state, todo)

    def _apply(self, saves: list[effects.Save]) -> None:
        self.world.checks.saving(saves)
        self.world.catalog.apply(saves)
        self.world.checks.saved()

    def _carry_out_all(self, state: PoolState, todo: list[effects.Effect]) -> None:
        self.state = state
        for effect in todo:
            if not isinstance(effect, effects.Save):
                self._carry_out(effect)
        self._busy = bool(self._queue)
        if self._busy:
            self.clock.after(0.0, self._decide)

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Reply(ticket=ticket, answer=answer):
                self._answer(ticket, answer, None)
            case effects.Refuse(ticket=ticket, error=error):
                self._answer(ticket, None, error)
            case effects.CheckFit(key=key):
                self.post(events.FitChecked(key, None))
            case effects.CallJoin() | effects.CallSend():
                self._call(
                    "join",
                    effect,
                    lambda v, f: events.JoinAnswered(effect.transfer_id, effect.replica_id, f),
                )
            case effects.CallLoad():
                self._call(
                    "load",
                    effect,
                    lambda v, f: events.LoadAnswered(effect.transfer_id, effect.replica_id, f),
                )
            case effects.CallCommit() | effects.CallSwitch():
                self._call("switch", effect, lambda v, f: self._has_switched(effect, v, f))
            case effects.CallDiscard():
                self._call(
                    "discard",
                    effect,
                    lambda v, f: (
                        None
                        if f
                        else events.DiscardAnswered(effect.replica_id, effect.transfer_id, *v)
                    ),
                )
            case effects.CallRefuse():
                self._call(
                    "refuse",
                    effect,
                    lambda v, f: (
                        None
                        if f
                        else events.RefuseAnswered(effect.replica_id, effect.incarnation, *v)
                    ),
                )
            case effects.CallSleep():
                self._call(
                    "sleep",
                    effect,
                    lambda v, f: events.SleepAnswered(effect.replica_id, effect.incarnation, v, f),
                )
            case effects.CallWake():
                self._call(
                    "wake",
                    effect,
                    lambda v, f: events.WakeAnswered(
                        effect.replica_id, effect.incarnation, f, v or ""
                    ),
                )
            case effects.CallRetire():
                self._call("retire", effect, lambda v, f: self._retire_answered(effect, v, f))
            case effects.LookUp():
                self.spawn(self._look_up(effect))
            case effects.DescribeVersion():
                self.spawn(self._describe_held(effect))
            case effects.Announce(kind=kind, subject=subject, message=message):
                self.world.trace("coordinator", f"{kind} {subject}: {message}")
            case _:
                if isinstance(effect, effects.OpenGroup):
                    self.world.checks.group_opened(effect.group)
                self.groups.carry_out(effect)

    def _answer(self, ticket: int, answer: Any, error: WeftError | None) -> None:
        future = self.calls.pop(ticket, None)
        self.calls_since.pop(ticket, None)
        if ticket in self._describing and answer is not None:
            answer = describe(self.state)
        self._describing.discard(ticket)
        if future is not None:
            if isinstance(answer, effects.LeaseAnswer):
                self.world.checks.leases.told(answer)
            elif isinstance(answer, effects.SleepAnswer):
                self.world.checks.sleeps.told(self.state, answer)
            elif error is not None:
                self.world.checks.leases.refused(ticket, error)
            future.set(answer, error)

    # -- calls to replicas -----------------------------------------------------

    def _call(
        self,
        method: str,
        effect: effects.ReplicaCall,
        event_of: Callable[[Any, Failure | None], events.Event | None],
    ) -> None:
        seconds = _CALL_SECONDS.get(method, self.world.commit_seconds)
        self.num_calls_out += 1
        future = self.world.network.call(
            self, effect.address, method, seconds, order=effect, generation=self.state.generation
        )

        def answered(done: Future) -> None:
            if not self.alive:
                return
            self.num_calls_out -= 1
            failure = None
            if done.error is not None:
                reason = done.error.reason
                reason = "PEER_GONE" if reason == "COORDINATOR_AWAY" else reason
                failure = Failure(reason, done.error.message, done.error.metadata)
            event = event_of(done.value, failure)
            if event is not None:
                self.post(event)

        future.then(answered)

    def _has_switched(self, call: _Switch, answer: Any, failure: Failure | None) -> events.Event:
        vector, retained, undoable = answer or (None, (), ())
        return events.CommitAnswered(
            call.transfer_id,
            call.replica_id,
            call.incarnation,
            vector,
            0.1,
            failure,
            retained,
            undoable=undoable,
        )

    def _look_up(self, effect: effects.LookUp) -> Any:
        record = self.world.catalog.find_version(effect.version)
        layout = LAYOUTS[record.layout_digest] if record else None
        failure = None
        # One that restores a version itself may hold what takes it back to it, and no copy to show.
        is_sent = effect.source_id != effect.replica_id
        if layout is not None and layout.digest not in self.manifests and is_sent:
            try:
                yield self.world.network.call(
                    self,
                    effect.source_address,
                    "describe",
                    _DESCRIBE_SECONDS,
                    version=effect.version,
                )
                self.manifests.add(layout.digest)
            except WeftError as error:
                layout, failure = None, Failure.of(error)
        self.post(
            events.LookedUp(
                replica_id=effect.replica_id,
                incarnation=effect.incarnation,
                source_id=effect.source_id,
                version=effect.version,
                ids=self.new_transfer_ids(),
                record=record,
                layout=layout,
                failure=failure,
            )
        )

    def _describe_held(self, effect: effects.DescribeVersion) -> Any:
        facts, failure = None, None
        self.num_calls_out += 1
        try:
            facts = yield self.world.network.call(
                self,
                effect.address,
                "facts",
                _DESCRIBE_SECONDS,
                version=effect.version,
                digest=effect.digest,
            )
        except WeftError as error:
            failure = Failure.of(error)
        self.num_calls_out -= 1
        self.post(
            events.VersionDescribed(
                replica_id=effect.replica_id,
                incarnation=effect.incarnation,
                version=effect.version,
                digest=effect.digest,
                facts=facts,
                failure=failure,
                recorded=self.world.catalog.find_version(effect.version),
            )
        )

    def new_transfer_ids(self) -> TransferIds:
        """Names of a new transfer and group; never the same twice."""
        number = next(self.world.numbers)
        return TransferIds(f"t{number}", number, f"g{number}", f"token{number}", f"secret{number}")

    def _retire_answered(
        self, call: effects.CallRetire, vector: Any, failure: Failure | None
    ) -> events.Event | None:
        if failure is not None:
            return None
        return events.RetireAnswered(call.replica_id, call.incarnation, vector)

    # -- calls from trainers and replicas --------------------------------------

    def serve(self, method: str, args: dict[str, Any], timeout: float) -> tuple[Future, Any]:
        """Take a call from the network; the event that it becomes is posted at once."""
        future, ticket = Future(), next(self._tickets)
        try:
            event = self._services.event(method, ticket, timeout, **args)
        except WeftError as error:
            future.set(error=error)
            return future, None
        if event is None:
            future.set(effects.EmptyAnswer())
            return future, None
        self.calls[ticket] = future
        self.calls_since[ticket] = self.clock.now
        if method == "describe":
            self._describing.add(ticket)
        self.post(event)

        def gone() -> None:
            if self.alive and self.calls.pop(ticket, None) is not None:
                self.calls_since.pop(ticket, None)
                self.post(events.CallerGone(ticket))

        return future, gone

    def flushed(self, version: PolicyVersion) -> VersionRecord | None:
        """A record, once what may be written late is written."""
        if self._lazy:
            saves, self._lazy = self._lazy, []
            self._apply(saves)
        return self.world.catalog.find_version(version)
