"""A trainer and a replica of the release before, against this coordinator (tests/former)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, same, weights
from trainer_side import Publisher
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.pool_listing import get_pool
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_FORMER = Path(__file__).parents[1] / "former"
_REVISION = 3
_REFUSAL = (
    f"speaks protocol revision {_REVISION}, the coordinator protocol revision {PROTOCOL_REVISION}"
)


def test_a_former_trainer_is_refused_and_keeps_nothing(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, tmp_path: Path
) -> None:
    said = _run("trainer.py", pool.target, tmp_path)
    assert (said["error"], said["reason"]) == ("NotReadyError", "REVISION_MISMATCH")
    assert said["metadata"] == {
        "caller_revision": str(_REVISION),
        "coordinator_revision": str(PROTOCOL_REVISION),
        "older": "caller",
    }
    expected = f"the trainer {_REFUSAL}: update the trainer, which is older"
    assert expected in said["message"]
    assert str(publisher.push_base(Model(1))) == "base@1"  # neither owned nor leased nor burnt
    assert all(same(engine.base, weights(Model(1))) for engine in engines)


def test_a_former_replica_is_refused_and_serves_on(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, tmp_path: Path
) -> None:
    said = _run("replica.py", pool.target, tmp_path)
    assert f"the replica {_REFUSAL}: update the replica, which is older" in said["registration"]
    assert said["heartbeat"] == "REPLICA_UNKNOWN"  # told to register, whatever it reports
    assert said["serves"] == 0
    with open_channel(pool.target) as channel:
        seen = get_pool(InspectServiceStub(channel), 10)
    assert [replica.replica_id for replica in seen.replicas] == ["replica-0", "replica-1"]
    assert str(publisher.push_base(Model(1))) == "base@1"
    assert all(same(engine.base, weights(Model(1))) for engine in engines)


def _run(program: str, target: str, folder: Path) -> Any:
    """Run a program of tests/former with that release's packages; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(_FORMER / program), target],
        env={**os.environ, "PYTHONPATH": str(_FORMER / "release.zip")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
