"""What came to nothing stays so: repeated commits, bytes that come after a discard."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rollout_side.agent.agent import Agent
from rollout_side.agent.serving import VersionCopy
from rollout_side.config import AgentConfig
from rollout_side.engine import SwitchTimes
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import StagedVersion
from tests.doubles.engine import EngineDouble
from tests.waits import eventually
from weft_rl.contract.errors import LoadFailedError, NotReadyError, TransferAbortedError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta

MANIFEST = plan_buckets([TensorMeta("w", DataType.FLOAT32, (4,))])
BASE = PolicyVersion("base", 1)


class _LoadingInPlace(EngineDouble):
    loading = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.applied: list[str] = []

    async def apply_base(self, transfer_id: str, *_: Any) -> SwitchTimes:
        self.applied.append(transfer_id)
        return SwitchTimes()


def _stage(store: WorkerStore, transfer_id: str, version: PolicyVersion = BASE) -> None:
    is_adapter = version.policy != BASE_POLICY
    segment = store.reserve(transfer_id, MANIFEST.wire_bytes, adapter=is_adapter)
    store.put_staged(StagedVersion(transfer_id, version, MANIFEST, segment, b"digest"))


async def test_a_commit_that_failed_does_not_succeed_when_it_is_repeated() -> None:
    engine = EngineDouble({"w": torch.zeros(4)})
    agent = Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine)
    _stage(engine.store, "t1")
    engine.fail_next_load = LoadFailedError("out of slots")
    with pytest.raises(LoadFailedError):
        await agent.serving.commit(VersionCopy("t1", BASE, b"digest"))
    with pytest.raises(NotReadyError, match="failed to load here before"):
        await agent.serving.commit(VersionCopy("t1", BASE, b"digest"))
    assert agent.serving.vector.base == 0
    _stage(engine.store, "t2")
    await agent.serving.commit(VersionCopy("t2", BASE, b"digest"))
    assert agent.serving.vector.base == 1


async def test_a_repeated_commit_does_not_bring_back_what_was_retired() -> None:
    """A clone of what is served already, whose order comes again after a later version."""
    engine = EngineDouble({"w": torch.zeros(4)})
    serving = Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine).serving
    old, new = PolicyVersion("math", 1), PolicyVersion("math", 2)
    for transfer_id, version in (("t1", old), ("clone", old), ("t2", new)):
        _stage(engine.store, transfer_id, version)
        await serving.commit(VersionCopy(transfer_id, version, b"digest", "{}"))
    await serving.retire([old])
    assert engine.store.usage().staged_transfer_ids == ()
    with pytest.raises(NotReadyError):
        await serving.commit(VersionCopy("clone", old, b"digest", "{}", alias=1))
    assert serving.vector.adapters["math"] == AdapterVersions(versions=(2,), alias=2)


async def test_a_base_that_is_loading_in_place_is_not_served_yet() -> None:
    """A clone in place of the number that is served: its commit is what ends the load."""
    engine = _LoadingInPlace({"w": torch.zeros(4)})
    serving = Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine).serving
    await serving.commit(VersionCopy("t1", BASE, b"digest"))
    await serving.commit(VersionCopy("t1", BASE, b"digest"))
    assert engine.applied == ["t1"]
    engine.loading = "clone"
    await serving.commit(VersionCopy("clone", BASE, b"digest"))
    assert engine.applied == ["t1", "clone"]


async def test_a_load_whose_caller_goes_away_is_carried_out() -> None:
    """The coordinator's deadline passes in the middle: half a load would mix weights."""
    engine = EngineDouble({"w": torch.zeros(4)})
    agent = Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine)
    _stage(engine.store, "t1")
    begun, go_on = asyncio.Event(), asyncio.Event()
    apply = engine.apply_base

    async def slow(*args: Any) -> SwitchTimes:
        begun.set()
        await go_on.wait()
        return await apply(*args)

    engine.apply_base = slow  # type: ignore[method-assign]
    order = asyncio.create_task(agent.serving.commit(VersionCopy("t1", BASE, b"digest")))
    await begun.wait()
    waiting = asyncio.create_task(
        agent.serving.commit(VersionCopy("t2", PolicyVersion("base", 2), b"digest"))
    )
    await asyncio.sleep(0)
    for task in (order, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert agent.serving.vector.base == 0
    go_on.set()
    await eventually(lambda: agent.serving.vector.base == 1)
    assert not agent.serving.dirty_reason
    # Its turn has ended; repeated, it succeeds.
    await agent.serving.commit(VersionCopy("t1", BASE, b"digest"))


def test_an_order_to_discard_may_come_before_the_last_bucket() -> None:
    store = WorkerStore(1 << 20, 1 << 20)
    segment = store.reserve("t1", MANIFEST.wire_bytes, adapter=False)
    store.discard("t1")
    with pytest.raises(TransferAbortedError):
        store.put_staged(StagedVersion("t1", BASE, MANIFEST, segment, b"digest"))
    assert store.usage().staging_bytes == 0
    _stage(store, "t2")
    assert store.usage().staging_bytes > 0
