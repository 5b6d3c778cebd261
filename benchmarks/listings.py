"""``python -m benchmarks.listings``: what is listed of a large pool, how large and how fast.

The listings of a coordinator over the state of 1,000 replicas that serve 100 adapters
each, in this process; ``weft status`` and ``weft routes`` are processes that ask it.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from tests.unit.coordinator.messages.large_pool import large_pool
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.live_groups import LiveGroups
from weft_rl.coordinator.runtime.watchers import Feed, RouteFeed
from weft_rl.coordinator.services.inspect import InspectServicer
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub, add_InspectServiceServicer_to_server

_MIB = 2**20


class ListedCoordinator:
    """Of a coordinator's driver, what its listings ask for."""

    unwritten_reason = ""

    def __init__(self, state: PoolState) -> None:
        self.state, self.routes, self.groups = state, RouteFeed(), LiveGroups(lambda event: None)

    def now(self) -> float:
        return 101.0

    def push(self, version: PolicyVersion) -> None:
        """Every replica serves another version of an adapter."""
        replicas = {
            name: replace(replica, vector=replica.vector.with_adapter(version))
            for name, replica in self.state.replicas.items()
        }
        self.state = replace(self.state, replicas=replicas)
        self.routes.change(replicas)


@asynccontextmanager
async def _serving(coordinator: ListedCoordinator) -> AsyncIterator[str]:
    server = grpc.aio.server()
    driver = cast(Driver, coordinator)
    servicer = InspectServicer(driver, Feed())
    add_InspectServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        coordinator.routes.close()
        await server.stop(0)


def _shown(messages: list[Any], seconds: float) -> str:
    sizes = [message.ByteSize() for message in messages]
    return f"{len(sizes)} of at most {max(sizes) / _MIB:.3f} MiB in {seconds * 1e3:.0f} ms"


async def _paged(ask: Callable[[str], Any]) -> tuple[list[Any], float]:
    began, messages, token = time.perf_counter(), list[Any](), ""
    while True:
        messages.append(await ask(token))
        token = messages[-1].next_page_token
        if not token:
            return messages, time.perf_counter() - began


async def _watched(call: Any) -> tuple[list[Any], float]:
    began, messages = time.perf_counter(), list[Any]()
    while not messages or messages[-1].more:
        messages.append(await call.read())
    return messages, time.perf_counter() - began


async def measure(table: Table, num_replicas: int, num_adapters: int) -> None:
    """Ask for everything once, fill the table."""
    coordinator = ListedCoordinator(large_pool(num_replicas, num_adapters))
    async with _serving(coordinator) as target, open_aio_channel(target) as channel:
        stub: Any = InspectServiceStub(channel)  # type: ignore[no-untyped-call]
        for shared in (False, True):
            began = time.perf_counter()
            pool = await stub.GetPool(pb.GetPoolRequest(share_version_vectors=shared))
            what = "vectors shared" if shared else "vectors in each"
            seconds = time.perf_counter() - began
            table.add_row(
                f"GetPool, {what}: {len(pool.replicas)} replicas", _shown([pool], seconds)
            )

            def ask(token: str, shared: bool = shared) -> Any:
                request = pb.ListReplicasRequest(page_token=token, share_version_vectors=shared)
                return stub.ListReplicas(request)

            table.add_row(f"ListReplicas, {what}", _shown(*await _paged(ask)))
        call = stub.WatchRoutes(pb.WatchRoutesRequest())
        table.add_row("WatchRoutes, the whole list", _shown(*await _watched(call)))
        coordinator.push(PolicyVersion("adapter-0000", 1001))
        table.add_row("the same, after a push", _shown(*await _watched(call)))
        coordinator.routes.change(["replica-0000"])
        table.add_row("the same, after a change of one", _shown(*await _watched(call)))
        call.cancel()
        for words in (["status"], ["status", "--json"], ["routes"]):
            command = [sys.executable, "-m", "weft_rl", *words, "--coordinator", target]
            began = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
            )
            code = await process.wait()
            seconds = time.perf_counter() - began
            table.add_row(f"weft {' '.join(words)}", f"{seconds:.1f} s, exit code {code}")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=100)
    args = parser.parse_args()
    table = Table("what", "measured")
    asyncio.run(measure(table, args.replicas, args.adapters))
    print(describe())
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
