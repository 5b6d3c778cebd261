"""A pool of real processes, any of which may be struck: coordinator, replicas, trainers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.doubles.replica_weights import ELEMENTS, NUM_TENSORS
from tests.processes import members
from tests.waits import until
from weft_rl.cli.demo.processes import Process
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

REPLICAS = ("replica-0", "replica-1", "replica-2")
#: In the environment of a trainer that pushes the base by deltas.
DELTAS = "WEFT_TEST_DELTAS"
#: The coordinator's: after so long without a word who hangs is waited for no more.
STALL_SECONDS = 2.5
LEASE_SECONDS = 4
COORDINATOR = (
    "coordinator", "--heartbeat-seconds", "0.3", "--lost-after-seconds", "3",
    "--lease-seconds", str(LEASE_SECONDS), "--stall-seconds", str(STALL_SECONDS),
    "--retain-versions", "1", "--log-level", "warning",
)  # fmt: skip


def settled(
    ask: Callable[[], inspect_pb2.GetPoolResponse], seconds: float, num_replicas: int
) -> inspect_pb2.GetPoolResponse:
    """Return the pool once every replica is ready and nothing is under way."""

    def found() -> inspect_pb2.GetPoolResponse | None:
        pool = ask()
        ready = [r for r in pool.replicas if r.state == inspect_pb2.REPLICA_STATE_READY]
        return pool if len(ready) == num_replicas and not pool.active_transfers else None

    return until(found, seconds, every_seconds=0.1, why=lambda: f"it did not settle: {ask()}")


class PoolProcesses:
    """Processes of a pool, each started again under its name as often as it is told.

    Args:
        work: Folder of their logs and of the catalog.
        env: Environment of each of them, beside this process's own.
    """

    def __init__(self, work: Path, env: dict[str, str]) -> None:
        self.work, self.env = work, env
        self.processes: dict[str, Process] = {}
        self.replaced: list[Process] = []
        self.listen = "127.0.0.1:0"
        self._num_stores = 0

    def start(self, name: str, module: str, *args: str, **env: str) -> Process:
        """Run a module as a process, in place of the one that had the name."""
        if old := self.processes.get(name):
            self.replaced.append(old)
        process = Process(
            f"{name}-{len(self.replaced)}", ("-m", module, *args), self.work, {**self.env, **env}
        )
        self.processes[name] = process
        return process

    def start_coordinator(self) -> None:
        """Start the coordinator (again, on the same port and catalog); blocks until it listens."""
        args = (*COORDINATOR, "--listen", self.listen, "--catalog", str(self.work / "weft.db"))
        process = self.start("coordinator", "weft_rl", *args)
        line = process.line(lambda text: text.startswith("listening on "), 30)
        self.listen = line.removeprefix("listening on ")

    def start_replica(self, name: str, *options: str) -> None:
        """Start a replica double with these options; blocks until it has registered."""
        args = (self.listen, name, str(NUM_TENSORS), str(ELEMENTS), "--keep", *options)
        process = self.start(name, "tests.doubles.replica_process", *args)
        process.line(lambda text: text == "ready", 60)

    def start_ranks(self, names: Sequence[str], max_senders: int) -> None:
        """Start a trainer of the base, a process a rank, and end those that had the names."""
        for name in names:
            if name in self.processes:
                self.processes[name].send_signal(signal.SIGKILL)
        self._num_stores += 1
        store = str(self.work / f"store-{self._num_stores}")
        for rank, name in enumerate(names):
            args = (str(rank), store, str(len(names)), str(max_senders)) if len(names) > 1 else ()
            self.start(name, "tests.fault.trainer", self.listen, *args)
        for name in names:
            self.processes[name].line(lambda text: text == "ready", 60)

    def settled(
        self, stub: InspectServiceStub, seconds: float = 20.0
    ) -> inspect_pb2.GetPoolResponse:
        """Return the pool once every replica is ready: one that missed a push caught up."""
        request = inspect_pb2.GetPoolRequest()
        return settled(lambda: stub.GetPool(request, timeout=5), seconds, len(REPLICAS))

    def close(self) -> None:
        """End every process, and those that they started."""
        for process in (*self.processes.values(), *self.replaced):
            for pid in members(process.pid):  # its workers, too
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.stop()
