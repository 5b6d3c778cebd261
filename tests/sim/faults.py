"""What goes wrong: kinds chosen by the seed, until told to stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.catalog import CatalogModel
from tests.sim.clock import Process

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica
    from tests.sim.world import World


#: What an engine may hang in.
_AT = ("join", "pause", "load", "load", "switch", "switch", "retire", "discard", "sleep", "wake")


class Faults:
    """Half of the kinds, at random times; what is broken heals again by itself."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.on = True
        random, network = world.random, world.network

        def maybe(rate: float) -> float:
            return random.uniform(0, rate) if random.random() < 0.4 else 0.0

        network.loss, network.repeat = maybe(0.05), maybe(0.1)
        network.slow = maybe(0.1)
        world.corruption = maybe(0.3)
        world.clean_failure, world.dirty_failure = maybe(0.3), maybe(0.2)
        world.slow_disk, world.refusals = maybe(0.2), maybe(0.4)
        deltas = world.deltas
        world.delta_failure = deltas.uniform(0, 0.4) if deltas.random() < 0.6 else 0.0
        self.was_slow, self.was_slow_disk = bool(network.slow), bool(world.slow_disk)
        kinds: list[Callable[[], None]] = [
            self._crash_replica,
            self._crash_trainer,
            self._crash_coordinator,
            self._cut,
            self._break_stream,
            self._freeze_trainer,
            self._freeze_replica,
            self._hang_worker,
            self._hang_trainer,
            self._crash_rank,
            self._hang_rank,
            self._leave,
        ]
        self._kinds = [kind for kind in kinds if random.random() < 0.4]
        self._backup = CatalogModel()
        if random.random() < 0.15:
            self._kinds.append(self._lose_catalog)
        self._mean_seconds = random.choice([1.0, 3.0, 8.0])
        self._next()
        # By a generator of their own: a seed without them is the run that it always was.
        self._engines = Random(f"engines of {world.seed}")
        if self._engines.random() < 0.4:
            self._hang_engine_later()

    def _next(self) -> None:
        if self.on and self._kinds:
            seconds = self.world.random.expovariate(1 / self._mean_seconds)
            self.world.clock.after(seconds, self._strike)

    def _strike(self) -> None:
        if self.on:
            self.world.random.choice(self._kinds)()
            self._next()

    def stop(self) -> None:
        """Heal everything and restart what is down; what is frozen thaws by itself."""
        self.on = False
        world = self.world
        for replica in world.replicas.values():
            replica.hangs_next = ("", 0.0)
        world.network.heal()
        world.network.loss = world.network.repeat = world.network.slow = 0.0
        world.corruption = world.clean_failure = world.dirty_failure = 0.0
        world.slow_disk = world.refusals = world.delta_failure = 0.0
        world.links = None
        self._restart_coordinator()
        self.restart()

    def restart(self) -> None:
        """Restart what is down, and what was of a lost catalog's pool and came back too late; what
        is dirty is for the pool to repair."""
        world = self.world
        for process in (*world.replicas.values(), *world.trainers.values()):
            if process.is_of_another_pool:
                world.checks.losses.of_another_pool(process.name)
                world.crash(process)
        for name in list(world.replicas):
            self._restart_replica(name)
        for name in list(world.trainers):
            self._restart_trainer(name)

    def _later(self, restart: Callable[[str], None], name: str) -> None:
        seconds = self.world.random.choice([0.05, 1.0, 5.0, 10.0])
        self.world.clock.after(seconds * self.world.random.uniform(0.5, 1.5), restart, name)

    def _crash_replica(self) -> None:
        replica = self.world.random.choice(list(self.world.replicas.values()))
        if replica.alive:
            self.world.crash(replica)
            self._later(self._restart_replica, replica.name)

    def _restart_replica(self, name: str) -> None:
        old = self.world.replicas[name]
        if not old.alive:
            self.world.trace(name, "restarts")
            self.world.start_replica(name, old.kind)

    def _crash_trainer(self) -> None:
        trainer = self.world.random.choice(list(self.world.trainers.values()))
        if trainer.alive:
            self.world.crash(trainer)
            self._later(self._restart_trainer, trainer.name)

    def _restart_trainer(self, name: str) -> None:
        old = self.world.trainers[name]
        if not old.alive:
            self.world.trace(name, "restarts")
            self.world.start_trainer(name, old.policies)

    def _crash_coordinator(self) -> None:
        if self.world.coordinator.alive:
            self.world.crash(self.world.coordinator)
            self._later(lambda _: self._restart_coordinator(), "")

    def _lose_catalog(self) -> None:
        """Keep a copy of it; or lose it, and start from the copy, or from nothing."""
        world = self.world
        if world.random.random() < 0.4:
            self._backup = world.catalog.copy()
            return
        self._crash_coordinator()
        if world.coordinator.alive:
            return
        restored = self._backup.copy() if world.random.random() < 0.5 else CatalogModel()
        # What was under way when the copy was made may have been committed since.
        known = {record.transfer_id: record.state for record in restored.versions.values()}
        lost = {
            record.transfer_id
            for record in world.catalog.versions.values()
            if known.get(record.transfer_id) is not record.state
        }
        world.trace("coordinator", f"has lost its catalog but {len(known)} versions")
        world.catalog = restored
        if not restored.pool_id:
            world.settings = dataclasses.replace(world.settings, recover=True)
        world.checks.catalog_lost(lost)

    def _restart_coordinator(self) -> None:
        if not self.world.coordinator.alive:
            self.world.trace("coordinator", "restarts")
            self.world.start_coordinator()

    def _cut(self) -> None:
        world = self.world
        ends = ["coordinator", *world.replicas, *world.trainers]
        a, b = world.random.sample(ends, 2)
        world.trace("network", f"cut between {a} and {b}")
        world.network.cut(a, b)

        def heal() -> None:
            world.network.cuts.discard(frozenset((a, b)))

        world.clock.after(world.random.choice([0.2, 2.0, 6.0]), heal)

    def _break_stream(self) -> None:
        streams = self.world.network.streams
        if streams:
            stream = self.world.random.choice(streams)
            self.world.trace("network", f"the stream of {stream.client.name} breaks")
            stream.break_off(slow=self.world.random.random() < 0.5)

    def _freeze_trainer(self) -> None:
        trainer = self.world.random.choice(list(self.world.trainers.values()))
        self._freeze(trainer, self.world.random.choice([1.0, 5.0, 9.0]))

    def _freeze_replica(self) -> None:
        replica = self.world.random.choice(list(self.world.replicas.values()))
        self._freeze(replica, self.world.random.choice([0.5, 2.0, 4.0]))

    def _freeze(self, process: Process, seconds: float) -> None:
        process.freeze(seconds)
        self.world.trace(process.name, f"freezes for {seconds} s")

    def _hang_worker(self) -> None:
        """Its process goes on beating."""
        replica = self.world.random.choice(list(self.world.replicas.values()))
        replica.takes_no_orders = self.world.random.random() < 0.3
        self._freeze(replica.worker, self.world.random.choice([1.0, 5.0, 20.0, 40.0]))

    def _hang_engine_later(self) -> None:
        self.world.clock.after(self._engines.expovariate(1 / 4.0), self._hang_engine)

    def _hang_engine(self) -> None:
        """As it does something, or at any time; its process, and what receives, go on."""
        if not self.on:
            return
        replica = self._engines.choice(list(self.world.replicas.values()))
        seconds = self._engines.choice([1.0, 5.0, 20.0, 40.0])
        if self._engines.random() < 0.8:
            replica.hangs_next = self._engines.choice(_AT), seconds
        else:
            self._freeze(replica.engine, seconds)
        self._hang_engine_later()

    def _hang_trainer(self) -> None:
        """It goes on renewing its leases."""
        trainer = self.world.random.choice(list(self.world.trainers.values()))
        self._freeze(trainer.worker, self.world.random.choice([5.0, 15.0, 40.0]))

    def _crash_rank(self) -> None:
        """Of a trainer's further ones: it comes back with the next push."""
        if alive := self._ranks():
            self.world.crash(self.world.random.choice(alive))

    def _hang_rank(self) -> None:
        if alive := self._ranks():
            seconds = self.world.random.choice([5.0, 15.0, 40.0])
            self._freeze(self.world.random.choice(alive), seconds)

    def _ranks(self) -> list[Process]:
        ranks = [rank for trainer in self.world.trainers.values() for rank in trainer.others]
        return [rank for rank in ranks if rank.alive]

    def _leave(self) -> None:
        replica = self.world.random.choice(list(self.world.replicas.values()))
        if replica.alive:
            self.leave(replica)

    def leave(self, replica: SimReplica) -> None:
        """A replica says goodbye and ends, as at a rolling update."""
        world = self.world
        world.trace(replica.name, "leaves")

        def leaving() -> Generator[Any, Any, None]:
            args = {"replica_id": replica.name, "incarnation": replica.incarnation}
            world.network.call(replica, "coordinator", "leave", 2.0, **args)
            yield world.random.uniform(0.0, 0.1)

        def end(_: object) -> None:
            if replica.alive:
                world.crash(replica)
                self._later(self._restart_replica, replica.name)

        replica.spawn(leaving()).then(end)
