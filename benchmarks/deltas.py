"""``python -m benchmarks.deltas``: pushes of all elements beside deltas, over a link of some speed.

Trainer and replica are in network namespaces of their own, joined by a link that ``tc`` shapes
(root). The model has bfloat16 tensors, masters in float32 that an update of the size of Adam's
changes, so that shares and steps of what changes are like those of training. The engine is a
double: what is measured is Weft, until the replica has staged the version and switched.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.push import model_of
from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process

_NUM_TENSORS = 24
_ADDRESS = {"trainer": "10.77.0.1", "replica": "10.77.0.2"}
_WARM, _PUSHES = 2, 7
_SECONDS = 120.0
# Learning rates, and the element share that they are to change.
_RATES = (3e-7, 1e-6, 3e-6, 1e-5)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def link(rate: str) -> Iterator[dict[str, str]]:
    """Two namespaces with a link between them, shaped in both directions; their names by role."""
    names = {role: f"weft-bench-{role}-{os.getpid()}" for role in _ADDRESS}
    with ExitStack() as stack:
        for name in names.values():
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        one, other = names.values()
        _run("ip", "-n", one, "link", "add", "weft0", "type", "veth", "peer", "name", "weft0",
             "netns", other)  # fmt: skip
        for role, name in names.items():
            _run("ip", "-n", name, "addr", "add", f"{_ADDRESS[role]}/24", "dev", "weft0")
            for device in ("weft0", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            if rate:
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "weft0", "root",
                     "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")  # fmt: skip
        yield names


def serve(work: Path, elements: int) -> None:
    """Serve a coordinator and a replica from inside a namespace, until standard input closes."""
    host = _ADDRESS["replica"]
    args = ("-m", "weft_rl", "coordinator", "--listen", f"{host}:0", "--insecure", "--catalog",
            str(work / "weft.db"), "--log-level", "warning")  # fmt: skip
    coordinator = Process("coordinator", args, work, {})
    target = coordinator.line_after("listening on ", 30)
    args = ("-m", "tests.doubles.replica_process", target, "replica-0", str(_NUM_TENSORS),
            str(elements), "--bfloat16", "--readable", "--keep", "--listen", host)  # fmt: skip
    replica = Process("replica", args, work, {})
    replica.line(lambda text: text == "ready", 60)
    print(target, flush=True)
    sys.stdin.read()
    replica.stop()
    coordinator.stop()


def push(target: str, elements: int, pushes: int) -> None:
    """Push from inside a namespace; print a line of JSON for each way and rate of change."""
    torch.manual_seed(0)
    model = model_of(_NUM_TENSORS, elements)
    masters = [torch.randn(p.shape) * 0.02 for p in model.parameters()]

    def step(size: float) -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master -= size * torch.randn(master.shape)
            parameter.data = master.bfloat16()

    for rate in (0.0, *_RATES):
        seen = []
        with Publisher(
            target,
            trainer_id="bench",
            progress=None,
            delta="always" if rate else "never",
            data_host=_ADDRESS["trainer"],
        ) as publisher:
            for number in range(_WARM + pushes):
                step(rate or 1e-6)
                report = publisher.push_base(model, timeout_seconds=_SECONDS).report
                if number >= _WARM:
                    assert report.delta.is_delta is bool(rate), report.delta
                    seen.append(report)
        print(json.dumps({
            "rate": rate,
            "backend": seen[0].backend,
            "bytes": seen[0].total_bytes,
            "sent": statistics.median(each.sent_bytes for each in seen),
            "share": statistics.median(each.delta.changed_share for each in seen),
            "seconds": statistics.median(each.seconds for each in seen),
            "least": min(each.seconds for each in seen),
            "comparing": statistics.median(each.delta.comparing_seconds for each in seen),
            "staging": statistics.median(each.staging_seconds for each in seen),
        }), flush=True)  # fmt: skip


def main() -> None:
    """Measure; print hardware, versions, command and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc has it; empty: none")
    parser.add_argument("--megabytes", type=int, default=95)
    parser.add_argument("--pushes", type=int, default=_PUSHES)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    elements = options.megabytes * 500_000 // _NUM_TENSORS
    if options.inside == "replica":
        serve(options.work, elements)
        return
    if options.inside == "trainer":
        push(options.target, elements, options.pushes)
        return
    print(describe())
    with tempfile.TemporaryDirectory() as work, link(options.rate) as names, ExitStack() as stack:

        def inside(role: str, *words: str) -> subprocess.Popen[str]:
            own = Path(work) / role
            own.mkdir()
            return subprocess.Popen(
                ["ip", "netns", "exec", names[role], sys.executable, "-m", "benchmarks.deltas",
                 "--inside", role, "--megabytes", str(options.megabytes), "--pushes",
                 str(options.pushes), "--work", str(own), *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                # As on two hosts: neither reads the other's memory.
                env={**os.environ, "WEFT_ONE_SIDED_DIR": str(own)},
            )  # fmt: skip

        replica = inside("replica")
        assert replica.stdout is not None
        stack.callback(replica.communicate, "")
        target = replica.stdout.readline().strip()
        trainer = inside("trainer", "--target", target)
        stack.callback(trainer.communicate)
        assert trainer.stdout is not None
        rows = [json.loads(line) for line in trainer.stdout]
    table = Table("update", "changed", "bytes", "share of bytes", "seconds", "least", "comparing",
                  "staging", "times as fast")  # fmt: skip
    whole = rows[0]
    for row in rows:
        is_delta = bool(row["rate"])
        table.add_row(
            f"{row['rate']:g}" if is_delta else f"all elements, {row['backend']}",
            f"{row['share']:.2%}" if is_delta else "",
            f"{row['sent']:,.0f}",
            f"1/{row['bytes'] / row['sent']:.0f}",
            f"{row['seconds']:.3f}",
            f"{row['least']:.3f}",
            f"{row['comparing']:.3f}" if is_delta else "",
            f"{row['staging']:.3f}",
            f"{whole['seconds'] / row['seconds']:.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
