"""Numbers that callers tell: followed with room to count on, refused by name beyond."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.calls import refusal
from tests.contract.conftest import Pool
from tests.doubles.registration import register
from tests.doubles.replicas import FakeReplica
from tests.doubles.trainer import FakeTrainer
from weft_rl.contract.names import MAX_FOLLOWED, AdapterVersions, VersionVector
from weft_rl.v1 import registry_pb2

LARGEST = 2**53 - 1
BEYOND = [MAX_FOLLOWED + 1, LARGEST]


async def _register(replica: FakeReplica, **fields: Any) -> registry_pb2.RegisterResponse:
    vector = fields.pop("vector", VersionVector())
    return await register(
        replica.registry,
        replica.capabilities,
        replica.reference,
        vector=vector,
        replica_id="r9",
        incarnation="i9",
        address="127.0.0.1:1",
        http_url="http://127.0.0.1:1",
        **fields,
    )


async def _trainer(pool: Pool, session_id: str = "", **told: int) -> FakeTrainer:
    made = pool.newcomer()
    made.session_id = session_id or made.session_id
    await made.acquire(**told)
    await made.put_manifest()
    return made


@pytest.mark.parametrize("number", BEYOND)
async def test_a_replica_that_tells_of_numbers_beyond_is_refused_and_changes_nothing(
    pool: Pool, number: int
) -> None:
    replica = await pool.replica()
    for fields in (
        {"last_epoch": number},
        {"last_coordinator_generation": number},
        {"vector": VersionVector(number)},
        {"vector": VersionVector(0, {"math": AdapterVersions((number,), number)})},
        {"retained_base_versions": [number]},
    ):
        assert await refusal(_register(replica, **fields)) == "INVALID_ARGUMENT/INVALID_REQUEST"
    replica.vector = VersionVector(number)
    assert await refusal(replica.heartbeat()) == "INVALID_ARGUMENT/INVALID_REQUEST"
    replica.vector = VersionVector()
    await replica.heartbeat()
    seen = await pool.seen()
    assert seen.coordinator_generation == 1
    assert [r.replica_id for r in seen.replicas] == ["r0"]
    assert (await (await pool.trainer()).push()).version.version == 1


@pytest.mark.parametrize("number", BEYOND)
async def test_so_is_a_trainer(pool: Pool, number: int) -> None:
    trainer = await pool.trainer()
    for told in ({"last_version": number}, {"last_fencing_token": number}):
        assert await refusal(trainer.acquire(**told)) == "INVALID_ARGUMENT/INVALID_REQUEST"
    assert trainer.token == 1


async def test_the_largest_that_is_followed_leaves_room_and_is_known_after_a_restart(
    pool: Pool,
) -> None:
    """A number that this catalog has counted to is followed."""
    replica = await pool.replica()
    trainer = await _trainer(pool, last_version=MAX_FOLLOWED, last_fencing_token=MAX_FOLLOWED)
    replica.epoch = MAX_FOLLOWED
    replica.registered.coordinator_id = "another"
    await replica.register()
    version = (await trainer.push()).version.version
    assert version > MAX_FOLLOWED
    await pool.restart()
    await replica.follow(pool.target)
    await replica.register()
    again = await _trainer(pool, session_id=trainer.session_id)
    assert again.token > MAX_FOLLOWED
    assert (await again.push()).version.version > version


async def test_versions_never_go_back_after_a_lost_catalog(pool: Pool) -> None:
    replica = await pool.replica()
    trainer = await _trainer(pool, last_version=MAX_FOLLOWED)
    await trainer.push()
    pool.catalog = pool.catalog.with_name("anew.db")
    await pool.restart(recover=True)
    await replica.follow(pool.target)
    assert await refusal(replica.register()) == "INVALID_ARGUMENT/INVALID_REQUEST"
