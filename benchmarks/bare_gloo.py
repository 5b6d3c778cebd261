"""The floor: a bare gloo broadcast of the same bytes into the same kind of memory.

Two ranks over loopback, prefaulted buffers, the same bucket size, two operations in
flight; no packing, no digest, no control plane.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollout_side.memory.segment import HostSegment

_AHEAD = 2


def make_group(store: Any, rank: int) -> Any:
    """A gloo group of two, straight from torch."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
    options._timeout = timedelta(seconds=120)
    return dist.ProcessGroupGloo(store, rank, 2, options)


def move(group: Any, data: torch.Tensor, num_bytes: int, bucket_bytes: int, ring: int) -> float:
    """Send or receive ``num_bytes`` bucket by bucket; returns the seconds it took."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    began, flight = time.perf_counter(), deque()
    for index in range(num_bytes // bucket_bytes):
        if len(flight) == _AHEAD:
            flight.popleft().wait()
        at = (index % ring) * bucket_bytes
        flight.append(group.broadcast([data[at : at + bucket_bytes]], options))
    for work in flight:
        work.wait()
    return time.perf_counter() - began


class BareGloo:
    """The sending side, with its receiver in a process of its own."""

    def __init__(self, num_bytes: int, bucket_bytes: int) -> None:
        self._num_bytes, self._bucket_bytes = num_bytes, bucket_bytes
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._peer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_gloo", str(self._store.port),
             str(num_bytes), str(bucket_bytes)],
            stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._group = make_group(self._store, 0)
        self._buffers = torch.ones(2 * bucket_bytes, dtype=torch.uint8)

    def run(self) -> float:
        """Seconds of one transfer."""
        assert self._peer.stdin is not None
        self._peer.stdin.write("go\n")
        self._peer.stdin.flush()
        return move(self._group, self._buffers, self._num_bytes, self._bucket_bytes, ring=2)

    def close(self) -> None:
        """End the receiver."""
        assert self._peer.stdin is not None
        self._peer.stdin.close()
        self._peer.wait(10)


def _receive(port: int, num_bytes: int, bucket_bytes: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = make_group(store, 1)
    segment = HostSegment.allocate(num_bytes)
    for _ in sys.stdin:
        move(group, segment.data, num_bytes, bucket_bytes, ring=num_bytes // bucket_bytes)


if __name__ == "__main__":
    _receive(*map(int, sys.argv[1:]))
