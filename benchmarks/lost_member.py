"""``python -m benchmarks.lost_member``: what a member that dies in a push costs the others.

Two engine doubles in processes of their own, one of which is killed when a third of a base of
512 MiB has been verified, over one-sided and over gloo, each time in a pool of its own. On GPUs
``python -m benchmarks.gpu --replicas 2`` does it once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.push import Rows, coordinator, model_of
from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.backends import GLOO, ONE_SIDED
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_ELEMENTS = 2**20
_NUM_TENSORS = 512 * 2**20 // (4 * _ELEMENTS)


@dataclass(frozen=True)
class Recovery:
    """Seconds."""

    noticed: float
    """From the kill until the coordinator let the survivors resume."""
    served: float
    """From then until they served the version."""
    next_push: float
    """The push after that, of which nothing is new but who is in the group."""

    def __str__(self) -> str:
        return (
            f"noticed after {self.noticed * 1e3:.0f} ms, served {self.served * 1e3:.0f} ms "
            f"later; the next push {self.next_push * 1e3:.1f} ms"
        )


def recover(
    target: str, model: Any, kill: Callable[[], None], num_left: int, **settings: Any
) -> Recovery:
    """Push a base, kill a member in the middle of it, and push again.

    Args:
        target: The coordinator, on this machine: its clock is compared with ours.
        kill: Ends the member, and returns at once.
        num_left: How many serve then.
        settings: More of the publisher's.
    """
    struck: list[float] = []

    def progress(policy: str, verified: int, total: int) -> None:
        if is_due and not struck and verified >= total // 3:
            struck.append(time.time())
            kill()

    is_due = False
    with Publisher(
        target, trainer_id="bench", progress=progress, require=num_left, **settings
    ) as publisher:
        for _ in range(2):  # the group is formed, the model's layout known
            publisher.push_base(model)
        is_due = True
        publisher.push_base(model)
        served = time.time()
        noticed = _reformed_at(target)
        report = publisher.push_base(model).report
        assert report.num_replicas == num_left
    return Recovery(noticed - struck[0], served - noticed, report.seconds)


def _reformed_at(target: str) -> float:
    """When a transfer last went on without a member, as the coordinator's events tell."""
    with open_channel(target) as channel:
        stub = InspectServiceStub(channel)
        events = stub.ListEvents(inspect_pb2.ListEventsRequest(), timeout=10).events
    times = [e.time for e in events if e.kind == inspect_pb2.EVENT_KIND_TRANSFER_REFORMED]
    return float(times[0].ToNanoseconds() / 1e9)


def _once(work: Path, backend: str) -> Recovery:
    """In a pool of two doubles."""
    with coordinator(work, "coordinator") as target, ExitStack() as stack:
        replicas = []
        for name in ("stays", "leaves"):
            args = ("-m", "tests.doubles.replica_process", target, name, str(_NUM_TENSORS),
                    str(_ELEMENTS))  # fmt: skip
            replicas.append(Process(name, args, work, {}))
            stack.callback(replicas[-1].stop)
        for replica in replicas:
            replica.line(lambda text: text == "ready", 60)
        model = model_of(_NUM_TENSORS, _ELEMENTS)
        return recover(target, model, lambda: os.kill(replicas[1].pid, 9), 1, backend=backend)


def _shown(seconds: Sequence[float]) -> str:
    """The median, and the spread."""
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"{median * 1e3:.0f} ms ({least * 1e3:.0f} to {most * 1e3:.0f})"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    kills = parser.parse_args().kills
    rows = Rows()
    for backend in (ONE_SIDED, GLOO):
        found = []
        for _ in range(kills):
            with tempfile.TemporaryDirectory() as folder:
                found.append(_once(Path(folder), backend))
        rows.add(f"killed until noticed, {backend}", _shown([r.noticed for r in found]), "")
        rows.add("noticed until served", _shown([r.served for r in found]), "")
        rows.add("the next push", _shown([r.next_push for r in found]), "")
    rows.show()
    Console().print(describe())


if __name__ == "__main__":
    main()
