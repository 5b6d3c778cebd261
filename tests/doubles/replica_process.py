"""A replica process with the engine double: what a push costs without an engine.

``python -m tests.doubles.replica_process COORDINATOR REPLICA_ID NUM_TENSORS ELEMENTS``: its
base has NUM_TENSORS float32 tensors of ELEMENTS each. It answers each line of its
standard input with a line of JSON about what it serves, and ends when that closes.
With ``--keep`` it keeps what is loaded, with ``--no-copies`` no copy beside it that a delta could
change; with ``--worker`` it receives in a worker process; with
``--ranks`` a second process is a further rank;
with ``--sleeps`` it can be put to sleep, on the GPU that trainers of the matrix use;
with ``--in-place`` it loads bases as they come, and others can clone what it serves; with
``--traces`` it exports spans; with ``--bfloat16`` its base is of that type; with ``--listen HOST``
it is reached there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig
from tests.doubles.agent import serve, wait_registered
from tests.doubles.engine import EngineDouble
from tests.doubles.ranks import TwoRankDouble
from tests.doubles.replica_weights import base_weights
from tests.doubles.worker import WorkerDouble
from weft_rl.contract.group import SITE_VARIABLE
from weft_rl.contract.tensors import DataType
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.security.guard import AccessFile
from weft_rl.rpc.server import Security
from weft_rl.telemetry.traces import open_tracer
from weft_rl.tracing import NO_TRACER


async def describe(agent: Agent, engine: EngineDouble | WorkerDouble) -> dict[str, Any]:
    """What is served, and what the engine holds."""
    return {
        "base": agent.serving.vector.base,
        "adapters": {name: list(e.versions) for name, e in agent.serving.vector.adapters.items()},
        "asleep": getattr(engine, "asleep", None) is not None,
        **await engine.holds(),
    }


async def main(coordinator: str, replica_id: str, num_tensors: int, elements: int) -> None:
    """Serve until standard input closes, or the worker ends."""
    make: type[EngineDouble] | type[WorkerDouble] = EngineDouble
    if "--worker" in sys.argv:
        make = WorkerDouble
    elif "--ranks" in sys.argv:
        make = TwoRankDouble
    settings: dict[str, Any] = (
        {"in_place": True, "is_readable": True} if "--in-place" in sys.argv else {}
    )
    if "--readable" in sys.argv:
        settings["is_readable"] = True
    if "--sleeps" in sys.argv:
        settings |= {"gpu_uuids": ("GPU-a",), "can_sleep": True}
    if "--staging" in sys.argv:
        settings["staging_capacity_bytes"] = int(_said("--staging"))
    tracer = NO_TRACER
    if "--traces" in sys.argv:
        settings["tracer"] = tracer = open_tracer("weft-replica", replica_id)
    dtype = torch.float32
    if "--bfloat16" in sys.argv:
        dtype, settings["base_dtype"] = torch.bfloat16, DataType.BFLOAT16
    engine = make(
        base_weights(num_tensors, elements, dtype),
        keep_base="--keep" in sys.argv,
        base_copies=0 if "--no-copies" in sys.argv else 1,
        **settings,
    )
    if isinstance(engine, EngineDouble):
        engine.lies_in_two = "--readable" not in sys.argv
    listen = f"{_said('--listen') or '127.0.0.1'}:0"
    config = AgentConfig(
        coordinator=coordinator,
        replica_id=replica_id,
        listen=listen,
        advertise_host=_said("--advertise"),
        site=os.environ.get(SITE_VARIABLE, ""),
    )
    agent = Agent(config, engine)
    server = await serve(agent, _security(), tracer)
    running = asyncio.create_task(agent.run())
    await wait_registered(agent, running)
    print("ready", flush=True)
    tasks = {asyncio.create_task(_answer(agent, engine))}
    if isinstance(engine, WorkerDouble | TwoRankDouble):
        tasks.add(asyncio.create_task(engine.wait_ended()))
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)
    if isinstance(engine, WorkerDouble | TwoRankDouble):
        engine.close()
        os._exit(0)  # threads wait for the other of the two: input, or the worker


def _said(option: str) -> str:
    """Return the word that follows an option; empty where it is not given."""
    return sys.argv[sys.argv.index(option) + 1] if option in sys.argv else ""


def _security() -> Security | None:
    """With ``--access FILE`` it asks callers who they are; what it shows is in the environment."""
    if "--access" not in sys.argv:
        return Security(insecure=True) if "--listen" in sys.argv else None
    file = AccessFile(Path(_said("--access")))
    return Security(credentials=Credentials.from_environment(), access=file)


async def _answer(agent: Agent, engine: EngineDouble | WorkerDouble) -> None:
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await describe(agent, engine)), flush=True)


if __name__ == "__main__":
    target, name, tensors, size = sys.argv[1:5]
    asyncio.run(main(target, name, int(tensors), int(size)))
