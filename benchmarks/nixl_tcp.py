"""``python -m benchmarks.nixl_tcp``: NIXL's WRITE over TCP, beside the stream plane and sockets.

Two processes on the loopback move buckets of host memory; no digest, no control plane. All kinds
take turns, so that other work of the machine slows each. ``nixl-cu12`` runs without CUDA.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # what it logs goes to standard output

import numpy as np

from benchmarks import bare_sockets
from benchmarks.machine import describe
from benchmarks.one_sided_planes import rate
from weft_rl.contract.backends import STREAM

_AHEAD = 2
_NUM_BUCKETS = 8
_BUCKET_BYTES = 64 * 2**20
_ROUNDS = 6


def _agent(name: str, *, polls: bool) -> Any:
    """Make an agent; one that polls has no thread, and moves bytes while it is asked for news."""
    nixl = importlib.import_module("nixl_cu12._api")
    return nixl.nixl_agent(name, nixl.nixl_agent_config(not polls, backends=["UCX"]))


def _registered(agent: Any, num_bytes: int) -> Any:
    memory = np.ones(num_bytes, np.uint8)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    return memory


def _receive(*, polls: bool) -> None:
    """Check the buckets of each round, as the process of a receiver."""
    agent = _agent("receiver", polls=polls)
    memory = _registered(agent, _NUM_BUCKETS * _BUCKET_BYTES)
    print(agent.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
    agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
    for number in range(1, _ROUNDS + 1):
        left = _NUM_BUCKETS
        while left:
            left -= sum(map(len, agent.get_new_notifs().values()))
        agent.send_notif("sender", b"here")
        assert (memory[::4096] == number).all(), "other bytes arrived than were sent"


def write(*, polls: bool) -> float:
    """Return the bytes per second of the median round, with two buckets under way."""
    peer = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.nixl_tcp", "--receive", *(["--polls"] if polls else [])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert peer.stdin is not None
    assert peer.stdout is not None
    agent = _agent("sender", polls=polls)
    memory = _registered(agent, _AHEAD * _BUCKET_BYTES)
    told, there = peer.stdout.readline().split()
    agent.add_remote_agent(bytes.fromhex(told))
    peer.stdin.write(agent.get_agent_metadata().hex() + "\n")
    peer.stdin.flush()

    def bucket(begin: int, index: int) -> Any:
        return agent.get_xfer_descs([(begin + index * _BUCKET_BYTES, _BUCKET_BYTES, 0)], "DRAM")

    requests = [
        agent.initialize_xfer("WRITE", bucket(memory.ctypes.data, index % _AHEAD),
                              bucket(int(there), index), "receiver", b"bucket")
        for index in range(_NUM_BUCKETS)
    ]  # fmt: skip
    rates = []
    for number in range(1, _ROUNDS + 1):
        memory.fill(number)
        began, flight = time.perf_counter(), deque[Any]()
        for request in requests:
            if len(flight) == _AHEAD:
                _finish(agent, flight.popleft())
            agent.transfer(request)
            flight.append(request)
        for request in flight:
            _finish(agent, request)
        while not agent.get_new_notifs():
            pass
        rates.append(_NUM_BUCKETS * _BUCKET_BYTES / (time.perf_counter() - began))
    assert peer.wait(10) == 0
    return statistics.median(rates[1:])


def _finish(agent: Any, request: Any) -> None:
    while (state := agent.check_xfer_state(request)) == "PROC":
        pass
    assert state == "DONE", state


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--polls", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        _receive(polls=args.polls)
        return

    num_bytes = _NUM_BUCKETS * _BUCKET_BYTES

    def sockets(count: int) -> float:
        return statistics.median(bare_sockets.measure(count, num_bytes) for _ in range(_ROUNDS))

    def lanes() -> float:
        return float(rate(STREAM, _BUCKET_BYTES, _NUM_BUCKETS, ["", ""]).split()[0]) * 1e9

    name = "NIXL " + metadata.version("nixl-cu12")
    kinds: dict[str, Callable[[], float]] = {
        "bare sockets, 1 connection": partial(sockets, 1),
        "bare sockets, 4 connections": partial(sockets, 4),
        "stream plane": lanes,
        f"{name}, both ends poll": partial(write, polls=True),
        f"{name}, threads of UCX": partial(write, polls=False),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):
        for kind, run in kinds.items():
            rates[kind].append(run() / 1e9)
    print(describe())
    for kind, each in rates.items():
        print(f"{kind}: {statistics.median(each):.2f} GB/s ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
