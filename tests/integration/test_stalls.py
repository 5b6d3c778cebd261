"""Workers whose threads hang while their process answers: real coordinator, real gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, until, weights
from trainer_side import Publisher
from weft_rl.contract.errors import StalledError
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: More than the pauses between two words of a thread that works.
STALL_SECONDS = 2.0


class Hang:
    """Blocks the threads that come to a call, until it ends."""

    def __init__(self) -> None:
        self.reached, self._over = threading.Event(), threading.Event()

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def hanging(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            self._over.wait(60.0)
            return call(*args, **kwargs)

        return hanging

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with running_pool(tmp_path / "weft.db", stall_seconds=STALL_SECONDS) as running:
        yield running


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.end()


def add(pool: Pool, replica_id: str) -> EngineDouble:
    engine = EngineDouble(weights(Model(50)), base_copies=1)
    pool.add_replica(replica_id, engine)
    return engine


def states(pool: Pool) -> dict[str, inspect_pb2.ReplicaState.ValueType]:
    with open_channel(pool.target) as channel:
        answer = InspectServiceStub(channel).ListReplicas(inspect_pb2.ListReplicasRequest())
        return {replica.replica_id: replica.state for replica in answer.replicas}


def routed(pool: Pool) -> list[str]:
    with open_channel(pool.target) as channel:
        stream = InspectServiceStub(channel).WatchRoutes(inspect_pb2.WatchRoutesRequest())
        names = [route.replica_id for route in next(iter(stream)).routes]
        stream.cancel()
        return names


def test_a_push_goes_on_without_a_hung_worker_which_comes_back_by_itself(
    pool: Pool, hang: Hang
) -> None:
    healthy, stuck = add(pool, "replica-0"), add(pool, "replica-1")
    stuck.store.reserve = hang.before(stuck.store.reserve)  # type: ignore[method-assign]
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        version = publisher.push_base(Model(1), require=1).version
        assert hang.reached.is_set()
        suspect = inspect_pb2.REPLICA_STATE_SUSPECT
        assert states(pool)["replica-1"] == suspect
        assert publisher.push_base(Model(2)).version.version == version.version + 1, (
            "all but the suspect"
        )
        assert states(pool)["replica-1"] == suspect, "a fresh thread does not answer for it"
        assert routed(pool) == ["replica-0"]
        hang.end()
        ready = inspect_pb2.REPLICA_STATE_READY
        until(lambda: states(pool) == {"replica-0": ready, "replica-1": ready})
        assert publisher.push_base(Model(3)).version.version == version.version + 2
    assert pool.run(healthy.holds())["firsts"] == pool.run(stuck.holds())["firsts"]


def test_the_only_replica_hangs_and_is_named_at_once(pool: Pool, hang: Hang) -> None:
    engine = add(pool, "replica-0")
    engine.store.reserve = hang.before(engine.store.reserve)  # type: ignore[method-assign]
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        with pytest.raises(StalledError, match="replica-0 makes no progress") as raised:
            publisher.push_base(Model(1), require="all")
        assert raised.value.metadata["member"] == "replica-0"
        assert states(pool) == {"replica-0": inspect_pb2.REPLICA_STATE_SUSPECT}
        until(lambda: routed(pool) == ["replica-0"])  # its engine serves what the pool serves
        hang.end()
        publisher.push_base(Model(2))
    assert states(pool) == {"replica-0": inspect_pb2.REPLICA_STATE_READY}
