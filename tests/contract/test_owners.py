"""Who owns a policy, over restarts of the coordinator and real stubs: its owner goes on, nobody
takes it from a living one, and a token that was fenced stays so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc
import pytest

from tests.contract.calls import refusal
from tests.contract.conftest import Pool
from tests.doubles.trainer import FakeTrainer
from tests.waits import eventually
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import admin_pb2, publish_pb2


async def _again(pool: Pool, former: FakeTrainer) -> FakeTrainer:
    """The same process, with a connection to the coordinator that is up now."""
    made = pool.newcomer(former.trainer_id, former.policy)
    made.session_id, made.token = former.session_id, former.token
    return made


def _renewal(trainer: FakeTrainer) -> Awaitable[publish_pb2.RenewLeaseResponse]:
    request = publish_pb2.RenewLeaseRequest(
        policy=trainer.policy, fencing_token=trainer.token, session_id=trainer.session_id
    )
    return trainer.stub.RenewLease(request)


@pytest.mark.parametrize("has_pushed", [True, False])
async def test_a_living_owner_keeps_its_policy(pool: Pool, has_pushed: bool) -> None:
    await pool.restart(lease_seconds=60.0)
    await pool.replica()
    former = await pool.trainer()
    if has_pushed:
        await former.push()
    await pool.restart(lease_seconds=60.0)
    assert await refusal(pool.newcomer("other").acquire()) == "ALREADY_EXISTS/POLICY_OWNED"
    forget = admin_pb2.ForgetPolicyRequest(policy="math")
    assert await refusal(pool.order("ForgetPolicy", forget)) == "ALREADY_EXISTS/POLICY_OWNED"
    trainer = await _again(pool, former)
    assert (await _renewal(trainer)).lease.fencing_token == former.token
    assert (await trainer.acquire()).fencing_token == former.token
    (policy,) = (await pool.seen()).policies
    assert policy.lease.trainer_id == "trainer"


async def test_one_that_died_meanwhile_is_waited_for_once_and_its_token_stays_fenced(
    pool: Pool,
) -> None:
    await pool.restart(lease_seconds=0.6)
    await pool.replica()
    former = await pool.trainer()
    await former.push()
    await pool.restart(lease_seconds=0.6)
    other = pool.newcomer("other")
    assert await refusal(other.acquire()) == "ALREADY_EXISTS/POLICY_OWNED"
    late = await _again(pool, former)

    async def is_fenced() -> bool:
        await asyncio.sleep(0.1)
        return not [p for p in (await pool.seen()).policies if p.HasField("lease")]

    await eventually(is_fenced)
    assert await refusal(_renewal(late)) == "ABORTED/LEASE_FENCED"
    await pool.restart(lease_seconds=0.6)
    late = await _again(pool, former)
    assert await refusal(_renewal(late)) == "ABORTED/LEASE_FENCED"
    assert (await pool.newcomer("other").acquire()).fencing_token > former.token


async def test_what_was_given_back_or_taken_over_stays_so(pool: Pool) -> None:
    former = await pool.trainer()
    await former.stub.ReleasePolicy(
        publish_pb2.ReleasePolicyRequest(policy="math", fencing_token=former.token)
    )
    await pool.restart()
    taken = pool.newcomer("other")
    await taken.acquire()
    heir = pool.newcomer("other")
    await heir.acquire(displaced_token=taken.token)
    await pool.restart()
    assert await refusal(_renewal(await _again(pool, taken))) == "ABORTED/LEASE_FENCED"
    assert (await _renewal(await _again(pool, heir))).lease.fencing_token == heir.token


async def test_an_owner_is_given_the_time_that_it_was_told(pool: Pool) -> None:
    await pool.restart(lease_seconds=30.0)
    await pool.trainer()
    await pool.restart(lease_seconds=0.3)
    await asyncio.sleep(0.8)
    assert await refusal(pool.newcomer("other").acquire()) == "ALREADY_EXISTS/POLICY_OWNED"


async def test_policies_are_counted_to_their_owners(pool: Pool) -> None:
    await pool.restart(max_policies_per_trainer=1)
    await pool.trainer()
    await pool.restart(max_policies_per_trainer=1)
    second = pool.newcomer(policy="code")
    assert await refusal(second.acquire()) == "RESOURCE_EXHAUSTED/TOO_MANY_POLICIES"


async def test_a_policy_that_was_forgotten_and_taken_up_is_owned(pool: Pool) -> None:
    await pool.replica()
    former = await pool.trainer()
    await former.push()
    await pool.order("ForgetPolicy", admin_pb2.ForgetPolicyRequest(policy="math", force=True))
    await former.acquire()
    await pool.restart()
    trainer = await _again(pool, former)
    assert (await _renewal(trainer)).lease.fencing_token == former.token


async def test_an_older_copy_of_the_catalog_takes_no_policy_from_its_owner(pool: Pool) -> None:
    """In the copy a former trainer owns it, which has ended since."""
    former = await pool.trainer()
    assert pool.coordinator is not None
    await pool.coordinator.stop()
    copy = pool.catalog.read_bytes()
    await pool.start()
    await (await _again(pool, former)).stub.ReleasePolicy(
        publish_pb2.ReleasePolicyRequest(policy="math", fencing_token=former.token)
    )
    owner = pool.newcomer("other")
    await owner.acquire()
    await pool.coordinator.stop()
    pool.catalog.write_bytes(copy)
    await pool.start()
    owner = await _again(pool, owner)
    with pytest.raises(grpc.RpcError) as fenced:
        await _renewal(owner)
    error = error_from_rpc(fenced.value)
    assert (error.reason, error.metadata) == ("LEASE_FENCED", {"free": "true"})
    before = owner.token
    assert (await owner.acquire(last_fencing_token=before)).fencing_token > before
