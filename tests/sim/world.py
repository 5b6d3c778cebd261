"""One pool with its faults, from one seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.sim import peace
from tests.sim.catalog import CatalogModel
from tests.sim.checks import Checks
from tests.sim.clock import Clock, Process
from tests.sim.coordinator import SimCoordinator
from tests.sim.data import Data
from tests.sim.faults import Faults
from tests.sim.lease_checks import Violation
from tests.sim.loss_checks import unrecorded
from tests.sim.network import Network, Stream
from tests.sim.operator import SimOperator
from tests.sim.replica import Kind, SimReplica
from tests.sim.trainer import Push, SimTrainer
from weft_rl.containers import replace
from weft_rl.contract.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidNameError,
    NotReadyError,
    PeerUnavailableError,
    PolicyOwnedError,
    WeftError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.pool import PoolSettings
from weft_rl.coordinator.decisions.state.transfer import Group

POLICIES = ["base", "math", "code"]


@dataclass(frozen=True)
class Outcome:
    """What an engine makes of a load: ``failure`` is "", "clean" or "dirty"."""

    failure: str
    seconds: float


#: Transfers whose data is remembered.
_MAX_DATA = 32


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
        self.settings = PoolSettings(
            lease_seconds=4.0,
            heartbeat_seconds=1.0,
            lost_after_seconds=3.0,
            retain_versions=self.random.choice([1, 2, 3]),
            retire_retry_seconds=1.0,
            clone_seconds=self.random.choice([6.0, 40.0]),
            stall_seconds=3.0,
            sender_stall_seconds=6.0,
            clone_patience_seconds=self.random.choice([1.0, 5.0, 20.0]),
        )
        self.commit_seconds = 6.0
        self.numbers = itertools.count(1)
        self.network = Network(self.clock, self.random)
        self.catalog = CatalogModel()
        self.checks = Checks(self)
        self.data: dict[tuple[str, str, int], Data] = {}
        self.corruption = self.clean_failure = self.dirty_failure = self.slow_disk = 0.0
        self.refusals = 0.0
        # By a generator of their own: a seed without them is the run that it always was.
        self.deltas = Random(f"deltas of {seed}")
        #: Where some replicas can take a delta and others cannot.
        self.mixed = Random(f"mixed of {seed}")
        links = Random(f"links of {seed}")
        #: By who sent, members whose link was slow; and what chooses them, where some are.
        self.slow_links: set[tuple[str, str]] = set()
        self.links = links if links.random() < 0.3 else None
        self.sends_deltas, self.delta_failure = self.deltas.random() < 0.5, 0.0
        undo = Random(f"undo of {seed}")
        #: Whether all replicas load in place, and the operator takes deltas back there.
        self.goes_back = self.sends_deltas and undo.random() < 0.4
        self._refused_by_all: dict[PolicyVersion, bool] = {}
        self.quiet = False
        self.coordinator: SimCoordinator
        self.replicas: dict[str, SimReplica] = {}
        self.trainers: dict[str, SimTrainer] = {}
        self.start_coordinator()
        base_copies = self.random.choice([0, 1, 1, 2, 2, 3])
        #: Whether some replicas can take deltas and others cannot, more often than by chance.
        are_unlike = self.sends_deltas and not self.goes_back and self.mixed.random() < 0.4
        in_place = max(self.random.choice([0.0, 0.0, 0.7, 1.0]), float(self.goes_back))
        for i in range(self.random.choice([1, 2, 2, 3, 3, 4])):
            unlike = self.random.random() < 0.1
            retain = self.random.choice([0, 1, 2]) if unlike else base_copies
            if self.random.random() < in_place:
                is_read_back = self.random.choice([0, 1]) or self.goes_back
                kind = Kind(1, int(is_read_back), in_place=True)
            else:
                kind = Kind(self.random.choice([1, 1, 2]), retain)
            if are_unlike:
                kind = replace(kind, base_copies=self.mixed.choice([0, 1]))
            self.start_replica(f"r{i}", kind)
        for i in range(self.random.choice([1, 2, 2, 3])):
            wanted = self.random.sample(POLICIES, self.random.choice([1, 2]))
            if self.goes_back and i == 0:
                wanted = [BASE_POLICY, *wanted[1:]]
            self.start_trainer(f"t{i}", sorted({*wanted}))
        self.operator = SimOperator(self)
        self.network.processes["operator"] = self.operator
        self.faults = Faults(self)

    def trace(self, who: str, what: str) -> None:
        """Print a line, if wanted."""
        if self._trace is not None:
            self._trace(f"{self.clock.now - 100:9.4f} {who:12} {what}")

    # -- processes ---------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Start or restart it from its catalog."""
        coordinator_id = f"c{next(self.numbers)}"
        state = self.catalog.open(self.settings, coordinator_id, self.clock.now)
        self.checks.leases.coordinator_started()
        self.coordinator = SimCoordinator(self, state)
        self.network.processes["coordinator"] = self.coordinator

    def start_replica(self, name: str, kind: Kind) -> None:
        """Start or restart one at the same address."""
        incarnation = f"i{next(self.numbers)}"
        self.replicas[name] = SimReplica(self, name, incarnation, kind)
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
        for data in self.data.values():
            members = {data.sender, *(member.replica_id for member in data.group.members)}
            if process.name in members and self.random.random() < 0.6:
                self.clock.after(self.network.delay(), data.break_off, gone)

    def data_of(self, group: Group, transfer_id: str, sender: str, rank: int = 0) -> Data:
        """The bytes of a transfer in a sender's lane of a group."""
        while len(self.data) > _MAX_DATA:
            del self.data[next(iter(self.data))]
        key = group.group_id, transfer_id, rank
        if key not in self.data:
            self.data[key] = Data(group, sender)
        return self.data[key]

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
                server.groups.attend(stream, group.group_id, group.token_of(rank), rank)

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

    def refusal(self, version: PolicyVersion) -> WeftError | None:
        """Why a replica refuses to switch to what it has staged, with nothing changed; some
        versions are refused by all."""
        random, rate = self.random, self.refusals
        if not rate:
            return None
        if version not in self._refused_by_all:
            self._refused_by_all[version] = random.random() < rate
        if not self._refused_by_all[version] and random.random() >= rate / 3:
            return None
        kind = random.choice([NotReadyError, InvalidNameError, DigestMismatchError, CapacityError])
        return kind(f"{version} is not taken here")

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
        self.operator.spawn(self.operator.put_back())
        # The longest push, a commit's answer, a lost replica, an expired lease.
        workers = [p.worker for p in (*self.replicas.values(), *self.trainers.values())]
        workers += [replica.engine for replica in self.replicas.values()]
        workers += [rank for trainer in self.trainers.values() for rank in trainer.others]
        awake_at = max(worker.frozen_until for worker in workers)
        self.clock.run_until(max(self.clock.now, awake_at) + 10.0)
        # The longest pause between two attempts at a clone comes on top.
        questions = peace.left_over, peace.behind, peace.kept, peace.ended, unrecorded
        self._must_end(80.0, *questions)
        self.trace("world", "all is well")
        for policy in POLICIES:
            self._push_must_succeed(policy)
        self._must_end(
            20.0, peace.left_over, peace.behind, peace.kept, unrecorded, peace.disagreeing
        )

    def _must_end(self, seconds: float, *questions: Callable[[World], Iterator[str]]) -> None:
        """Wait until there is no complaint any more."""
        end = self.clock.now + seconds
        while True:
            self.faults.restart()
            self.clock.run_until(self.clock.now + 1.0)
            complaints = (text for ask in questions for text in ask(self))
            if self.clock.now >= end:
                found = list(complaints)
                if found:
                    raise Violation(f"after {seconds:.0f} s of peace: {'; '.join(found[:4])}")
                return
            if next(complaints, None) is None:
                return

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
            if trainer.is_of_another_pool:
                self.faults.restart()
                self._push_must_succeed(policy)
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
