"""A pool of real processes that is struck at random, and must be as before each time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tests.fault.matrix import PUSH_SECONDS, SLACK_SECONDS
from tests.fault.pool import REPLICAS, PoolProcesses
from tests.processes import is_running, members, title
from tests.strikes.checks import Watch, read_acknowledged
from tests.strikes.plan import COORDINATOR, RANKS, Strike, draw
from tests.strikes.trainers import Push, Trainer
from tests.waits import until
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.errors import WeftError
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: How long it may take from the last start of a process until all replicas are ready.
BACK_SECONDS = 40.0
_END_SECONDS = 20.0
_PUSHING_SECONDS = 5.0
_READY_SECONDS = 60.0
_ACKNOWLEDGED = "acknowledged"


class WrongError(Exception):
    """Violation of what a struck pool promises."""


@dataclass
class Report:
    """Outcome of a run."""

    strikes: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    num_pushes: int = 0
    """Pushes that every rank returned a version of."""
    failures: Counter[str] = field(default_factory=Counter)
    """Pushes that failed at a rank, by policy and reasons."""
    num_looks: int = 0
    wrong: list[str] = field(default_factory=list)


class StruckPool(PoolProcesses):
    """One coordinator, three replicas, and three trainers that push all the time."""

    def __init__(self, work: Path, rng: random.Random) -> None:
        acknowledged = str(work / _ACKNOWLEDGED)
        super().__init__(work, {"WEFT_TEST_ACKNOWLEDGED": acknowledged, "PYTHONFAULTHANDLER": "1"})
        self.stopped_until = 0.0
        self.trainers = {
            policy: Trainer(
                policy,
                names,
                self.processes.__getitem__,
                lambda: self.stopped_until,
                random.Random(rng.getrandbits(32)),
            )
            for policy, names in RANKS.items()
        }

    def begin(self) -> None:
        """Start all processes, and have the trainers push."""
        self.start_coordinator()
        for name in REPLICAS:
            self.start_replica(name)
        for policy, trainer in self.trainers.items():
            self.start_trainer(policy)
            trainer.start()
            trainer.go_on()

    def start_trainer(self, policy: str) -> None:
        """Start a trainer, of which nothing runs any more afterwards but the new processes."""
        names = RANKS[policy]
        if policy == "base":
            self.start_ranks(names, len(names))
            return
        process = self.start(names[0], "tests.fault.trainer", self.listen, "--adapter", policy)
        process.line(lambda text: text == "ready", _READY_SECONDS)

    @property
    def all_processes(self) -> list[Process]:
        """Every process that was ever started."""
        return [*self.processes.values(), *self.replaced]


class Run:
    """Rounds of strikes on one pool.

    Args:
        work: Folder for the logs of all processes.
    """

    def __init__(self, work: Path, seed: int) -> None:
        self.report = Report()
        self._work, self._rng = work, random.Random(seed)
        self._pool = StruckPool(work, self._rng)
        self._seen = dict.fromkeys(RANKS, 0)

    def run(self, seconds: float) -> Report:
        """Strike for so long, or until something is wrong; blocks. No process is left then."""
        pool, until = self._pool, time.monotonic() + seconds
        watch: Watch | None = None
        try:
            pool.begin()
            watch = Watch(pool.listen, self._work / _ACKNOWLEDGED)
            watch.start()
            self._recover("the start")
            while time.monotonic() < until:
                self._round()
                if watch.wrong:
                    raise WrongError("; ".join(watch.wrong))
            watch.stop()
            if watch.wrong:
                raise WrongError("; ".join(watch.wrong))
            self._end()
        except (WrongError, WeftError, AssertionError) as error:
            self.report.wrong.append(f"{type(error).__name__}: {error}")
            self._show_stacks()
        finally:
            if watch is not None:
                watch.stop()
                self.report.num_looks = watch.num_looks
            self._count_pushes()
            pool.close()
        return self.report

    # -- one round ---------------------------------------------------------------

    def _round(self) -> None:
        strikes = draw(self._rng)
        self.report.num_rounds += 1
        began = time.monotonic()
        undone: list[tuple[float, Strike]] = []
        for strike in strikes:
            self._continue(undone, began + strike.after_seconds)
            time.sleep(max(0.0, began + strike.after_seconds - time.monotonic()))
            self._strike(strike)
            undone.append((time.monotonic() + strike.lasts_seconds, strike))
        self._continue(undone, float("inf"))
        self._start_again([strike for strike in strikes if strike.signal == "SIGKILL"])
        self._recover(" and ".join(map(str, strikes)))

    def _strike(self, strike: Strike) -> None:
        pool = self._pool
        if strike.signal == "SIGINT":
            self._await_pushing(strike.names[0])
            time.sleep(strike.after_begin_seconds)
        self.report.strikes[strike.kind] += 1
        pushing = [policy for policy, trainer in pool.trainers.items() if trainer.is_pushing]
        print(f"{strike}, while {', '.join(pushing) or 'nobody'} pushes", flush=True)
        if strike.signal == "SIGSTOP":
            pool.stopped_until = max(
                pool.stopped_until, time.monotonic() + strike.lasts_seconds + 1.0
            )
        for name in strike.names:
            self._pool.processes[name].send_signal(getattr(signal, strike.signal))

    def _await_pushing(self, name: str) -> None:
        """Wait until the trainer of a process pushes, if it does so soon."""
        policy = next(policy for policy, names in RANKS.items() if name in names)
        with contextlib.suppress(AssertionError):
            until(lambda: self._pool.trainers[policy].is_pushing, _PUSHING_SECONDS)

    def _continue(self, undone: list[tuple[float, Strike]], until: float) -> None:
        """Wait for what ends before ``until``: stopped processes go on."""
        for at, strike in sorted(undone, key=lambda each: each[0]):
            if at <= until:
                time.sleep(max(0.0, at - time.monotonic()))
                if strike.signal == "SIGSTOP":
                    for name in strike.names:
                        self._pool.processes[name].send_signal(signal.SIGCONT)
                undone.remove((at, strike))

    def _start_again(self, killed: list[Strike]) -> None:
        """Start what was killed, the coordinator first: replicas and trainers need it."""
        pool = self._pool
        names = {name for strike in killed for name in strike.names}
        for name in names:
            pool.processes[name].wait(_END_SECONDS)
        if COORDINATOR in names:
            pool.start_coordinator()
        for name in sorted(names & set(REPLICAS)):
            pool.start_replica(name)
        for policy, ranks in RANKS.items():
            if names & set(ranks):
                pool.trainers[policy].pause()  # its other ranks say how the push ended for them
                pool.start_trainer(policy)
                pool.trainers[policy].go_on()

    # -- what must be so afterwards ----------------------------------------------

    def _recover(self, what: str) -> None:
        """Wait until all is as before: every next push works, and all serve the same."""
        pool = self._pool
        self._check_alive(what)
        self._await_ready(what)
        back = time.time()
        for policy, trainer in pool.trainers.items():
            push = trainer.wait_push(back, 2 * (PUSH_SECONDS + SLACK_SECONDS))
            if trainer.wrong:
                raise WrongError(f"after {what}: {'; '.join(trainer.wrong)}")
            if push is None:
                raise WrongError(f"after {what}: {policy} does not push any more")
            if not push.has_succeeded:
                raise WrongError(
                    f"after {what}: the next push of {policy} failed: {push.reasons} {push.details}"
                )
        self._check_alive(what)
        for trainer in pool.trainers.values():
            trainer.pause()
        self._check_served(what)
        self._count_pushes()
        for trainer in pool.trainers.values():
            trainer.go_on()

    def _check_alive(self, what: str) -> None:
        for name, process in self._pool.processes.items():
            if process.poll() is not None:
                how = f"ended by itself ({process.returncode})"
                raise WrongError(f"after {what}: {name} {how}:\n{process.tail()}")

    def _await_ready(self, what: str) -> None:
        deadline = time.monotonic() + BACK_SECONDS
        states: object = "the coordinator does not answer"
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError), open_channel(self._pool.listen) as channel:
                found = InspectServiceStub(channel).GetPool(pb.GetPoolRequest(), timeout=3)
                states = [(r.replica_id, r.state, r.state_reason) for r in found.replicas]
                if [r.state for r in found.replicas] == [pb.REPLICA_STATE_READY] * len(REPLICAS):
                    return
            time.sleep(0.1)
        raise WrongError(f"after {what}: not all is back in {BACK_SECONDS:.0f} s: {states}")

    def _check_served(self, what: str) -> None:
        """Compare what every replica holds with what was acknowledged last; nobody pushes."""
        pool = self._pool
        with open_channel(pool.listen) as channel:
            pool.settled(InspectServiceStub(channel))
        acknowledged, wrong = read_acknowledged(self._work / _ACKNOWLEDGED)
        for name in REPLICAS:
            answer = pool.processes[name].ask("?", _END_SECONDS)
            served = {policy: max(numbers) for policy, numbers in answer["adapters"].items()}
            served["base"] = answer["base"]
            for policy, own in acknowledged.items():
                newest = max(own)
                key = policy if policy == "base" else f"{policy}@{newest}"
                found = served.get(policy), answer["digests"].get(key)
                if found != (newest, own[newest]):
                    wrong.append(f"{name} serves {policy}@{found}, not {(newest, own[newest])}")
        if wrong:
            raise WrongError(f"after {what}: {'; '.join(wrong)}")

    def _count_pushes(self) -> None:
        for policy, trainer in self._pool.trainers.items():
            pushes = trainer.pushes[self._seen[policy] :]
            self._seen[policy] += len(pushes)
            for push in pushes:
                self._count(push)

    def _count(self, push: Push) -> None:
        if push.has_succeeded:
            self.report.num_pushes += 1
            return
        reasons = " and ".join(sorted(set(push.reasons)))
        if push.versions:
            reasons += ", and a version at another rank"
        self.report.failures[f"{push.policy}: {reasons}"] += 1
        print(
            f"  a push of {push.policy} failed: {reasons} ({'; '.join(push.details)})", flush=True
        )

    # -- the end -----------------------------------------------------------------

    def _end(self) -> None:
        """End all processes in order, and look for those that are left."""
        pool = self._pool
        for trainer in pool.trainers.values():
            trainer.pause()
        self._check_served("the last round")
        for names in RANKS.values():
            for name in names:
                if (code := pool.processes[name].poll()) is not None:
                    raise WrongError(f"{name} has ended, {code}:\n{pool.processes[name].tail()}")
                pool.processes[name].tell("end")
            for name in names:
                if code := pool.processes[name].wait(_END_SECONDS):
                    raise WrongError(f"{name} ended with {code}:\n{pool.processes[name].tail()}")
        for name in REPLICAS:
            pool.processes[name].stop()
        if code := pool.processes[COORDINATOR].signal(signal.SIGTERM, _END_SECONDS):
            raise WrongError(f"the coordinator ended with {code}")
        left = [pid for process in pool.all_processes for pid in members(process.pid)]
        if left := [f"{pid}: {title(pid)}" for pid in left if is_running(pid)]:
            raise WrongError(f"processes are left over: {left}")

    def _show_stacks(self) -> None:
        """Have every process write the stacks of its threads to its log; it ends by that."""
        for process in self._pool.processes.values():
            for number in (signal.SIGCONT, signal.SIGABRT):
                with contextlib.suppress(ProcessLookupError):
                    if process.poll() is None:
                        os.kill(process.pid, number)
