"""``python -m benchmarks.deltas``: pushes of all elements beside deltas, over a link of some speed.

Trainer and replica are on hosts of a network of their own (root), whose links are as fast as told.
The model has bfloat16 tensors, masters in float32 that an update of the size of Adam's
changes, so that shares and steps of what changes are like those of training. The engine is a
double: what is measured is Weft, until the replica has staged the version and switched.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

# Each end has the cores of a host of its own, and works while the other waits.
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.push import model_of
from tests.network.hosts import Network, network
from trainer_side import Publisher

_NUM_TENSORS = 24
_WARM, _PUSHES = 2, 7
_SECONDS, _START_SECONDS = 120.0, 60.0
# Learning rates, and the element share that they are to change.
_RATES = (3e-7, 1e-6, 3e-6, 1e-5)


def push(target: str, elements: int, pushes: int, by_iterator: bool) -> None:
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
        ) as publisher:
            for number in range(_WARM + pushes):
                step(rate or 1e-6)
                if by_iterator:
                    named = model.named_parameters()
                    report = publisher.push_tensors(named, timeout_seconds=_SECONDS).report
                else:
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


def _serve(net: Network, elements: int) -> str:
    """Start a coordinator and a replica on one host; return the coordinator's HOST:PORT."""
    host = net["replica"]
    args = ("-m", "weft_rl", "coordinator", "--listen", f"{host.address}:0", "--insecure",
            "--catalog", str(host.folder / "weft.db"), "--log-level", "warning")  # fmt: skip
    coordinator = host.start("coordinator", args)
    target = coordinator.line_after("listening on ", _START_SECONDS)
    replica = ("-m", "tests.doubles.replica_process", target, "replica-0", str(_NUM_TENSORS),
               str(elements), "--bfloat16", "--readable", "--keep", "--listen",
               host.address)  # fmt: skip
    host.start("replica", replica).line(lambda text: text == "ready", _START_SECONDS)
    return target


def main() -> None:
    """Measure; print hardware, versions, command and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=1000, help="of the link; 0: no bound")
    parser.add_argument("--megabytes", type=int, default=95)
    parser.add_argument("--pushes", type=int, default=_PUSHES)
    parser.add_argument("--iterator", action="store_true", help="give tensors one by one, as verl")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    elements = options.megabytes * 500_000 // _NUM_TENSORS
    if options.target:
        push(options.target, elements, options.pushes, options.iterator)
        return
    print(describe())
    with network() as net:
        for name in ("trainer", "replica"):
            net.host(name, options.mbit or None)
        args = ("-m", "benchmarks.deltas", "--target", _serve(net, elements), "--megabytes",
                str(options.megabytes), "--pushes", str(options.pushes),
                *(["--iterator"] if options.iterator else []))  # fmt: skip
        trainer = net["trainer"].start("trainer", args)
        # Pushes of all elements, and then deltas of each rate.
        rows = [trainer.answer(_SECONDS * options.pushes) for _ in (0.0, *_RATES)]
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
