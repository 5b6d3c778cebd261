"""What the page is of: the demo, a pool to break, or a coordinator alone; ended by their pids."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: The environment that the product runs in; these tests have one of their own.
PYTHON = ROOT / ".venv" / "bin" / "python"
_DEMO_SECONDS = 300.0
_START_SECONDS = 60.0
_END_SECONDS = 60.0
#: The replicas of ``Pool``. Kubernetes gives such names.
REPLICAS = ("replica-0", "replica-1", "rollout-math-7b-instruct-production-2")
_IMPATIENT = (
    "--heartbeat-seconds", "0.3", "--lost-after-seconds", "3", "--stall-seconds", "2.5",
)  # fmt: skip


def seconds(message: dict[str, Any], name: str) -> float:
    """The seconds of a duration, 0 where there is none."""
    return float(message.get(name, "0s").removesuffix("s"))


@dataclass(frozen=True)
class Served:
    """A coordinator that serves the page."""

    page: str
    """Where, with a / at the end."""
    coordinator: str

    def listed(self, name: str) -> list[dict[str, Any]]:
        """The whole of a list, from all of its pages."""
        whole, token = list[dict[str, Any]](), ""
        while True:
            where = f"{self.page}v1/{name}.json?page_token={token}"
            with urllib.request.urlopen(where) as answer:
                told = json.load(answer)
            whole += told.get(name, [])
            token = told.get("next_page_token", "")
            if not token:
                return whole

    def ended(self) -> dict[str, dict[str, Any]]:
        """Pushes and rollbacks that have ended, by id, with the time of their commit."""
        found = {}
        for one in self.listed("transfers"):
            is_ended = one["state"] in ("TRANSFER_STATE_COMMITTED", "TRANSFER_STATE_ABORTED")
            if is_ended and one["purpose"] in (
                "TRANSFER_PURPOSE_PUSH",
                "TRANSFER_PURPOSE_ROLLBACK",
            ):
                begin = datetime.fromisoformat(one["begin_time"]).timestamp()
                one["commit_time"] = begin + seconds(one, "forming") + seconds(one, "staging")
                found[one["transfer_id"]] = one
        return found

    def began(self) -> float:
        """When the coordinator started."""
        started = (e for e in self.listed("events") if e["kind"].endswith("COORDINATOR_STARTED"))
        return datetime.fromisoformat(next(started)["time"]).timestamp()

    def weft(self, *args: str) -> str:
        """What a command of the command line prints."""
        command = [str(PYTHON), "-m", "weft_rl", *args, "-c", self.coordinator]
        return subprocess.run(
            command, cwd=ROOT, env=_environment(), check=True, capture_output=True, text=True,
            timeout=60,
        ).stdout  # fmt: skip


@contextmanager
def demo(folder: Path) -> Iterator[Served]:
    """Run ``weft demo --keep`` until it pushes on."""
    with _running(folder, "weft_rl", "demo", "--keep") as child:
        coordinator = child.next("coordinator listens on ", _DEMO_SECONDS).split(";")[0]
        page = child.next("  a page to look at", _DEMO_SECONDS).strip()
        child.next("the trainers push ", _START_SECONDS)
        yield Served(page, coordinator)


@contextmanager
def coordinator(
    folder: Path, *options: str, listen: str = "127.0.0.1:0", page: str = "127.0.0.1:0"
) -> Iterator[Served]:
    """Run a coordinator without replicas."""
    where = ("--listen", listen, "--metrics", page, "--catalog", str(folder / "weft.db"))
    with _running(folder, "weft_rl", "coordinator", *where, *options) as child:
        target = child.next("listening on ", _START_SECONDS)
        yield Served(child.next("page on ", _START_SECONDS), target)


class Pool:
    """A coordinator, three replicas with the engine double, and two trainers, each a process."""

    def __init__(self, folder: Path, children: ExitStack) -> None:
        self._folder, self._children = folder, children
        self._restarting = ExitStack()
        self.replicas: dict[str, Child] = {}
        self.trainers: dict[str, Child] = {}
        self.served = self._restarting.enter_context(coordinator(folder, *_IMPATIENT))
        children.callback(self._restarting.close)
        for name in REPLICAS:
            self.start_replica(name)
        for policy, options in (("base", ()), ("math", ("--adapter",))):
            trainer = self._start("tests.fault.trainer", self.served.coordinator, *options)
            self.trainers[policy] = trainer
        for child in (*self.replicas.values(), *self.trainers.values()):
            child.next("ready", _START_SECONDS)

    def start_replica(self, name: str, strike: str = "") -> Child:
        """Run a replica; give ``strike`` as tests/fault has it."""
        module = "tests.doubles.replica_process"
        args = (self.served.coordinator, name, "24", str(2**18), "--keep")
        if strike:
            module, args = "tests.fault.victims", (module, *args, "--worker")
        self.replicas[name] = self._start(module, *args, strike=strike)
        return self.replicas[name]

    def push(self, policy: str) -> int:
        """Push a version; returns its number."""
        self.trainers[policy].say("push 1.0 25")
        outcome = json.loads("{" + self.trainers[policy].next("{", _START_SECONDS))
        return int(outcome["version"])

    def restart_coordinator(self) -> None:
        """End the coordinator, and start another with its catalog, at the same ports."""
        self._restarting.close()
        page = self.served.page.removeprefix("http://").strip("/")
        at = {"listen": self.served.coordinator, "page": page}
        self._restarting.enter_context(coordinator(self._folder, *_IMPATIENT, **at))

    def _start(self, module: str, *args: str, strike: str = "") -> Child:
        return self._children.enter_context(_running(self._folder, module, *args, strike=strike))


@contextmanager
def running_pool(folder: Path) -> Iterator[Pool]:
    """Run a pool whose processes a test kills, stops and starts."""
    with ExitStack() as children:
        yield Pool(folder, children)


class Child:
    """A process, and the lines that it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.reading = threading.Thread(target=self._read)
        self.reading.start()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def next(self, start: str, seconds: float) -> str:
        """What follows in the next line that begins so."""
        deadline = time.monotonic() + seconds
        while (line := self._lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            if line.startswith(start):
                return line.removeprefix(start)
        raise AssertionError(f"it ended before it said {start!r}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


def _environment(strike: str = "") -> dict[str, str]:
    struck = {"WEFT_TEST_STRIKE": strike} if strike else {}
    quiet = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **quiet, **struck}


@contextmanager
def _running(folder: Path, module: str, *args: str, strike: str = "") -> Iterator[Child]:
    command = [str(PYTHON), "-m", module, *args]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(strike), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        child = Child(process)
        try:
            yield child
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.send_signal(signal.SIGCONT)  # one that is stopped cannot end
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            child.reading.join()
            assert process.stdout is not None
            process.stdout.close()
