"""``python -m benchmarks.figures``: five figures beside those that are stored; 20 % more warns.

Adapter push, step of the coordinator, listings, memory, and modules that a push passes. Times are
divided by a loop that is run beside them, so that machines compare: bare gRPC calls for the push,
plain Python for the others. It never fails because a figure grew: a timed test that fails on a busy
machine is no test. ``--write`` stores the medians of three runs, with hardware,
versions and command.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.listings import ListedCoordinator
from benchmarks.machine import describe, peak_bytes, reset_peak, resident_bytes
from benchmarks.push import model_of
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, peft_of, weights
from tests.integration.traced_push import PROCESSES, trace_push
from tests.unit.coordinator.decisions.machine import Machine
from tests.unit.coordinator.messages.large_pool import large_pool
from trainer_side import Publisher
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.watchers import Feed
from weft_rl.coordinator.services.inspect import InspectServicer
from weft_rl.v1 import inspect_pb2

STORED = Path(__file__).parent / "results" / "figures.json"
#: A figure that is larger than the stored one by more than this share warns.
TOLERANCE = 0.2
_ROUNDS = 40
_ROUNDS_TO_WRITE = 3
_PUSHES = 150
_CALLS = 10
_TENSORS, _ELEMENTS = 16, 1 << 20


def measure(work: Path) -> dict[str, float]:
    """Return the figures by their names; in each, less is better."""
    return {
        "adapter push, in bare gRPC calls": _adapter_push(work / "adapter.db"),
        "heartbeat of one of 300 replicas, in loops": _step(),
        "listing of 100 replicas, in loops": _listing(),
        "memory of a push, by its bytes": _memory(work / "memory.db"),
        **_modules(work),
    }


def compare(stored: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Return a line for each figure that grew by more than is tolerated, or is not stored."""
    warnings = []
    for name, value in measured.items():
        if name not in stored:
            warnings.append(f"{name}: not stored; python -m benchmarks.figures --write stores it")
        elif value > stored[name] * (1 + TOLERANCE):
            grown = value / stored[name] - 1
            warnings.append(f"{name}: {value:.4g}, {grown:.0%} more than {stored[name]:.4g}")
    return warnings


def _adapter_push(catalog: Path) -> float:
    """Divide the fastest push by the fastest run of bare calls, each push followed by one."""
    pushes, calls = list[float](), list[float]()
    with running_pool(catalog) as pool, _bare_call() as call:
        pool.add_replica("replica-0", EngineDouble(weights(Model())))
        with Publisher(pool.target, trainer_id="bench", progress=None) as publisher:
            adapter = peft_of(Model(), 1)
            publisher.push_adapter(adapter, "math")  # forms the group
            for _ in range(_PUSHES):
                pushes.append(_seconds(lambda: publisher.push_adapter(adapter, "math")))
                calls.append(_seconds(lambda: [call() for _ in range(_CALLS)]))
    return min(pushes) / min(calls) * _CALLS


@contextmanager
def _bare_call() -> Iterator[Callable[[], object]]:
    """A call of a server that does nothing, on an event loop and a thread of its own."""

    async def answer(request: bytes, context: object) -> bytes:
        return request

    method: Any = grpc.unary_unary_rpc_method_handler(answer)
    loop, bound = asyncio.new_event_loop(), threading.Event()
    target, done = "", asyncio.Event()

    async def serve() -> None:
        nonlocal target
        server = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler("bare.Service", {"Call": method})
        server.add_generic_rpc_handlers((handler,))
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        bound.set()
        await done.wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    bound.wait()
    try:
        with grpc.insecure_channel(target) as channel:
            call: Any = channel.unary_unary("/bare.Service/Call")
            yield lambda: call(b"")
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def _in_loops(work: Callable[[], object], times: int) -> float:
    """Divide the least CPU time of ``work`` by that of a loop, run in turn.

    The least of many, as others who use the machine only ever add to it.
    """
    taken, loops = list[float](), list[float]()
    for _ in range(_ROUNDS):
        for seconds, run in ((taken, work), (loops, _loop)):
            began = time.thread_time()
            run()
            seconds.append(time.thread_time() - began)
    return min(taken) / times / min(loops)


def _loop() -> None:
    """Run some plain Python: a table, text and a digest; some milliseconds."""
    table: dict[str, int] = {}
    for i in range(5_000):
        table[f"{i % 997}"] = table.get(f"{i % 991}", 0) + 1
    hashlib.sha256(json.dumps(table).encode()).digest()


def _step() -> float:
    machine = Machine().pool(*(f"replica-{i:04d}" for i in range(300)))
    beats = [events.Heartbeat(0, r.replica_id, r.incarnation, r.report)
             for r in machine.state.replicas.values()]  # fmt: skip

    def beat() -> None:
        for event in beats:
            machine.do(event)

    return _in_loops(beat, len(beats))


def _listing() -> float:
    coordinator = ListedCoordinator(large_pool(100, 30))
    servicer = InspectServicer(cast(Driver, coordinator), Feed())
    request = inspect_pb2.GetPoolRequest(share_version_vectors=True)

    def ask() -> None:
        answer = asyncio.run(servicer.GetPool(request, cast(Any, None)))
        assert len(answer.SerializeToString()) > 300

    return _in_loops(ask, 1)


def _memory(catalog: Path) -> float:
    """Divide what a push of a base adds to this process at its peak by the bytes of the base.

    It is trainer and replica in one: buffers of both, and the base that is staged.
    """
    model = model_of(_TENSORS, _ELEMENTS)
    with running_pool(catalog) as pool:
        pool.add_replica("replica-0", EngineDouble(weights(model)))
        with Publisher(pool.target, trainer_id="bench", progress=None) as publisher:
            publisher.push_base(model)  # forms the group, fills what is kept
            before = resident_bytes()
            reset_peak()
            publisher.push_base(model)
            return (peak_bytes() - before) / (4 * _TENSORS * _ELEMENTS)


def _modules(work: Path) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        trace = trace_push(work, monkeypatch)
    return {f"modules of a push, {name}": len(trace.modules(name)) for name in PROCESSES}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measure, print a table and its warnings; store it if told so."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"store it in {STORED.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = list[dict[str, float]]()
    for _ in range(_ROUNDS_TO_WRITE if args.write else 1):
        with tempfile.TemporaryDirectory() as work:
            rounds.append(measure(Path(work)))
    measured = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    stored = json.loads(STORED.read_text())["figures"] if STORED.exists() else {}
    table = Table("figure", "stored", "measured")
    for name, value in measured.items():
        table.add_row(name, f"{stored[name]:.4g}" if name in stored else "-", f"{value:.4g}")
    Console(width=100).print(table)
    print(f"{describe()}\nload:     {os.getloadavg()[0]:.1f}")
    if args.write:
        figures = {name: float(f"{value:.4g}") for name, value in measured.items()}
        kept = {"measured": describe().splitlines(), "figures": figures}
        STORED.write_text(json.dumps(kept, indent=2) + "\n")
        return
    for warning in compare(stored, measured):
        print(f"WARNING: {warning}")


if __name__ == "__main__":
    main()
