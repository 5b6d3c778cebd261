"""``python -m benchmarks.senders``: what it gains that a sharded trainer's ranks send.

512 MiB, sharded by FSDP2 over real ranks on this host, pushed to one engine double over gloo and
over one-sided: gathered and sent by rank 0, and by each rank what it holds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.push import coordinator, doubles, model_of
from trainer_side import Publisher
from weft_rl.contract.backends import GLOO, ONE_SIDED

_BYTES = 512 * 2**20
_ELEMENTS = 2**20
_NUM_TENSORS = _BYTES // (4 * _ELEMENTS)
_WARM = 2
_ENV = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def rank(target: str, senders: list[int], num_pushes: int) -> None:
    """One rank of the trainer; rank 0 prints a line for each backend and number of senders."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = model_of(_NUM_TENSORS, _ELEMENTS)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seconds: dict[tuple[str, int], list[float]] = {}
    for backend in (ONE_SIDED, GLOO):
        for count in senders:
            with Publisher(
                target, trainer_id=f"{backend}-{count}", progress=None, backend=backend,
                max_senders=count, takeover=True,
            ) as publisher:  # fmt: skip
                for number in range(_WARM + num_pushes):
                    dist.barrier()
                    report = publisher.push_base(model).report
                    assert report.backend == backend
                    if number >= _WARM:
                        own = seconds.setdefault((backend, count), [])
                        own.append(report.staging_seconds)
    if dist.get_rank() == 0:
        for (backend, count), own in seconds.items():
            rates = sorted(_BYTES / 1e9 / one for one in own)
            print(f"{backend} {count} {statistics.median(rates):.2f} GB/s "
                  f"({rates[0]:.2f} to {rates[-1]:.2f})", flush=True)  # fmt: skip
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", default="", help="of a rank; set by the parent")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--senders", default="1,4", help="of each run; 1 gathers")
    parser.add_argument("--pushes", type=int, default=5)
    args = parser.parse_args()
    if args.coordinator:
        rank(args.coordinator, [int(n) for n in args.senders.split(",")], args.pushes)
    table = Table("backend", "ranks that send", "staged")
    with (
        tempfile.TemporaryDirectory() as folder,
        coordinator(Path(folder), "senders") as target,
        doubles(Path(folder), target, 1, _NUM_TENSORS, _ELEMENTS),
    ):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", str(args.ranks), "-m", "benchmarks.senders",
                   "--coordinator", target, "--senders", args.senders,
                   "--pushes", str(args.pushes)]  # fmt: skip
        told = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=600,
            env={**os.environ, **_ENV},
        )  # fmt: skip
    for line in told.stdout.splitlines():
        table.add_row(*line.split(" ", 2))
    Console(width=120).print(table)
    Console().print(f"{args.ranks} ranks; {describe()}")


if __name__ == "__main__":
    main()
