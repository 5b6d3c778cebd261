"""A coordinator whose catalog was lost, over real stubs: replicas stay, and the pool serves
what they hold."""

from __future__ import annotations

from rich.console import Console

from tests.contract.conftest import Pool
from tests.doubles.replicas import FakeReplica
from tests.waits import eventually
from weft_rl.cli.status import render
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.policies.numbering import LEAP
from weft_rl.v1 import admin_pb2, inspect_pb2, types_pb2

MATH_1 = types_pb2.PolicyVersion(policy="math", version=1)
OTHER = b"\2" * 8


async def _lose(pool: Pool, *replicas: FakeReplica) -> None:
    """Another coordinator at another catalog; replicas go on with what they have."""
    pool.catalog = pool.catalog.with_name(f"{pool.catalog.stem}-anew.db")
    await pool.restart(publish_again_after_seconds=0.2, recover=True)
    for replica in replicas:
        await replica.follow(pool.target)


async def _serves_math(pool: Pool, *replicas: FakeReplica) -> None:
    async def are_ready() -> bool:
        return all([await replica.heartbeat() for replica in replicas])

    async def is_served() -> bool:
        return "math" in {entry.policy for entry in (await pool.seen()).version_vector.adapters}

    for condition in (is_served, are_ready):
        await eventually(condition)


async def test_replicas_stay_and_what_they_hold_is_served(pool: Pool) -> None:
    replicas = [await pool.replica(name) for name in ("r0", "r1")]
    trainer = await pool.trainer()
    pushed = await trainer.push()
    await _lose(pool, *replicas)
    answers = [await replica.register() for replica in replicas]
    assert [answer.coordinator_generation for answer in answers] == [2, 2], "it was 1 before"
    await _serves_math(pool, *replicas)
    (version,) = await pool.versions()
    assert version.state == inspect_pb2.VERSION_STATE_COMMITTED
    assert version.content_digest == pushed.content_digest
    assert version.layout_digest == pushed.layout_digest
    again = pool.newcomer()
    lease = await again.acquire(last_version=1, last_fencing_token=5)
    assert lease.fencing_token > 5
    await again.put_manifest()
    assert (await again.push()).version.version == LEAP + 2, "above 1, by a leap"
    late = await pool.replica("r2")
    assert late.registered.coordinator_generation == 2


async def test_other_bytes_under_one_number_are_named_and_served_by_nobody(pool: Pool) -> None:
    replicas = [await pool.replica(name) for name in ("r0", "r1")]
    trainer = await pool.trainer()
    await trainer.push()
    replicas[1].digests[PolicyVersion("math", 1)] = OTHER
    await _lose(pool, *replicas)
    for replica in replicas:
        await replica.register()

    async def is_found() -> bool:
        for replica in replicas:
            await replica.heartbeat()
        return any(policy.conflicts for policy in (await pool.seen()).policies)

    await eventually(is_found)
    found = await pool.seen()
    (policy,) = found.policies
    assert (policy.served_version, policy.publish_again_version) == (0, 1)
    (conflict,) = policy.conflicts
    assert {c.content_digest: list(c.replica_ids) for c in conflict.contents} == {
        b"\1" * 8: ["r0"],
        OTHER: ["r1"],
    }
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(found))
    assert "math@1 is not served" in capture.get()
    assert "0101010101010101 at r0; 0202020202020202 at r1" in capture.get()

    async def are_dropped() -> bool:
        for replica in replicas:
            await replica.heartbeat()
        return not any(replica.vector.adapters for replica in replicas)

    await eventually(are_dropped)


async def test_orders_of_operators_outlive_the_catalog(pool: Pool) -> None:
    replicas = [await pool.replica(name) for name in ("r0", "r1")]
    trainer = await pool.trainer()
    for _ in range(3):
        await trainer.push()
    await pool.order("Rollback", admin_pb2.RollbackRequest(policy="math", to_version=1))
    cordon = admin_pb2.CordonRequest(replica_id="r1", reason="nonsense", no_pushes=True)
    await pool.order("Cordon", cordon)
    assert [await replica.heartbeat() for replica in replicas] == [True, False]
    num_switches = len(replicas[0].switches)
    await _lose(pool, *replicas)
    for replica in replicas:
        await replica.register()
    assert "nonsense" in replicas[1].refusing

    async def stands_for_1() -> bool:
        await replicas[0].heartbeat()
        found = {a.policy: a.alias for a in (await pool.seen()).version_vector.adapters}
        return found == {"math": 1}

    await eventually(stands_for_1)
    assert len(replicas[0].switches) == num_switches
    assert await replicas[0].heartbeat()
    states = {r.replica_id: r.state for r in (await pool.seen()).replicas}
    assert states["r1"] == inspect_pb2.REPLICA_STATE_OUT_OF_SERVICE
