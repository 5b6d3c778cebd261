"""Messages between ranks: what comes, and that nobody waits for whom there is not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from trainer_side.ranks.link import Channel, LinkError, RankLink

_CALL = 7
_LARGE = bytes(range(256)) * 40_000  # more than connections hold


@pytest.fixture
def links() -> Iterator[list[RankLink]]:
    """Of three ranks."""
    sockets: list[dict[tuple[Channel, int], socket.socket]] = [{}, {}, {}]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        for channel in Channel if low == 0 else (Channel.PAIRS,):
            sockets[low][channel, high], sockets[high][channel, low] = socket.socketpair()
    links = [RankLink(each) for each in sockets]
    yield links
    for link in links:
        link.close()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[dict[int, memoryview]]]]:
    """Call something on a thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def _soon() -> float:
    return time.monotonic() + 20


def test_messages_go_both_ways_at_once_whatever_their_size(links, beside):
    """Each would wait for the other if it sent all before it received."""
    own = [memoryview(_LARGE), memoryview(b""), memoryview(_LARGE[::-1])]

    def exchange(rank: int) -> dict[int, memoryview]:
        others = [each for each in range(3) if each != rank]
        outs = {each: memoryview(bytearray(len(own[each]))) for each in others}
        to_all = dict.fromkeys(others, own[rank])
        return links[rank].swap(Channel.PAIRS, _CALL, to_all, outs, _soon())

    futures = [beside(exchange, rank) for rank in range(3)]
    for rank, future in enumerate(futures):
        assert future.result(20) == {each: own[each] for each in range(3) if each != rank}


@pytest.mark.parametrize("content", [b"", b"x", _LARGE])
def test_a_receiver_need_not_know_how_long_a_message_is(links, beside, content):
    sent = beside(
        links[0].swap, Channel.STAR, _CALL, dict.fromkeys([1, 2], memoryview(content)), {}, _soon()
    )
    for rank in (1, 2):
        said = links[rank].swap(Channel.STAR, _CALL, {}, {0: None}, _soon())
        assert bytes(said[0]) == content
    sent.result(20)


def test_channels_do_not_mix(links):
    for channel in Channel:
        content = memoryview(channel.name.encode())
        links[0].swap(channel, _CALL, {1: content}, {}, _soon())
    for channel in reversed(Channel):
        said = links[1].swap(channel, _CALL, {}, {0: None}, _soon())
        assert bytes(said[0]) == channel.name.encode()


@pytest.mark.parametrize(
    ("call", "content", "out"),
    [
        (_CALL + 1, b"four", memoryview(bytearray(4))),
        (_CALL, b"four", memoryview(bytearray(5))),
        (_CALL, b"four", memoryview(bytearray(3))),
        (_CALL, b"four", memoryview(bytearray(0))),
        (_CALL + 1, b"", None),
    ],
    ids=["another call", "too short", "too long", "nothing awaited", "of unknown length"],
)
def test_a_rank_that_does_something_else_is_told_from_one_that_takes_part(
    links, call, content, out
):
    links[1].swap(Channel.STAR, call, {0: memoryview(content)}, {}, _soon())
    with pytest.raises(LinkError, match="rank 1 takes part in something else"):
        links[0].swap(Channel.STAR, _CALL, {}, {1: out}, _soon())
    for rank in (1, 2):  # and the others are not left waiting
        with pytest.raises(LinkError, match="rank 0"):
            links[rank].swap(Channel.STAR, _CALL, {}, {0: None}, _soon())


def test_who_is_silent_is_named_at_the_deadline(links):
    links[1].swap(Channel.STAR, _CALL, {0: memoryview(b"here")}, {}, _soon())
    with pytest.raises(LinkError, match="nothing came of rank 2 in time"):
        links[0].swap(Channel.STAR, _CALL, {}, {1: None, 2: None}, time.monotonic() + 0.1)


def test_who_takes_nothing_is_named_at_the_deadline(links):
    with pytest.raises(LinkError, match="nothing came of rank 1 in time"):
        links[0].swap(Channel.PAIRS, _CALL, {1: memoryview(_LARGE)}, {}, time.monotonic() + 0.1)


@pytest.mark.parametrize("waits_for", [0, 1], ids=["whoever left", "who waits for it"])
def test_leaving_ends_every_wait(links, beside, waits_for):
    """At the rank that leaves, and at those that wait for it, one by way of another."""
    waiting = [
        beside(links[2].swap, Channel.PAIRS, _CALL, {}, {waits_for: None}, _soon()),
        beside(links[1].swap, Channel.STAR, _CALL, {}, {0: None}, _soon()),
        beside(links[0].swap, Channel.SUM, _CALL, {}, {1: None}, _soon()),
    ]
    time.sleep(0.1)
    links[0].close()
    reasons = [str(future.exception(5)) for future in waiting]
    assert reasons[2] == "this rank has left the push"
    assert all("has left" in reason for reason in reasons), reasons
    for link in links:
        assert link.closed
        with pytest.raises(LinkError, match="has left"):
            link.swap(Channel.PAIRS, _CALL, {}, {}, _soon())


def test_half_a_message_is_not_one(links, beside):
    """Whoever dies in it leaves nobody waiting for the rest."""
    waiting = beside(links[0].swap, Channel.PAIRS, _CALL, {}, {1: None}, _soon())
    sending = beside(links[1].swap, Channel.PAIRS, _CALL, {2: memoryview(_LARGE)}, {}, _soon())
    time.sleep(0.1)
    raw = links[1]._sockets[Channel.PAIRS, 0]
    raw.send(b"\7\0\0\0")
    links[1].close()
    for future in (waiting, sending):
        assert isinstance(future.exception(5), LinkError)


def test_what_an_interruption_leaves_in_the_middle_is_never_used_again(links):
    class Interrupted(BaseException):
        pass

    class Interrupting(dict):
        def items(self):
            raise Interrupted

    with pytest.raises(Interrupted):
        links[0].swap(Channel.STAR, _CALL, Interrupting(), {}, _soon())
    assert links[0].closed
    with pytest.raises(LinkError, match="was interrupted"):
        links[0].swap(Channel.STAR, _CALL, {}, {}, _soon())


def test_whoever_is_gone_is_not_told_where_that_is_asked_for(links):
    links[2].close()
    content = memoryview(_LARGE)
    sent = threading.Thread(
        target=links[0].swap,
        args=(Channel.STAR, _CALL, {1: content, 2: content}, {}, _soon()),
        kwargs={"whoever_is_there": True},
    )
    sent.start()
    said = links[1].swap(Channel.STAR, _CALL, {}, {0: None}, _soon())
    sent.join(20)
    assert said[0] == content
    assert not links[0].closed
    with pytest.raises(LinkError, match="rank 2"):
        links[0].swap(Channel.STAR, _CALL, {2: memoryview(b"x")}, {}, _soon())


def test_a_rank_that_went_after_it_spoke_is_found_out(links):
    for rank in (1, 2):
        links[rank].swap(Channel.STAR, _CALL, {0: memoryview(b"here")}, {}, _soon())
    links[0].check(Channel.STAR)  # bytes that nobody has read are nobody's absence
    links[2].close()
    links[0].swap(Channel.STAR, _CALL, {}, {1: None, 2: None}, _soon())
    with pytest.raises(LinkError, match="rank 2 has left"):
        links[0].check(Channel.STAR)
    assert links[0].closed


@pytest.mark.parametrize("waits_for", ["it", "another", "room"])
def test_whoever_leaves_says_why_to_all_whatever_they_wait_for(links, beside, waits_for):
    """Also to one that waits for a rank which is there, or that only sends."""

    def wait(rank: int) -> None:
        if rank == 0 and waits_for == "room":
            links[0].swap(Channel.STAR, _CALL, {1: memoryview(_LARGE)}, {}, _soon())
        elif rank == 0 or waits_for == "it":
            links[rank].swap(Channel.PAIRS, _CALL, {}, {1: None}, _soon())
        else:
            links[rank].swap(Channel.STAR, _CALL, {}, {0: None}, _soon())

    waiting = [beside(wait, rank) for rank in (0, 2)]
    time.sleep(0.1)
    links[1].close(reason=b"out of memory")
    for error in [each.exception(5) for each in waiting]:
        assert isinstance(error, LinkError)
        assert (error.rank, error.reason) == (1, b"out of memory")
    with pytest.raises(LinkError) as caught:
        links[0].swap(Channel.PAIRS, _CALL, {}, {2: None}, _soon())
    assert caught.value.reason == b"out of memory"


def test_why_a_rank_leaves_is_no_part_of_a_message_that_it_was_sending(links, beside):
    message = memoryview(bytearray(len(_LARGE)))
    sends = beside(links[1].swap, Channel.PAIRS, _CALL, {0: memoryview(_LARGE)}, {}, _soon())
    time.sleep(0.1)
    links[1].close(reason=b"out of memory")
    with pytest.raises(LinkError) as caught:
        links[0].swap(Channel.PAIRS, _CALL, {}, {1: message}, _soon())
    assert caught.value.reason == b"out of memory"  # of another channel
    assert isinstance(sends.exception(5), LinkError)
    assert b"out of memory" not in bytes(message)
