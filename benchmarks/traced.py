"""``python -m benchmarks.traced``: what traces cost the control plane of a push.

Two pools of one replica (engine double, processes of their own), one that traces, its
trainer included, one that does not; an adapter of 4 KiB is pushed to each in turn. The
collector is this process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # the collector's threads see processes start

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.push import tiny_adapter
from tests.doubles.collector import Collector
from trainer_side import Publisher
from weft_rl import tracing
from weft_rl.cli.demo.processes import Process
from weft_rl.telemetry.traces import open_tracer

_PUSHES = 101
_WARMUP = 5


def _pool(stack: ExitStack, work: Path, name: str, *options: str) -> str:
    """Start a coordinator and a replica; returns HOST:PORT."""
    args = ("-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0",
            "--catalog", str(work / f"{name}.db"), *options)  # fmt: skip
    coordinator = Process(f"coordinator-{name}", args, work, {})
    stack.callback(coordinator.stop)
    target = coordinator.line(lambda text: text.startswith("listening on "), 60).split()[-1]
    args = ("-m", "tests.doubles.replica_process", target, "replica-0", "1", "16", *options)
    replica = Process(f"replica-{name}", args, work, {})
    stack.callback(replica.stop)
    replica.line(lambda text: text == "ready", 60)
    return target


def main() -> None:
    """Measure, and print a line for each."""
    console = Console()
    console.print(describe())
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        work = Path(folder)
        collector = stack.enter_context(Collector())
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.endpoint
        tracer = open_tracer("trainer")
        stack.callback(tracer.close)
        # What the trainer of each has set up: both are this process.
        pools = {
            "without": (_pool(stack, work, "without"), tracing.NO_TRACER),
            "with traces": (_pool(stack, work, "with", "--traces"), tracer),
        }
        publishers = {
            name: stack.enter_context(Publisher(target, trainer_id="t", progress=None))
            for name, (target, _) in pools.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in publishers}
        adapter = tiny_adapter(work)
        for _ in range(_PUSHES):
            for name, publisher in publishers.items():
                tracing.of_process = lambda found=pools[name][1]: found
                report = publisher.push_adapter(adapter, "tiny").report
                seconds[name].append(report.seconds)
        tracer.close()
        collector.wait(_PUSHES, "weft.push")
        collector.wait(_PUSHES - _WARMUP, "weft.receive")  # the replica has sent most by now
    before, after = (statistics.median(kept[_WARMUP:]) * 1e3 for kept in seconds.values())
    for name, kept in seconds.items():
        console.print(f"  {name}: median {statistics.median(kept[_WARMUP:]) * 1e3:.1f} ms")
    console.print(f"  the difference: {after - before:.1f} ms")


if __name__ == "__main__":
    main()
