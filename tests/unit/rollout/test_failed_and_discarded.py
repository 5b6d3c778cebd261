"""What came to nothing stays so: repeated commits, bytes that come after a discard."""

from __future__ import annotations

import pytest
import torch

from rollout_side.agent import Agent
from rollout_side.config import AgentConfig
from rollout_side.staged import StagedVersion, WorkerStore
from tests.pool import EngineDouble
from weft.contract.bucket_plan import plan_buckets
from weft.contract.errors import LoadFailedError, NotReadyError, TransferAbortedError
from weft.contract.names import PolicyVersion
from weft.contract.tensors import DataType, TensorMeta

MANIFEST = plan_buckets([TensorMeta("w", DataType.FLOAT32, (4,))])
BASE = PolicyVersion("base", 1)


def _stage(store: WorkerStore, transfer_id: str) -> None:
    segment = store.reserve(transfer_id, MANIFEST.wire_bytes, adapter=False)
    store.put_staged(StagedVersion(transfer_id, BASE, MANIFEST, segment, b"digest"))


async def test_a_commit_that_failed_does_not_succeed_when_it_is_repeated() -> None:
    engine = EngineDouble({"w": torch.zeros(4)})
    agent = Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine)
    _stage(engine.store, "t1")
    engine.fail_next_load = LoadFailedError("out of slots")
    with pytest.raises(LoadFailedError):
        await agent.commit("t1", BASE, "", b"digest")
    with pytest.raises(NotReadyError, match="failed to load here before"):
        await agent.commit("t1", BASE, "", b"digest")
    assert agent.vector.base == 0
    _stage(engine.store, "t2")
    await agent.commit("t2", BASE, "", b"digest")
    assert agent.vector.base == 1


def test_an_order_to_discard_may_come_before_the_last_bucket() -> None:
    store = WorkerStore(1 << 20, 1 << 20)
    segment = store.reserve("t1", MANIFEST.wire_bytes, adapter=False)
    store.discard("t1")
    with pytest.raises(TransferAbortedError):
        store.put_staged(StagedVersion("t1", BASE, MANIFEST, segment, b"digest"))
    assert store.usage().staging_bytes == 0
    _stage(store, "t2")
    assert store.usage().staging_bytes > 0
