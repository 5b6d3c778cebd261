"""``python -m benchmarks.one_sided_planes``: the planes alone, of processes on one host.

A sender and its receivers move buckets over one backend and nothing else: no packing, no digest,
no control plane. On GPUs the sender has the first, and a receiver is placed on it, on its
neighbour, or on both; bytes are compared, and a sender is killed again and again in mid-read, with
its readers expected to live, told at once: readers that copy, and such as digest what they are lent
where it lies. ``--device cpu`` runs the same over host memory, beside gloo.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.push import Rows
from weft_rl.contract.backends import GLOO, ONE_SIDED
from weft_rl.contract.errors import WeftError
from weft_rl.transport.backends import allocate
from weft_rl.transport.digests.wsum64 import tensor_digest
from weft_rl.transport.group import Operation, SideGroup, on_device, window
from weft_rl.transport.wire.buckets import BucketOptions
from weft_rl.transport.wire.lane_options import LaneOptions

_TIMEOUT = timedelta(seconds=120)
_ROUNDS = 6
_KILLS = 5
_LONG = 10_000


class Member:
    """One rank, in a process of its own that is told what to do on its standard input.

    Args:
        gpus: What it sees, its own first; empty for a CPU.
    """

    def __init__(
        self,
        store: Path,
        rank: int,
        size: int,
        backend: str,
        bucket: int,
        count: int,
        gpus: str,
        *,
        borrows: bool = False,
    ) -> None:
        args = [str(store), str(rank), str(size), backend, str(bucket), str(count)]
        args += ["borrows"] if borrows else []
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=gpus)
        if rank == 0:
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.one_sided_planes", "member", *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"a member ended with {self.process.wait(10)}"
        return line

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def member(arguments: list[str]) -> None:
    """The process of a ``Member``: each line is a number of buckets to move."""
    path, rank, size, backend, bucket, count = arguments[:6]
    borrows = "borrows" in arguments[6:] and rank != "0"
    has_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and backend == ONE_SIDED
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    num_bytes, ring, is_sender = int(bucket), window(device, backend), rank == "0"
    store = dist.FileStore(path, int(size))
    store.set_timeout(_TIMEOUT)
    with on_device(device):
        group = SideGroup(
            store,
            int(rank),
            int(size),
            LaneOptions(host="127.0.0.1"),
            backend=backend,
            device=device,
        )  # type: ignore[arg-type]
        num_buffers = ring if is_sender else int(count)
        buffers = [
            allocate(backend if is_sender else GLOO, num_bytes, device) for _ in range(num_buffers)
        ]
        for index, buffer in enumerate(buffers if is_sender else ()):
            buffer.fill_(index + 1)
        print("ready", flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            try:
                _move(group, buffers, int(line), ring, borrows=borrows)
            except WeftError as error:
                alive = torch.ones(4, device=device).sum().item()
                print(f"failed {type(error).__name__} {alive}", flush=True)
                break
            seconds = time.perf_counter() - began
            heads = {int(b[i]) for b in buffers[: min(int(line), num_buffers)] for i in (0, -1)}
            print(f"{seconds} {sorted(heads)}", flush=True)
        group.close(5.0)


def _move(
    group: SideGroup, buffers: list[torch.Tensor], num_buckets: int, ahead: int, *, borrows: bool
) -> None:
    deadline = time.monotonic() + 120.0
    flight: deque[Operation] = deque()

    def end(operation: Operation) -> None:
        operation.wait(deadline)
        if borrows:  # what is lent is read in place, as a receiver's kernels do
            lent = operation.arrived.lent
            assert lent is not None
            tensor_digest(lent)
            operation.give_back()

    options = BucketOptions(borrows=borrows)
    for index in range(num_buckets):
        if len(flight) == ahead:
            end(flight.popleft())
        flight.append(group.broadcast(buffers[index % len(buffers)], 120.0, options=options))
    for operation in flight:
        end(operation)


def rate(backend: str, bucket: int, count: int, gpus: list[str]) -> str:
    """GB/s of moving so many buckets to the receivers; the sender's time."""
    with tempfile.TemporaryDirectory() as folder:
        size = len(gpus)
        members = [
            Member(Path(folder) / "store", rank, size, backend, bucket, count, seen)
            for rank, seen in enumerate(gpus)
        ]
        try:
            for one in members:
                assert one.answer() == "ready"
            rates = []
            for _ in range(_ROUNDS):
                for one in members:
                    one.tell(str(count))
                answers = [one.answer() for one in members]
                assert not any(text.startswith("failed") for text in answers), answers
                heads = [text.partition(" ")[2] for text in answers]
                assert len(set(heads)) == 1, f"other bytes arrived than were sent: {heads}"
                rates.append(bucket * count / 1e9 / float(answers[0].split()[0]))
        finally:
            for one in members:
                one.close()
    warm = rates[1:]
    return f"{statistics.median(warm):.2f} GB/s ({min(warm):.2f} to {max(warm):.2f})"


def killed(
    bucket: int, count: int, gpus: list[str], kills: int, at_once: int, *, borrows: bool = False
) -> str:
    """What readers say whose sender is killed while they read."""

    def strike(number: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            store, size = Path(folder) / "store", len(gpus)
            members = [
                Member(store, rank, size, ONE_SIDED, bucket, count, seen, borrows=borrows)
                for rank, seen in enumerate(gpus)
            ]
            try:
                for one in members:
                    assert one.answer() == "ready"
                for one in members:
                    one.tell(str(_LONG))
                time.sleep(0.3 + 0.05 * (number % 10))
                members[0].process.send_signal(signal.SIGKILL)
                began = time.perf_counter()
                for one in members[1:]:
                    assert one.answer() == "failed PeerUnavailableError 4.0"
                return time.perf_counter() - began
            finally:
                for one in members:
                    one.close()

    with ThreadPoolExecutor(at_once) as pool:
        said = [*pool.map(strike, range(kills))]
    return (
        f"{len(said)} of {kills} times readers lived; told after {max(said) * 1e3:.0f} ms at most"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--bucket-mib", type=int, default=0)
    parser.add_argument("--kills", type=int, default=_KILLS)
    parser.add_argument("--at-once", type=int, default=1, help="kills beside each other")
    parser.add_argument("--only-kills", action="store_true", help="measure no rates")
    options = parser.parse_args()
    rows, kills = Rows(), (options.kills, options.at_once)
    if options.device == "cpu":
        bucket, count = (options.bucket_mib or 64) * 2**20, 8
        for name in () if options.only_kills else (ONE_SIDED, GLOO):
            for receivers in (1, 3):
                told = rate(name, bucket, count, [""] * (1 + receivers))
                rows.add(f"{name}, {receivers} receivers, {count} buckets", told, "")
        for borrows, what in ((False, "copying"), (True, "reading in place")):
            told = killed(bucket, count, ["", "", ""], *kills, borrows=borrows)
            rows.add(f"sender killed, readers {what}", told, "all live")
    else:
        bucket, count = (options.bucket_mib or 1024) * 2**20, 16
        near, far, both = ["0", "0"], ["0,1", "1,0"], ["0,1", "0,1", "1,0"]
        places = [("the same GPU", near), ("its neighbour", far), ("both", both)]
        places = places if torch.cuda.device_count() > 1 else places[:1]
        for what, gpus in () if options.only_kills else places:
            rows.add(f"one-sided to {what}", rate(ONE_SIDED, bucket, count, gpus), "")
        struck = [(what, gpus, False) for what, gpus in places[:2]]
        for what, gpus, borrows in (*struck, ("the same GPU, reading in place", near, True)):
            told = killed(bucket, count, gpus, *kills, borrows=borrows)
            rows.add(f"sender killed, {what}", told, "all live")
    rows.show()
    Console().print(describe())


if __name__ == "__main__":
    if sys.argv[1:2] == ["member"]:
        member(sys.argv[2:])
    else:
        main()
