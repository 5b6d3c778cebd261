"""One run: a pool, requests, and whether it is a pool like any other afterwards."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from rollout_side.spill.folder import SpillSettings
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.fuzz.run import Fuzzer, Report
from tests.fuzz.world import REPLICA, World
from tests.integration.models import Model, same, weights
from trainer_side import Publisher
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2 as inspect
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_FOR_EVER = 1e9


def fuzz(
    folder: Path, *, seed: int, seconds: float = _FOR_EVER, num_calls: int = sys.maxsize
) -> Report:
    """Send requests for so long, or so many, then push as usual.

    Args:
        folder: Where the catalog and a spill directory go.
        seed: Which requests are made; what they meet depends on the moment, too.
    """
    report, chance = Report(), random.Random(seed)
    spill = SpillSettings(directory=str(folder / "spill"), capacity_bytes=2**24, owner=REPLICA)
    engine = EngineDouble(weights(Model()), base_copies=2, spill=spill)
    with running_pool(folder / "weft.db", lease_seconds=3.0) as pool:
        pool.add_replica(REPLICA, engine)
        _push_as_usual(pool, engine, seed=1)
        _run(pool, _world(pool, engine, chance), report, chance, num_calls, seconds)
        _list_everything(pool)
        _push_as_usual(pool, engine, seed=2)
    return report


def _world(pool: Pool, engine: EngineDouble, chance: random.Random) -> World:
    """A world, made on the pool's loop."""

    async def make() -> World:
        return World(pool, engine, chance)

    return pool.run(make())


def _run(
    pool: Pool,
    world: World,
    report: Report,
    chance: random.Random,
    num_calls: int,
    seconds: float,
) -> None:
    async def run() -> None:
        try:
            await Fuzzer(world, report, chance).run(num_calls, seconds)
        finally:
            await world.close()

    pool.start(run()).result()


def _push_as_usual(pool: Pool, engine: EngineDouble, *, seed: int) -> None:
    model = Model(seed)
    with Publisher(pool.target, trainer_id="usual", timeout_seconds=20) as publisher:
        publisher.push_base(model)
    assert same(engine.base, weights(model))


def _list_everything(pool: Pool) -> None:
    with open_channel(pool.target) as channel:
        stub = InspectServiceStub(channel)
        shown = stub.GetPool(inspect.GetPoolRequest(), timeout=5)
        assert REPLICA in [replica.replica_id for replica in shown.replicas]
        assert stub.ListReplicas(inspect.ListReplicasRequest(), timeout=5).replicas
        assert stub.ListTransfers(inspect.ListTransfersRequest(), timeout=5).transfers
        for policy in stub.ListPolicies(inspect.ListPoliciesRequest(), timeout=5).policies:
            ask = inspect.ListVersionsRequest(policy=policy.policy)
            stub.ListVersions(ask, timeout=5)
