"""Ranks agree over their link, are told of each other's failures, and add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.doubles.linked_ranks import linked_ranks
from trainer_side.ranks.meeting_place import MeetingPlace
from trainer_side.ranks.ranks import encode_error
from trainer_side.ranks.torch_ranks import TorchRanks
from weft_rl.contract.errors import (
    CapacityError,
    InvalidManifestError,
    InvalidRequestError,
    NotFiniteError,
    PeerUnavailableError,
    WeftError,
)

_SIZE = 4


@pytest.fixture
def ranks() -> Iterator[list[TorchRanks]]:
    with linked_ranks(_SIZE) as ranks:
        yield ranks


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(_SIZE) as pool:
        yield pool


def _all(
    pool: ThreadPoolExecutor, ranks: list[TorchRanks], call: Callable[[TorchRanks], Any]
) -> list[Any]:
    """What each rank's call returns or raises."""
    futures: list[Future[Any]] = [pool.submit(call, each) for each in ranks]
    return [future.exception(20) or future.result() for future in futures]


def test_ranks_agree_on_flags(pool, ranks):
    assert _all(pool, ranks, lambda each: each.agree(same=b"plan")) == [0] * _SIZE
    assert _all(pool, ranks, lambda each: each.agree(flags=2 * (each.rank == 3))) == [2] * _SIZE
    told = _all(pool, ranks, lambda each: each.agree(flags={1: 1, 2: 2}.get(each.rank, 0)))
    assert told == [3] * _SIZE


def test_the_error_of_the_lowest_rank_is_everybodys_but_each_keeps_its_own(pool, ranks):
    errors = {1: NotFiniteError("NaN in a.weight"), 3: CapacityError("full")}
    found = _all(pool, ranks, lambda each: each.agree(errors.get(each.rank)))
    assert [type(error) for error in found] == [NotFiniteError] * 3 + [CapacityError]
    assert found[1] is errors[1]
    assert [error.message for error in found[:3]] == ["NaN in a.weight"] * 3
    for each in ranks:  # the push has ended; the link has not
        with pytest.raises(PeerUnavailableError, match="the push has ended"):
            each.agree()
    _all(pool, ranks, lambda each: each.open(time.monotonic() + 20))
    assert _all(pool, ranks, lambda each: each.agree()) == [0] * _SIZE
    assert {each._num_links for each in ranks} == {1}


def test_ranks_that_would_push_other_models_are_refused(pool, ranks):
    found = _all(pool, ranks, lambda each: each.agree(same=b"%d" % (each.rank == 2)))
    assert {type(error) for error in found} == {InvalidManifestError}


@pytest.mark.parametrize("all_wait", [False, True])
@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_what_the_sender_says_comes_to_all(pool, ranks, all_wait, size):
    said = b"\1" * size
    found = _all(pool, ranks, lambda each: each.share(lambda: said, all_wait=all_wait))
    assert found == [said] * _SIZE


@pytest.mark.parametrize("all_wait", [False, True])
def test_what_the_sender_fails_with_comes_to_all(pool, ranks, all_wait):
    def fail() -> bytes:
        raise CapacityError("no room")

    found = _all(pool, ranks, lambda each: each.share(fail, all_wait=all_wait))
    assert [(type(error), error.message) for error in found] == [(CapacityError, "no room")] * _SIZE


def test_bytes_of_every_rank_come_to_all(pool, ranks):
    sizes = (3, 0, 300_000, 1)

    def exchange(each: TorchRanks) -> list[torch.Tensor]:
        messages = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        messages[each.rank].fill_(each.rank + 1)
        each.exchange(messages)
        return messages

    for messages in _all(pool, ranks, exchange):
        for rank, message in enumerate(messages):
            assert message.tolist() == [rank + 1] * sizes[rank]


def test_bytes_are_collected_of_those_that_have_some(pool, ranks):
    theirs = {rank: torch.zeros(1000 * rank, dtype=torch.uint8) for rank in (1, 3)}

    def collect(each: TorchRanks) -> None:
        if each.rank == 0:
            each.collect(None, theirs)
        else:
            own = torch.full((1000 * each.rank,), each.rank, dtype=torch.uint8)
            each.collect(own if each.rank in theirs else None, {})

    assert _all(pool, ranks, collect) == [None] * _SIZE
    assert all(set(out.tolist()) == {rank} for rank, out in theirs.items())


def test_sums_wrap_around_and_are_nobodys_wait(pool, ranks):
    """The second begins before the first has been looked at; both are right."""

    def add(each: TorchRanks) -> list[Any]:
        first = each.add_up(torch.tensor([each.rank, 2**62, -1]))
        second = each.add_up(torch.tensor([each.rank * 10]))
        assert each.agree() == 0  # beside them
        return [second.result(), first.result(), first.done, second.done]

    assert _all(pool, ranks, add) == [[[60], [6, 0, -4], True, True]] * _SIZE


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_leaves_is_gone_for_all_at_once(pool, ranks, gone):
    """Whatever they wait for: what it owes the sum, the next agreement, an exchange."""

    def wait(each: TorchRanks) -> None:
        if each.rank == gone:
            time.sleep(0.2)
            each.abandon()
        elif each.rank == 1:
            each.exchange([torch.zeros(8, dtype=torch.uint8)] * _SIZE)
        elif each.rank == 3:
            each.add_up(torch.zeros(3, dtype=torch.int64)).result()
        else:
            each.agree()

    began = time.monotonic()
    found = _all(pool, ranks, wait)
    assert time.monotonic() - began < 5
    found.pop(gone)
    assert [(type(error), error.reason) for error in found] == [
        (PeerUnavailableError, "RANK_GONE")
    ] * (_SIZE - 1)
    # They meet anew for the next push, also the one that left.
    assert _all(pool, ranks, lambda each: each.open(time.monotonic() + 20)) == [None] * _SIZE
    assert _all(pool, ranks, lambda each: each.agree(flags=1)) == [1] * _SIZE


@pytest.mark.parametrize("fails", [0, 2])
@pytest.mark.parametrize("waits_in", ["agree", "exchange", "collect"])
def test_a_rank_that_leaves_for_an_error_is_everybodys_error(pool, ranks, fails, waits_in):
    """In the middle of what all must take part in."""

    def take_part(each: TorchRanks) -> None:
        try:
            if each.rank == fails:
                time.sleep(0.2)
                raise CapacityError("no room")
            if waits_in == "exchange":
                each.exchange([torch.zeros(1000, dtype=torch.uint8) for _ in range(_SIZE)])
            elif waits_in == "collect":
                theirs = {rank: torch.zeros(10, dtype=torch.uint8) for rank in range(1, _SIZE)}
                mine = torch.zeros(10, dtype=torch.uint8)
                each.collect(mine if each.rank else None, theirs if not each.rank else {})
        except CapacityError as error:
            each.abandon(error)
            each.agree(error)
        each.agree()

    began = time.monotonic()
    found = _all(pool, ranks, take_part)
    assert time.monotonic() - began < 5
    assert [(type(error), error.message) for error in found] == [(CapacityError, "no room")] * _SIZE
    for each in ranks:
        with pytest.raises(CapacityError):
            each.agree(RuntimeError("and this"))
    assert _all(pool, ranks, lambda each: each.open(time.monotonic() + 20)) == [None] * _SIZE
    assert _all(pool, ranks, lambda each: each.agree(flags=1)) == [1] * _SIZE


def _open(each: TorchRanks, seconds: float = 20.0, **arguments: object) -> int:
    each.open(time.monotonic() + seconds, arguments)
    each.close_call()
    return each.number


@pytest.mark.parametrize("is_first", [True, False], ids=["it leaves first", "others wait"])
@pytest.mark.parametrize("leaves", [0, 2])
def test_a_rank_that_does_not_come_tells_why_at_once(pool, ranks, leaves, is_first):
    for each in ranks:
        each.close_call()
    others = [each for each in ranks if each.rank != leaves]
    for number in (2, 3):
        if is_first:
            ranks[leaves].leave(InvalidRequestError("require=0"))
        futures = [pool.submit(_open, each) for each in others]
        if not is_first:
            time.sleep(0.2)
            ranks[leaves].leave(InvalidRequestError("require=0"))
        began = time.monotonic()
        errors = [future.exception(20) for future in futures]
        assert time.monotonic() - began < 5
        text = f"rank {leaves} of this trainer has ended the call: require=0"
        assert [getattr(error, "message", error) for error in errors] == [text] * 3
        assert {each.number for each in ranks} == {number}
    assert _all(pool, ranks, _open) == [4] * _SIZE
    assert _all(pool, ranks, _open) == [5] * _SIZE


@pytest.mark.parametrize("absent", [0, 2])
def test_who_has_left_calls_out_is_in_step_at_the_next(pool, ranks, absent):
    """Though it has come to fewer calls than the others: also when it then does not come to one."""
    others = [each for each in ranks if each.rank != absent]
    for _ in range(2):
        errors = _all(pool, others, lambda each: _open(each, 0.5))
        assert {getattr(error, "reason", error) for error in errors} == {"RANK_GONE"}
        assert all(f"rank {absent}" in error.message for error in errors)
    for each in ranks:
        each.close_call()
    ranks[absent].leave(KeyboardInterrupt())
    errors = _all(pool, others, _open)
    assert {getattr(error, "reason", error) for error in errors} == {"RANK_GONE"}
    assert all("was interrupted" in error.message for error in errors)
    numbers = _all(pool, ranks, _open)
    assert len(set(numbers)) == 1


def test_ranks_that_make_different_calls_are_told_which_differ_in_what(pool, ranks):
    found = _all(pool, ranks, lambda each: _open(each, policy="ab"[each.rank > 1]))
    assert {type(error) for error in found} == {InvalidRequestError}
    text = "ranks 2, 3 have policy='b' where rank 0 has policy='a'"
    assert all(text in error.message for error in found)
    assert len(set(_all(pool, ranks, lambda each: _open(each, policy="a")))) == 1


@pytest.mark.parametrize("closed", [0, 2])
def test_a_rank_that_has_closed_its_publisher_is_not_waited_for(pool, ranks, closed):
    ranks[closed].close()
    others = [each for each in ranks if each.rank != closed]
    for _ in range(2):
        began = time.monotonic()
        errors = _all(pool, others, _open)
        assert time.monotonic() - began < 5
        assert all("has closed its Publisher" in str(error) for error in errors), errors


def test_an_error_that_nobody_waited_for_is_not_that_of_the_next_push(pool, ranks):
    ranks[2].abandon(CapacityError("no room"))
    assert _all(pool, ranks, lambda each: each.open(time.monotonic() + 20)) == [None] * _SIZE


def test_a_rank_that_died_after_it_agreed_is_gone_for_all(pool, ranks):
    """What it said was read; the others would be told that all is well."""
    claim = pool.submit(ranks[2].agree)
    time.sleep(0.2)
    ranks[2].abandon()
    assert isinstance(claim.exception(5), PeerUnavailableError)
    others = [each for each in ranks if each.rank != 2]
    found = _all(pool, others, lambda each: each.agree())
    assert {getattr(error, "reason", error) for error in found} == {"RANK_GONE"}


def test_what_was_said_to_all_stands_though_one_cannot_hear_it(pool, ranks):
    ranks[2].abandon()
    others = [each for each in ranks if each.rank != 2]
    found = _all(pool, others, lambda each: each.share(lambda: b"begun", all_wait=True))
    assert found == [b"begun"] * 3
    errors = _all(pool, others, lambda each: each.agree())
    assert {getattr(error, "reason", error) for error in errors} == {"RANK_GONE"}


def test_a_rank_that_never_comes_ends_with_the_deadline(monkeypatch):
    monkeypatch.setattr("trainer_side.ranks.torch_ranks.GRACE_SECONDS", 0.2)
    with linked_ranks(2, seconds=0.5) as ranks:
        with pytest.raises(PeerUnavailableError, match="every rank must call it") as caught:
            ranks[0].agree()
        assert caught.value.reason == "RANK_GONE"
        assert "rank 1 was silent until the deadline" in caught.value.message
        with pytest.raises(WeftError):
            ranks[1].agree()


def test_a_new_publisher_does_not_hear_why_a_closed_one_has_left_a_call(pool):
    store = torch.distributed.HashStore()
    before = MeetingPlace(store, 0, 2)
    before.leave(encode_error(InvalidRequestError("require=0")), is_at_call=False)
    before.close()
    places = [MeetingPlace(store, rank, 2) for rank in (1, 0)]
    futures = [pool.submit(each.come, time.monotonic() + 20) for each in places]
    assert [future.exception(20) for future in futures] == [None, None]
