"""What ranks of a trainer say to each other: over their own link, and the same over gloo.

    python -m benchmarks.ranks [--ranks N]

Processes of one machine; medians, at rank 0. "agree" over gloo is an all-reduce of five numbers;
what is given or exchanged is followed by an agreement on both, so that it has come.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.machine import describe
from trainer_side.ranks.torch_ranks import TorchRanks

_SECONDS = 120.0
_SMALL, _LARGE = 300, 9
_GIVEN_BYTES, _EXCHANGED_BYTES = 2**27, 2**25


def _median(call: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _one_rank(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    ranks = TorchRanks(None)
    ranks.open(time.monotonic() + _SECONDS)
    given = torch.zeros(_GIVEN_BYTES, dtype=torch.uint8)
    parts = [torch.zeros(_EXCHANGED_BYTES, dtype=torch.uint8) for _ in range(size)]
    said = torch.zeros(5, dtype=torch.int64)

    def agree() -> None:
        dist.all_reduce(said, dist.ReduceOp.MAX)

    def give() -> None:
        if rank == 0:
            ranks.take(1, given)
        elif rank == 1:
            ranks.give(0, given)
        ranks.agree()

    def gloo_give() -> None:
        if rank == 0:
            dist.recv(given, 1)
        elif rank == 1:
            dist.send(given, 0)
        agree()

    def exchange() -> None:
        ranks.exchange(parts)
        ranks.agree()

    def gloo_exchange() -> None:
        works = [dist.broadcast(part, root, async_op=True) for root, part in enumerate(parts)]
        for work in works:
            work.wait()
        agree()

    lines = [
        ("agree", 1e6, "us", _median(ranks.agree, _SMALL), _median(agree, _SMALL)),
        (f"give {_GIVEN_BYTES >> 20} MiB", 1e3, "ms", _median(give, _LARGE),
         _median(gloo_give, _LARGE)),
        (f"exchange {_EXCHANGED_BYTES >> 20} MiB of each", 1e3, "ms", _median(exchange, _LARGE),
         _median(gloo_exchange, _LARGE)),
    ]  # fmt: skip
    if rank == 0:
        for what, scale, unit, own, gloo in lines:
            print(f"| {what} | {own * scale:.0f} {unit} | {gloo * scale:.0f} {unit} |", flush=True)
    ranks.agree()
    os._exit(0)


def main(
    ranks: Annotated[int, typer.Option(help="Processes.", min=2)] = 4,
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
    store: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure; prints hardware, versions, command and a table."""
    if store:
        _one_rank(rank, ranks, store)
    print(describe())
    print(f"\n| {ranks} ranks | own link | gloo |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as work:
        args = ["--ranks", str(ranks), "--store", str(Path(work) / "store"), "--rank"]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", *args, str(number)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
            for number in range(ranks)
        ]
        raise typer.Exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    typer.run(main)
