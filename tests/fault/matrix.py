"""One case of the kill matrix: real processes, real transports, one strike, then checks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.pool import LEASE_SECONDS, REPLICAS, STALL_SECONDS, PoolProcesses
from tests.fault.strikes import HANG, LOOP, RETIRE, ROLES, UNDO, VICTIM, Strike
from tests.waits import until
from weft_rl.cli.demo.processes import Process
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: A push's deadline, and what an answer may take beyond it.
PUSH_SECONDS, SLACK_SECONDS = 25.0, 5.0
#: How long a stopped process stays stopped: longer than every limit below.
STOP_SECONDS = 6.0
#: What anybody may wait beyond that, and what a push takes besides.
PROMISED_SECONDS, A_PUSH_SECONDS = 2.0, 1.5
#: Signals that leave a replica's process beating, by role: whoever waits must not for long.
_STUCK = {
    "replica worker": ("SIGSTOP", HANG),
    "replica worker, over streams": ("SIGSTOP",),
    "replica loop": (LOOP,),
    "replica, in place": (HANG,),
    "replica rank, in place": ("SIGSTOP",),
    "replica worker, delta": ("SIGSTOP", HANG),
    "replica, delta in place": (HANG,),
}
#: How soon a replica ends by itself that has lost its worker.
END_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """What a case showed; times in seconds."""

    strike: Strike
    push: str
    """How the struck push ended: a version, a reason, or that its trainer died."""
    push_seconds: float
    """From the strike until the push's caller knew; 0 when the caller died."""
    recovery_seconds: float
    """From the strike until the next push was served."""


class Case(PoolProcesses):
    """Processes of one case; ``run`` once, ``close`` always."""

    def __init__(self, strike: Strike, work: Path) -> None:
        super().__init__(work, strike.pool_env)
        self.strike = strike
        #: Processes of the trainer, its sender first.
        self.trainer = ["trainer", "rank-1"][: ROLES[strike.role].num_ranks]
        self.armed = strike.process
        self.start_coordinator()
        for name in REPLICAS:
            self.start_replica(name)
        self.start_trainer()
        self.armed = ""
        self.is_stuck = strike.signal in _STUCK.get(strike.role, ())
        if (self.is_stuck and strike.point != UNDO) or strike.point == RETIRE:
            self.start("other", "tests.fault.trainer", self.listen, "--adapter")
            self.processes["other"].line(lambda text: text == "ready", 60)

    def start(self, name: str, module: str, *args: str, **env: str) -> Process:
        """See ``PoolProcesses.start``: what is armed strikes itself."""
        if name == self.armed:
            module, args, env = "tests.fault.victims", (module, *args), {**env, **self.strike.env}
        return super().start(name, module, *args, **env)

    def start_replica(self, name: str, *options: str) -> None:
        """Start a replica as the strike needs it."""
        has = {
            "--worker": self.strike.role.startswith("replica worker"),
            "--ranks": self.strike.role.startswith("replica rank") and name == VICTIM,
            "--in-place": self.strike.in_place,
            "--sleeps": self.strike.asleep,
        }
        super().start_replica(name, *options, *(option for option, is_set in has.items() if is_set))

    def start_trainer(self) -> None:
        """Start the trainer, of one process or several ranks; all of the former ones end."""
        self.start_ranks(self.trainer, ROLES[self.strike.role].max_senders)

    # -- one run ---------------------------------------------------------------

    def run(self) -> Outcome:
        """Strike during a push, then show that the pool is as it must be."""
        if self.strike.asleep:
            return self._run_asleep()
        pushed: dict[int, float] = {}
        if self.strike.point != "in rendezvous":  # there the group must be a new one
            first = self.push(1.0)
            pushed[first["version"]] = 1.0
        self.strike.armed.touch()
        if self.strike.point == RETIRE:  # of what another trainer pushes
            self._push_other()
            self._push_other()
            struck_at, pid = self.strike.await_struck(PUSH_SECONDS)
            self._tell_push(2.0)
        else:
            self._tell_push(2.0)
            struck_at, pid = self.strike.await_struck(PUSH_SECONDS)
        if self.is_stuck:
            self.processes["other"].tell(f"push 9 {PUSH_SECONDS}")
        self._undo(struck_at, pid)
        died = self.strike.process if self.strike.signal == "SIGKILL" else ""
        outcome, push_seconds = "its trainer died", 0.0
        if alive := [name for name in self.trainer if name != died]:
            answer = self._answer(alive)
            push_seconds = max(0.0, answer["ended"] - struck_at)
            outcome = answer.get("error") or f"base@{answer['version']}"
            if "version" in answer:
                pushed[answer["version"]] = 2.0
        if died in self.trainer:  # whoever runs a trainer starts all its ranks again
            self.start_trainer()
        if self.is_stuck:
            most = STALL_SECONDS + PROMISED_SECONDS + A_PUSH_SECONDS
            assert push_seconds <= most, f"the push has waited for what hangs: {push_seconds:.1f} s"
            other = self._answer(["other"])
            took = other["ended"] - other["began"]
            assert "version" in other, f"the other policy's push has failed: {other}"
            assert took <= most, f"the other policy's push has waited for what hangs: {took:.1f} s"
        last = self.push(3.0)
        recovery_seconds = last["ended"] - struck_at
        pushed[last["version"]] = 3.0
        self._check(last["version"], pushed)
        return Outcome(self.strike, outcome, push_seconds, recovery_seconds)

    def _run_asleep(self) -> Outcome:
        """Strike while replicas sleep: they sleep on, and the base stays its trainer's."""
        pushed = {self.push(1.0)["version"]: 1.0}
        if self.strike.point == "asleep":
            self._tell("sleep")
        self.strike.armed.touch()
        if self.strike.point != "asleep":
            self.processes["trainer"].tell(f"sleep 0 {PUSH_SECONDS}")
        struck_at, pid = self.strike.await_struck(PUSH_SECONDS)
        self._undo(struck_at, pid)
        ended = time.time()
        if self.strike.point != "asleep":
            ended = self._answer(["trainer"])["ended"]
        until = time.monotonic() + 2 * LEASE_SECONDS
        while time.monotonic() < until:
            for name in REPLICAS:
                self.processes[name].tell("?")
                assert self.processes[name].answer(20)["asleep"], f"{name} woke by itself"
            time.sleep(0.2)
        self._tell("wake")
        last = self.push(3.0)
        pushed[last["version"]] = 3.0
        self._check(last["version"], pushed)
        return Outcome(self.strike, "asleep", ended - struck_at, last["ended"] - struck_at)

    def _tell(self, what: str) -> None:
        self.processes["trainer"].tell(f"{what} 0 {PUSH_SECONDS}")
        self._answer(["trainer"])

    def _push_other(self) -> None:
        self.processes["other"].tell(f"push 9 {PUSH_SECONDS}")
        answer = self._answer(["other"])
        assert "version" in answer, answer

    def push(self, value: float) -> dict[str, Any]:
        self._tell_push(value)
        answer = self._answer(self.trainer)
        assert "version" in answer, f"the push of {value} failed: {answer}"
        return answer

    def _tell_push(self, value: float) -> None:
        for name in self.trainer:
            self.processes[name].tell(f"push {value} {PUSH_SECONDS}")

    def _answer(self, names: list[str]) -> dict[str, Any]:
        """The last of the ranks' answers, which say the same."""
        answers = [self.processes[name].answer(PUSH_SECONDS + SLACK_SECONDS) for name in names]
        assert len({(a.get("version"), a.get("error")) for a in answers}) == 1, answers
        return max(answers, key=lambda answer: float(answer["ended"]))

    def _undo(self, struck_at: float, pid: int) -> None:
        """Start what was killed again, or let what was stopped go on."""
        name = self.strike.process
        if self.strike.signal in (HANG, LOOP):
            return  # it ends by itself, and the next push does not wait for that
        if self.strike.signal == "SIGSTOP":
            time.sleep(max(0.0, struck_at + STOP_SECONDS - time.time()))
            with contextlib.suppress(ProcessLookupError):  # it was ended meanwhile
                os.kill(pid, signal.SIGCONT)
            return
        if name not in self.trainer:  # its caller died with it: ``run`` starts another
            # A replica whose worker was killed ends by itself, as vLLM's does.
            self.processes[name].wait(END_SECONDS)
        if name == "coordinator":
            self.start_coordinator()
        elif name == VICTIM:
            self.start_replica(name)

    def _check(self, version: int, pushed: dict[int, float]) -> None:
        """Exactly one committed version is served, by all, with the bytes it was given."""
        with open_channel(self.listen) as channel:
            stub = InspectServiceStub(channel)
            pool = self.settled(stub)
            assert pool.version_vector.base == version
            versions = stub.ListVersions(
                inspect_pb2.ListVersionsRequest(policy="base"), timeout=5
            ).versions
        numbers = [v.version.version for v in versions]
        assert len(set(numbers)) == len(numbers), f"a version was used twice: {numbers}"
        states = {v.version.version: v.state for v in versions}
        for number in pushed:
            assert states[number] in (
                inspect_pb2.VERSION_STATE_COMMITTED, inspect_pb2.VERSION_STATE_RETIRED
            ), f"base@{number} was reported as pushed but is {states[number]}"  # fmt: skip
        assert states[version] == inspect_pb2.VERSION_STATE_COMMITTED
        for replica in pool.replicas:
            process = self.processes[replica.replica_id]
            process.tell("?")
            served = process.answer(20)
            assert served["base"] == version, f"{replica.replica_id} serves {served}"
            assert served["firsts"] == [pushed[version]], f"{replica.replica_id}: {served}"
            assert served["is_whole"]
            self._await_no_leftovers(replica.replica_id)

    def _await_no_leftovers(self, name: str, seconds: float = 10.0) -> None:
        """Staged bytes of a failed push go with the heartbeats after it."""

        def is_empty() -> bool:
            self.processes[name].tell("?")
            return self.processes[name].answer(20)["staging_bytes"] == 0

        until(is_empty, seconds, every_seconds=0.2, why=lambda: f"{name} holds staged bytes")
