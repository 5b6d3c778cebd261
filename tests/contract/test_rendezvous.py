"""RendezvousService: every status and reason that its protos list, through the real stubs."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.contract.calls import fails
from tests.contract.conftest import Pool
from tests.doubles.rank import FakeRank
from tests.doubles.replicas import FakeReplica
from tests.waits import eventually
from weft_rl.contract.errors import (
    NotAllowedError,
    NotReadyError,
    StaleEpochError,
    TransferTimeoutError,
)
from weft_rl.coordinator.runtime import key_value_store
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.v1 import rendezvous_pb2


async def _rank(pool: Pool, rank: int = 0, token: str = "") -> FakeRank:
    """A rank of a group that forms and never completes."""
    replica = await pool.replica()
    replica.attends = False
    trainer = await pool.trainer()
    begun = await trainer.begin()
    if token:
        begun.group.token = token
    made = FakeRank(pool.target, begun.group, rank)
    pool.things.append(_Closing(made))
    return made


class _Closing:
    def __init__(self, rank: FakeRank) -> None:
        self.rank = rank

    async def stop(self) -> None:
        await self.rank.close()


def _store(rank: FakeRank, **operation: Any) -> Any:
    request = rendezvous_pb2.CallStoreRequest(credential=rank.credential, **operation)
    return rank.stub.CallStore(request)


async def test_call_store(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = await _rank(pool)
    keys = rendezvous_pb2.StoreKeys
    await _store(rank, set=rendezvous_pb2.StoreSet(keys=["a"], values=[b"1"]))
    got = await _store(rank, get=keys(keys=["a"], timeout=duration_to_proto(1)))
    assert list(got.values) == [b"1"]
    assert (await _store(rank, add=rendezvous_pb2.StoreAdd(key="n", amount=3))).number == 3
    assert (await _store(rank, check=keys(keys=["a", "b"]))).number == 0
    await _store(rank, append=rendezvous_pb2.StoreSet(keys=["a"], values=[b"2"]))
    swap = rendezvous_pb2.StoreCompareSet(key="a", expected=b"12", desired=b"3")
    assert list((await _store(rank, compare_set=swap)).values) == [b"3"]
    await _store(rank, wait=keys(keys=["a"], timeout=duration_to_proto(1)))
    assert (await _store(rank, count=rendezvous_pb2.StoreCount())).number == 2
    assert (await _store(rank, delete=keys(keys=["a", "z"]))).number == 1
    late = _store(rank, wait=keys(keys=["z"], timeout=duration_to_proto(0.02)))
    error = await fails(late, "DEADLINE_EXCEEDED", "DEADLINE")
    assert isinstance(error, TransferTimeoutError)
    await fails(_store(rank), "INVALID_ARGUMENT", "PROTOCOL")
    monkeypatch.setattr(key_value_store, "MAX_STORE_BYTES", 10)
    full = _store(rank, set=rendezvous_pb2.StoreSet(keys=["b"], values=[b"x" * 11]))
    await fails(full, "RESOURCE_EXHAUSTED", "STORE_FULL")


async def test_a_wait_in_the_store_wakes_when_the_group_is_dropped(pool: Pool) -> None:
    rank = await _rank(pool)
    await rank.hello()
    await rank.hear()
    keys = rendezvous_pb2.StoreKeys(keys=["never"], timeout=duration_to_proto(30))
    waiting = asyncio.ensure_future(_store(rank, wait=keys))
    await asyncio.sleep(0.02)
    rank.call.cancel()  # the group loses a rank before it has formed
    error = await fails(waiting, "ABORTED", "EPOCH_FENCED")
    assert isinstance(error, StaleEpochError)
    await fails(_store(rank, count=rendezvous_pb2.StoreCount()), "ABORTED", "EPOCH_FENCED")


async def test_attend(pool: Pool) -> None:
    rank = await _rank(pool)
    await rank.hello()
    assert (await rank.hear()).welcome.num_attending == 1
    twin = FakeRank(pool.target, rank.group, 0)
    pool.things.append(_Closing(twin))
    await twin.hello()
    await fails(twin.hear(), "ALREADY_EXISTS", "REQUEST_CONFLICT")
    for message in ({"prepared": rendezvous_pb2.Prepared()}, {}):
        rude = FakeRank(pool.target, rank.group, 1)
        pool.things.append(_Closing(rude))
        await rude.say(**message)
        await fails(rude.hear(), "INVALID_ARGUMENT", "PROTOCOL")
    stranger = FakeRank(pool.target, rank.group, 7)
    pool.things.append(_Closing(stranger))
    await stranger.hello()
    await fails(stranger.hear(), "INVALID_ARGUMENT", "PROTOCOL")


async def test_the_sender_announces_how_many_buckets_are_in_flight(pool: Pool) -> None:
    sender = await _rank(pool)
    for wrong, reason in ((0, "PROTOCOL"), (9, "INVALID_REQUEST")):
        rude = FakeRank(pool.target, sender.group, 0)
        pool.things.append(_Closing(rude))
        rude.num_in_flight = wrong
        await rude.hello()
        await fails(rude.hear(), "INVALID_ARGUMENT", reason)
    sender.num_in_flight = 5
    await sender.hello()
    (replica,) = [thing for thing in pool.things if isinstance(thing, FakeReplica)]
    receiver = FakeRank(pool.target, replica.joins[0].group, 1)
    pool.things.append(_Closing(receiver))
    await receiver.hello()
    assert (await receiver.hear()).HasField("welcome")
    assert (await receiver.hear()).prepare.num_buckets_in_flight == 5


async def test_a_rank_may_close_its_stream(pool: Pool) -> None:
    rank = await _rank(pool)
    await rank.hello()
    await rank.hear()
    await rank.call.done_writing()
    with pytest.raises(EOFError):
        await rank.hear()
    assert await rank.call.code() is grpc.StatusCode.OK


async def test_a_group_in_which_nothing_moves_ends_normally(pool: Pool) -> None:
    """A trainer that ends is no fault, to its replicas' logs neither."""
    replica = await pool.replica()
    trainer = await pool.trainer()
    await trainer.push()
    (receiver,) = replica.ranks.values()
    assert trainer.sender is not None
    await trainer.sender.call.done_writing()
    assert await receiver.call.code() is grpc.StatusCode.OK
    late = FakeRank(pool.target, trainer.sender.group, 0)
    pool.things.append(_Closing(late))
    await late.hello()
    await fails(late.hear(), "ABORTED", "EPOCH_FENCED")


async def test_attend_a_dropped_group(pool: Pool) -> None:
    rank = await _rank(pool)
    rank.credential.group_id = "g-gone"
    await rank.hello()
    await fails(rank.hear(), "ABORTED", "EPOCH_FENCED")


async def test_a_wrong_token_opens_nothing(pool: Pool) -> None:
    rank = await _rank(pool, token="guess")
    await rank.hello()
    error = await fails(rank.hear(), "PERMISSION_DENIED", "BAD_TOKEN")
    assert isinstance(error, NotAllowedError)
    call = _store(rank, count=rendezvous_pb2.StoreCount())
    await fails(call, "PERMISSION_DENIED", "BAD_TOKEN")
    request = rendezvous_pb2.GetManifestRequest(credential=rank.credential)
    await fails(rank.stub.GetManifest(request).read(), "PERMISSION_DENIED", "BAD_TOKEN")


async def test_a_rank_speaks_for_itself_alone(pool: Pool) -> None:
    """The sender once attended as every rank, and committed what nobody had staged."""
    replica = await pool.replica("r0", num_receivers=2)
    replica.attends = False
    trainer = await pool.trainer()
    begun = await trainer.begin()
    await eventually(lambda: replica.joins)
    plan = replica.joins[-1].group
    tokens = [begun.group.token, plan.token, *plan.further_tokens]
    assert len(set(tokens)) == 3
    assert not begun.group.further_tokens
    ranks = [FakeRank(pool.target, begun.group, rank) for rank in (1, 2)]
    for rank in ranks:
        pool.things.append(_Closing(rank))
        await rank.hello()  # with the sender's token
        error = await fails(rank.hear(), "PERMISSION_DENIED", "BAD_TOKEN")
        assert isinstance(error, NotAllowedError)
    own = [FakeRank(pool.target, plan, rank) for rank in (1, 2)]
    for rank in (*own, FakeRank(pool.target, begun.group, 0)):
        pool.things.append(_Closing(rank))
        # Of the group's store and manifests each is a member.
        assert not (await _store(rank, count=rendezvous_pb2.StoreCount())).number
        await rank.hello()
        assert (await rank.hear()).HasField("welcome")
    swapped = FakeRank(pool.target, plan, 1)
    pool.things.append(_Closing(swapped))
    swapped.credential.token = tokens[2]
    await swapped.hello()
    await fails(swapped.hear(), "PERMISSION_DENIED", "BAD_TOKEN")


async def test_get_manifest_of_no_transfer(pool: Pool) -> None:
    rank = await _rank(pool)
    request = rendezvous_pb2.GetManifestRequest(credential=rank.credential, layout_digest=b"?")
    call = rank.stub.GetManifest(request).read()
    error = await fails(call, "FAILED_PRECONDITION", "MANIFEST_UNKNOWN")
    assert isinstance(error, NotReadyError)
