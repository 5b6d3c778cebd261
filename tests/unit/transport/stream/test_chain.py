"""Buckets that are passed on from receiver to receiver, and links that break."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from tests.doubles.wires import Wires
from tests.unit.transport.stream.chain import SECONDS, SIZE, Group, content, finish, host_of
from tests.waits import until
from weft_rl.transport.stream import listening, works
from weft_rl.transport.stream.fed_receivers import FedReceiver
from weft_rl.transport.stream.lane import Lane
from weft_rl.transport.stream.messages import PieceHead, StreamError
from weft_rl.transport.wire.buckets import BucketOptions

#: More than sockets hold.
BIG = 40 * 2**20
_EVEN = SIZE - 1


def laid(wires: Wires) -> None:
    """Wait until all are connected: four lanes a hop, and one for reports."""
    until(lambda: [len(wires.cables[host_of(rank)]) for rank in range(3)] == [5, 5, 5], 10)


@pytest.fixture
def group(wires: Wires) -> Iterator[Group]:
    made = Group(4)
    yield made
    made.close()


def test_each_link_carries_a_bucket_once(wires: Wires, group: Group) -> None:
    sent = group.send(1)
    for work, memory in [group.post(rank) for rank in (1, 2, 3)]:
        finish(work)
        assert torch.equal(memory, content(1))
    finish(sent)
    carried = {
        host: sum(len(cable.to_near) for cable in cables) for host, cables in wires.cables.items()
    }
    assert carried.keys() == {host_of(0), host_of(1), host_of(2)}
    assert all(SIZE < num_bytes < 1.01 * SIZE for num_bytes in carried.values()), carried


def test_a_piece_is_passed_on_before_the_bucket_is_there(wires: Wires, group: Group) -> None:
    (_, first), (_, last) = group.post(1, BIG), group.post(3, BIG)
    group.post(2, BIG)
    laid(wires)
    for cable in wires.cables[host_of(0)][3:]:  # two of the four lanes
        cable.stop()
    group.send(1, size=BIG)
    until(lambda: bool(last.any()), 10)
    assert not torch.equal(first, content(1, BIG))


def test_a_link_that_is_cut_is_gone_around(wires: Wires, group: Group) -> None:
    """By the second receiver's asking the sender; the third is fed by it as before. What has
    arrived does not come again."""
    posted = {rank: group.post(rank) for rank in (1, 2, 3)}
    group.send(1)
    until(lambda: posted[3][1].count_nonzero() > SIZE // 8, 10)
    wires.refuses.add(host_of(1))
    for cable in wires.cables[host_of(1)]:
        cable.cut()
    for work, memory in posted.values():
        finish(work)
        assert torch.equal(memory, content(1))
    from_sender = wires.cables[host_of(0)]
    until(lambda: len(from_sender) == 10, 10)  # two hops: to the first receiver, and the second
    again = sum(len(cable.to_near) for cable in from_sender[5:])
    assert again < SIZE, "it had some of it"
    group.send(2)
    for rank in (1, 2, 3):
        work, memory = group.post(rank)
        finish(work)
        assert torch.equal(memory, content(2))


def test_a_receiver_that_nobody_can_feed_says_so(wires: Wires, group: Group) -> None:
    laid(wires)
    wires.refuses.update({host_of(0), host_of(1), host_of(2)})
    work, _ = group.post(3)
    for cable in wires.cables[host_of(2)]:
        cable.cut()
    with pytest.raises(StreamError, match=r"no member sends this one .*rank 1 at .* refused"):
        finish(work)


def test_the_sender_hears_who_keeps_a_bucket(group: Group) -> None:
    told = threading.Event()
    sent = group.send(1, BucketOptions(on_kept=told.set))
    works = [group.post(rank)[0] for rank in (1, 2, 3)]
    for work in works:
        finish(work)
    for work in works[1:]:
        assert work.keep()
    assert not sent.is_kept
    works[0].keep()
    assert told.wait(10)
    assert sent.is_kept


def test_memory_is_let_go_of_once_all_keep_it(group: Group) -> None:
    buffer = content(1)
    sent = group.sender.broadcast(buffer, 20.0)
    works = [group.post(rank)[0] for rank in (1, 2, 3)]
    held = [weakref.ref(memory) for memory in (buffer.untyped_storage(),)]
    del buffer
    for work in works:
        finish(work)
        work.keep()
    until(lambda: sent.is_kept, 10)
    gc.collect()
    until(lambda: all(ref() is None for ref in held), 10)


def test_what_each_member_has_sent_is_reported(group: Group) -> None:
    """Each sends to the next one, and no more than the bytes and some heads."""
    works = [group.post(rank)[0] for rank in (1, 2, 3)]
    sent = group.send(1)
    for work in works:
        finish(work)
    until(lambda: len(group.sent) == 3, 10, why=lambda: group.sent)
    assert set(group.sent) == {(0, 1), (1, 2), (2, 3)}
    assert all(SIZE <= num_bytes < SIZE + 10_000 for num_bytes in group.sent.values())
    assert not sent.is_kept


def test_a_bucket_that_was_garbled_comes_again_from_the_sender(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 has bad memory: what it passes on to rank 2 is not what it has received."""
    send, garbled = Lane.send_piece, list[str]()

    def send_badly(lane: Lane, piece: PieceHead, content: memoryview) -> None:
        if piece.nth == 3 and lane.peer.startswith("rank 2") and not garbled:
            garbled.append(lane.peer)
            content = memoryview(bytes(len(content)))
        send(lane, piece, content)

    monkeypatch.setattr(Lane, "send_piece", send_badly)
    received = [group.post(rank) for rank in (1, 2, 3)]
    group.send(1)
    for work, _ in received:
        finish(work)
    is_right = [torch.equal(memory, content(1)) for _, memory in received]
    assert is_right == [True, False, False], "it is passed on before anybody looks"
    for work, memory in received[1:]:
        assert work.receive_again(memory, time.monotonic() + SECONDS)
        assert torch.equal(memory, content(1))
    assert f"garbled from rank 1 at {host_of(1)}" in caplog.text
    for work, _ in received:
        work.keep()
    again = [group.post(rank) for rank in (1, 2, 3)]
    group.send(2)
    for work, memory in again:
        finish(work)
        assert torch.equal(memory, content(2))


def _weights(seed: int) -> torch.Tensor:
    """Return a bucket of weights in bfloat16."""
    normals = torch.randn(_EVEN // 2, generator=torch.Generator().manual_seed(seed))
    return (normals * 0.02).bfloat16().view(torch.uint8)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ranks to which links are slow, whatever is measured; the first, unless a test adds some."""
    ranks = {1}
    found = property(lambda hop: hop.rank in ranks, lambda hop, value: None)
    monkeypatch.setattr(FedReceiver, "is_slow", found, raising=False)
    return ranks


def test_weights_are_coded_once_for_a_slow_link_and_passed_on_so(
    wires: Wires, group: Group, slow: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    laid(wires)
    num_coded, code = [0], works.encode_piece

    def counted(piece: memoryview) -> bytes | None:
        num_coded[0] += 1
        return code(piece)

    monkeypatch.setattr(works, "encode_piece", counted)
    posted = [group.post(rank, _EVEN) for rank in (1, 2, 3)]
    sent = group.sender.broadcast(_weights(1), 20.0)
    for work, memory in posted:
        finish(work)
        assert torch.equal(memory, _weights(1))
    assert num_coded[0] == sent.num_pieces
    for host in map(host_of, (0, 1, 2)):
        carried = sum(len(cable.to_near) for cable in wires.cables[host])
        assert 0.6 * SIZE < carried < 0.7 * SIZE, host
    # What coding does not shorten is soon not coded.
    posted = [group.post(rank) for rank in (1, 2, 3)]
    group.send(2)
    for work, memory in posted:
        finish(work)
        assert torch.equal(memory, content(2))
    assert num_coded[0] < sent.num_pieces + 9


def test_a_coded_piece_that_cannot_be_decoded_comes_from_another(
    group: Group, slow: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, garbled = Lane.send_piece, list[str]()

    def send_badly(lane: Lane, piece: PieceHead, content: memoryview | bytes) -> None:
        if piece.coded_bytes and lane.peer.startswith("rank 2") and not garbled:
            garbled.append(lane.peer)
            content = b"\xff" * len(content)
        send(lane, piece, content)

    monkeypatch.setattr(Lane, "send_piece", send_badly)
    posted = [group.post(rank, _EVEN) for rank in (1, 2, 3)]
    group.sender.broadcast(_weights(1), 20.0)
    for work, memory in posted:
        finish(work)
        assert torch.equal(memory, _weights(1))
    assert garbled


def test_a_bucket_does_not_come_again_from_who_is_gone(group: Group) -> None:
    work, memory = group.post(1)
    group.send(1)
    finish(work)
    group.sender.abort()
    assert not work.receive_again(memory, time.monotonic() + SECONDS)


def test_a_buffer_is_not_written_before_it_was_passed_on(wires: Wires, group: Group) -> None:
    """The second bucket is received in the memory of the first, which waits for the last
    receiver's link."""
    laid(wires)
    for cable in wires.cables[host_of(2)]:
        cable.stop()
    memory = torch.zeros(BIG, dtype=torch.uint8)
    second = group.receivers[1]
    first_work, next_work = second.broadcast(memory, 20.0), second.broadcast(memory, 20.0)
    for seed in (1, 2):
        group.send(seed, size=BIG)
        group.post(1, BIG)
    last = [group.post(3, BIG) for _ in (1, 2)]
    finish(first_work)
    assert not next_work.wait_until(0.0)
    assert torch.equal(memory, content(1, BIG))
    for cable in wires.cables[host_of(2)]:
        cable.go_on()
    for seed, (work, received) in zip((1, 2), last, strict=True):
        finish(work)
        assert torch.equal(received, content(seed, BIG))
    finish(next_work)
    assert torch.equal(memory, content(2, BIG))


def test_a_bucket_of_another_size_is_refused(group: Group) -> None:
    group.send(1)
    work, _ = group.post(1, SIZE - 1)
    with pytest.raises(StreamError, match=r"sends 3,145,733 bytes where 3,145,732 are expected"):
        finish(work)


def test_links_that_break_again_and_again_are_connected_anew(wires: Wires, group: Group) -> None:
    """They are given up only where nothing comes in between."""
    for seed in range(6):
        group.send(seed)
        for work, memory in [group.post(rank) for rank in (1, 2, 3)]:
            finish(work)
            work.keep()
            assert torch.equal(memory, content(seed))
        for cable in [cable for cables in [*wires.cables.values()] for cable in cables]:
            cable.cut()
    assert not any(member.error for member in (group.sender, *group.receivers))


def test_a_connection_that_nobody_accepts_ends_with_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that was cut off accepts none, and the next group waits for this one's threads."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(4):  # more than wait to be accepted
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())

        def address_of(host: str, port: int) -> tuple[socket.AddressFamily, object]:
            asked.append(host)
            return server.family, server.getsockname()

        monkeypatch.setattr(listening, "address_of", address_of)
        group = Group(2)
        until(lambda: asked, 10)
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < 2


def test_a_hop_ends_though_a_piece_waits_for_memory(wires: Wires, group: Group) -> None:
    """A bucket has come whose receive was not posted; then the connection for reports breaks."""
    laid(wires)
    group.send(1)
    posted = {rank: group.post(rank) for rank in (1, 2, 3)}
    for work, _ in posted.values():
        finish(work)
    first = wires.cables[host_of(0)]
    before = sum(len(cable.to_near) for cable in first)
    group.send(2)
    until(lambda: sum(len(cable.to_near) for cable in first) > before, 10)
    first[0].cut()

    def is_anew() -> bool:
        posted[1][0].keep()  # what is said finds the end
        return len(first) == 10

    until(is_anew, 10)
    for rank in (1, 2, 3):
        work, memory = group.post(rank)
        finish(work)
        assert torch.equal(memory, content(2))
