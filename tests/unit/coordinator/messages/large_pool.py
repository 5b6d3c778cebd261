"""The state of a large pool: replicas that serve the same adapters, and are ready."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.coordinator.decisions.machine import CAPABILITIES
from weft_rl.contract.names import AdapterVersions, VersionVector
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.values import PolicyKind, StateReason


def large_pool(num_replicas: int, num_adapters: int) -> PoolState:
    """Each replica has a vector of its own, as heartbeats bring it."""
    names = [f"adapter-{i:04d}" for i in range(num_adapters)]
    versions = (997, 998, 999, 1000)
    policies = {"base": Policy("base", PolicyKind.BASE, 3, served_version=3, versions=(3,))} | {
        name: Policy(name, PolicyKind.ADAPTER, 1000, served_version=1000, versions=versions)
        for name in names
    }
    replicas = {}
    for i in range(num_replicas):
        replica_id = f"replica-{i:04d}"
        replicas[replica_id] = Replica(
            replica_id=replica_id,
            incarnation=f"{i:032x}",
            address=f"10.0.{i // 256}.{i % 256}:50052",
            http_url=f"http://10.0.{i // 256}.{i % 256}:8000/v1",
            model_name="Qwen/Qwen3-30B-A3B-Instruct-2507",
            capabilities=CAPABILITIES,
            vector=VersionVector(3, {name: AdapterVersions(versions, 1000) for name in names}),
            last_heard=100.0,
            announced=StateReason.READY,
            routed=True,
        )
    state = PoolState(fingerprint="f" * 64, architecture="Tiny", references_known=frozenset({""}))
    return replace(state, replicas=replicas, policies=policies)
