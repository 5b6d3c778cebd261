"""One pool with its faults, from one seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.sim.catalog import CatalogModel
from tests.sim.checks import Checks, Violation
from tests.sim.clock import Clock, Future, Process
from tests.sim.coordinator import SimCoordinator
from tests.sim.faults import Faults
from tests.sim.network import Network, Stream
from tests.sim.replica import SimReplica
from tests.sim.trainer import Push, SimTrainer
from weft.contract.errors import PeerUnavailableError, PolicyOwnedError, WeftError
from weft.coordinator.state import Group, Settings

POLICIES = ["base", "math", "code"]


@dataclass(frozen=True)
class Outcome:
    """What an engine makes of a load: ``failure`` is "", "clean" or "dirty"."""

    failure: str
    seconds: float


class Broadcast:
    """The bytes of one transfer on their way."""

    def __init__(self, sender: str) -> None:
        self.sender = sender
        self.content = Future()


class World:
    """Everything that a seed decides.

    Args:
        seed: Of the one random generator.
        trace: Prints a line for each thing that happens.
    """

    def __init__(self, seed: int, *, trace: Callable[[str], object] | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.clock = Clock()
        self._trace = trace
        self.tracing = trace is not None
        self.settings = Settings(
            lease_seconds=4.0,
            heartbeat_seconds=1.0,
            lost_after_seconds=3.0,
            retain=self.random.choice([1, 2, 3]),
            retire_retry_seconds=1.0,
        )
        self.commit_seconds = 6.0
        self.numbers = itertools.count(1)
        self.network = Network(self.clock, self.random)
        self.catalog = CatalogModel()
        self.checks = Checks(self)
        self.broadcasts: dict[str, Broadcast] = {}
        self.corruption = self.clean_failure = self.dirty_failure = self.slow_disk = 0.0
        self.quiet = False
        self.coordinator: SimCoordinator
        self.replicas: dict[str, SimReplica] = {}
        self.trainers: dict[str, SimTrainer] = {}
        self.start_coordinator()
        for i in range(self.random.choice([1, 2, 2, 3, 3, 4])):
            self.start_replica(f"r{i}", self.random.choice([1, 1, 2]))
        for i in range(self.random.choice([1, 2, 2, 3])):
            wanted = self.random.sample(POLICIES, self.random.choice([1, 2]))
            self.start_trainer(f"t{i}", sorted(wanted))
        self.faults = Faults(self)

    def trace(self, who: str, what: str) -> None:
        """Print a line, if wanted."""
        if self._trace is not None:
            self._trace(f"{self.clock.now - 100:9.4f} {who:12} {what}")

    # -- processes ---------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Start or restart it from its catalog."""
        self.coordinator = SimCoordinator(self, self.catalog.open(self.settings))
        self.network.processes["coordinator"] = self.coordinator

    def start_replica(self, name: str, num_receivers: int) -> None:
        """Start or restart one at the same address."""
        incarnation = f"i{next(self.numbers)}"
        self.replicas[name] = SimReplica(self, name, incarnation, num_receivers)
        self.network.processes[name] = self.replicas[name]

    def start_trainer(self, name: str, policies: list[str]) -> None:
        """Start or restart one, in a new session."""
        session = f"s{next(self.numbers)}"
        self.trainers[name] = SimTrainer(self, name, session, policies)
        self.network.processes[name] = self.trainers[name]

    def crash(self, process: Process) -> None:
        """End a process; the data connections of its transfers break."""
        self.trace(process.name, "crashes")
        process.crash()
        gone = PeerUnavailableError("a connection of the side group broke")
        for trainer in self.trainers.values():
            sender = trainer.sender
            if sender and sender.usable and isinstance(process, SimReplica):
                members = {member.replica_id for member in sender.group.members}
                if process.name in members and self.random.random() < 0.5:
                    self.clock.after(self.network.delay(), sender.fail, gone)
        for broadcast in self.broadcasts.values():
            if broadcast.sender == process.name and self.random.random() < 0.7:
                self.clock.after(self.network.delay(), broadcast.content.set, None, gone)

    def broadcast(self, transfer_id: str, sender: str) -> Broadcast:
        """The bytes of a transfer."""
        while len(self.broadcasts) > 8:
            del self.broadcasts[next(iter(self.broadcasts))]
        return self.broadcasts.setdefault(transfer_id, Broadcast(sender))

    def attend(
        self,
        client: Process,
        group: Group,
        rank: int,
        on_message: Callable[[tuple[Any, ...]], object],
        on_closed: Callable[[WeftError], object],
    ) -> Stream:
        """Open a rank's stream to the coordinator."""
        server = self.coordinator
        stream = Stream(self.network, client, server, on_message, on_closed)
        if not server.alive or not self.network.connected(client.name, server.name):
            stream.break_off(slow=server.alive)
            return stream

        def hello() -> None:
            if not stream.broken and server.alive:
                server.rooms.attend(stream, group.group_id, group.token, rank)

        self.clock.after(self.network.delay(), hello)
        return stream

    def disk_delay(self) -> float:
        """How long a transaction takes."""
        if self.slow_disk and self.random.random() < self.slow_disk:
            return self.random.uniform(0.05, 2.0)
        return self.random.uniform(0.0005, 0.004)

    def load_outcome(self) -> Outcome:
        """What an engine makes of a load."""
        roll, slow = self.random.random(), 0.05
        if self.faults.on and self.random.random() < 0.05:
            slow = 4.0
        if roll < self.dirty_failure:
            return Outcome("dirty", slow)
        return Outcome("clean" if roll < self.dirty_failure + self.clean_failure else "", slow)

    # -- a run ---------------------------------------------------------------------

    def run(self) -> None:
        """Faults, then peace, then pushes that must succeed.

        Raises:
            Violation: Something that must be true is not.
        """
        try:
            self._run()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def _run(self) -> None:
        self.clock.run_until(self.clock.now + self.random.uniform(10.0, 60.0))
        self.quiet = True
        self.trace("world", "faults stop")
        self.faults.stop()
        # The longest push, a commit's answer, a lost replica, an expired lease.
        self.clock.run_until(self.clock.now + 20.0)
        self.faults.repair_replicas()
        self.clock.run_until(self.clock.now + 5.0)
        self.checks.settled()
        for policy in POLICIES:
            self._push_must_succeed(policy)
        self.clock.run_until(self.clock.now + 4.0)
        self.checks.settled()
        self.checks.agreed()

    def _push_must_succeed(self, policy: str) -> None:
        if not any(policy in trainer.policies for trainer in self.trainers.values()):
            self.start_trainer(f"last-{policy}", [policy])
        errors = []
        for trainer in list(self.trainers.values()):
            if policy not in trainer.policies:
                continue
            push = self._finish(trainer, trainer.push(policy, 10.0))
            if push.error is None:
                return
            errors.append(f"{trainer.name}: {push.error!r}")
            if not isinstance(push.error, PolicyOwnedError):
                break
        raise Violation(f"a push of {policy} failed though nothing is wrong: {errors}")

    def _finish(self, trainer: SimTrainer, steps: Generator[Any, Any, Push]) -> Push:
        push = trainer.spawn(steps)
        end = self.clock.now + 12.0
        while not push.done and self.clock.now < end:
            self.clock.run_until(self.clock.now + 0.5)
        if not push.done:
            raise Violation("a push did not end by its deadline and slack")
        result: Push = push.value
        return result
