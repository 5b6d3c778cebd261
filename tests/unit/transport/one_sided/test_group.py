"""Members of a group that behave, die, say nothing, or are not who they say.

One file: every case is a real group over the same two members, in one of the states between its
forming and its end.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.doubles.rendezvous import StoreDouble
from tests.waits import stays, until
from weft_rl.contract.errors import UnsupportedError
from weft_rl.ipc.connection import PeerError
from weft_rl.transport.one_sided import members
from weft_rl.transport.one_sided.directory import connect, listen, unlink
from weft_rl.transport.one_sided.members import OneSidedReceiver, OneSidedSender
from weft_rl.transport.one_sided.memory import FileMapping, allocate_file, export_of
from weft_rl.transport.one_sided.messages import (
    MAX_TAIL_BYTES,
    Export,
    Hello,
    Kept,
    MemberConnection,
    OneSidedError,
    Ready,
    Taken,
    Welcome,
    Withdraw,
)
from weft_rl.transport.wire.buckets import BucketOptions

SIZE = 2**20
Join = Callable[..., tuple[OneSidedSender, list[OneSidedReceiver]]]
Wait = Callable[[Callable[[], object]], None]


def soon() -> float:
    return time.monotonic() + 10.0


def empty() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


def filled(value: int) -> torch.Tensor:
    return allocate_file(SIZE).fill_(value)


def mapped_by(receiver: OneSidedReceiver) -> dict[int, Any]:
    return receiver._mapped


def joined(sender: OneSidedSender) -> dict[int, Any]:
    return sender._members


def send(sender: OneSidedSender) -> None:
    """Send a bucket and wait until all have it."""
    sent = sender.broadcast(filled(1), 10.0)
    assert sent.wait_until(soon())
    sent.finish()


def test_receivers_read_the_senders_own_pages_mapped_once(join: Join) -> None:
    sender, receivers = join(3)
    buffer = filled(1)
    for value in (1, 2, 3):
        buffer.fill_(value)
        sent = sender.broadcast(buffer, 10.0)
        for receiver in receivers:
            into = empty()
            work = receiver.broadcast(into, 10.0)
            assert work.wait_until(soon())
            work.finish()
            assert int(into.min()) == int(into.max()) == value
        assert sent.wait_until(soon())
    assert [len(mapped_by(receiver)) for receiver in receivers] == [1, 1, 1]
    number = export_of(buffer)[0].export_id
    mapped = mapped_by(receivers[0])[number].content
    buffer.fill_(9)
    assert mapped[0] == 9
    assert not mapped.flags.writeable


def test_a_sender_hears_from_its_receivers_what_all_of_them_keep(join: Join) -> None:
    sender, receivers = join(2)
    heard = threading.Event()
    sent = sender.broadcast(filled(1), 10.0, BucketOptions(on_kept=heard.set))
    works = [receiver.broadcast(empty(), 10.0) for receiver in receivers]
    assert all(work.wait_until(soon()) for work in (*works, sent))
    assert works[0].keep()
    assert not heard.wait(0.05), "the other has not said so"
    assert not sent.is_kept
    works[1].keep()
    assert heard.wait(10.0)
    assert sent.is_kept
    assert not sender._unkept
    sender.abort()
    works[0].keep()  # a sender that is gone is no matter of who keeps


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ([Kept(7), Kept(0)], "keeps what it has not taken"),  # the first was never asked for
        ([Taken(99)], "has taken what it was not given"),
    ],
)
def test_a_receiver_that_says_what_cannot_be_ends_the_group(
    directory: Path, store: StoreDouble, says: list[Any], found: str
) -> None:
    secret = b"r" * 32
    store.set("one-sided/1", f"{hashlib.sha256(secret).hexdigest()} ")
    sender = OneSidedSender(store, 2)
    connection = MemberConnection(connect(listed(store), 5.0))
    try:
        connection.send(Hello(1, secret))
        assert isinstance(connection.receive(5.0)[0], Welcome)
        for message in says[:-1]:
            connection.send(message)
        sent = sender.broadcast(filled(1), 10.0, BucketOptions(on_kept=lambda: None))
        connection.send(says[-1])
        assert sent.wait_until(soon())
        with pytest.raises(OneSidedError, match=found):
            sent.finish()
    finally:
        connection.close()
    until(lambda: not sender.thread.is_alive())


def test_a_buffer_that_is_gone_is_unmapped(join: Join) -> None:
    sender, (receiver,) = join(1)
    for value in range(5):
        buffer = filled(value)
        sent = sender.broadcast(buffer, 10.0)
        work = receiver.broadcast(empty(), 10.0)
        assert work.wait_until(soon())
        assert sent.wait_until(soon())
        del buffer, sent, work
    assert len(mapped_by(receiver)) <= 2


def test_bytes_elsewhere_are_refused(join: Join) -> None:
    sender, _ = join(1)
    with pytest.raises(UnsupportedError, match=r"backends\.allocate"):
        sender.broadcast(empty(), 10.0)
    with pytest.raises(UnsupportedError):
        sender.broadcast(filled(1)[::2], 10.0)


def test_a_receiver_that_leaves_is_an_error_at_once(join: Join) -> None:
    sender, (first, second) = join(2)
    sent = sender.broadcast(filled(1), 10.0)
    work = first.broadcast(empty(), 10.0)
    assert work.wait_until(soon())
    second.abort()
    assert sent.wait_until(soon())
    with pytest.raises(OneSidedError, match="rank 2 is gone"):
        sent.finish()
    with pytest.raises(OneSidedError, match="rank 2 is gone"):
        sender.broadcast(filled(1), 10.0)


@pytest.mark.parametrize("moment", ["as it looks for the sender", "as it connects"])
def test_a_receiver_that_left_before_it_came_is_an_error_at_once(
    join: Join, store: StoreDouble, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    leaving, left = threading.Event(), threading.Event()

    def slowly(name: str, timeout_seconds: float) -> object:
        if threading.current_thread() is second.thread:
            leaving.set()
            assert left.wait(10.0)
        return connect(name, timeout_seconds)

    monkeypatch.setattr("weft_rl.transport.one_sided.members.connect", slowly)
    # The sender comes last: receivers look for it meanwhile.
    second = OneSidedReceiver(store, 2, torch.device("cpu"))
    until(lambda: "one-sided/2" in store.values)
    if moment == "as it looks for the sender":
        second.abort()
        left.set()
    sender, _ = join(1, num_others=1)
    if moment == "as it connects":
        assert leaving.wait(10.0)
        second.abort()
        left.set()
    with pytest.raises(OneSidedError, match="rank 2 is gone"):
        send(sender)


def test_a_sender_that_leaves_is_an_error_at_once(join: Join) -> None:
    sender, (receiver,) = join(1)
    sender.broadcast(filled(1), 10.0)
    receiver.broadcast(empty(), 10.0).wait_until(soon())
    work = receiver.broadcast(empty(), 10.0)
    sender.abort()
    assert sender.settle(0.0)
    assert work.wait_until(soon())
    assert work.done
    with pytest.raises(OneSidedError, match="closed its socket"):
        work.finish()
    with pytest.raises(OneSidedError):
        receiver.broadcast(empty(), 10.0)


def test_a_receiver_that_never_acknowledges_is_waited_for_until_the_deadline(join: Join) -> None:
    sender, (receiver, _) = join(2)
    sent = sender.broadcast(filled(1), 10.0)
    assert receiver.broadcast(empty(), 10.0).wait_until(soon())
    assert not sent.wait_until(time.monotonic() + 0.05)  # the other posts no buffer
    assert not sent.done
    sender.abort()
    assert sent.done


def test_a_copy_that_the_sender_did_not_wait_for_is_none(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender left, and may have packed other bytes, while it was made."""
    sender, (receiver,) = join(1)
    copying, copied = threading.Event(), threading.Event()

    def slowly(into: np.ndarray, source: np.ndarray) -> None:
        copying.set()
        assert copied.wait(10.0)
        into[:] = source

    monkeypatch.setattr("weft_rl.transport.one_sided.memory.np.copyto", slowly)
    work = receiver.broadcast(empty(), 10.0)
    sender.broadcast(filled(1), 10.0)
    assert copying.wait(10.0)
    receiver_is_safe = receiver.settle(0.01)
    sender.abort()
    copied.set()
    assert work.wait_until(soon())
    with pytest.raises(OneSidedError):
        work.finish()
    assert not receiver_is_safe


def test_settled_memory_is_written_no_more(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, (receiver,) = join(1)
    copying, go_on = threading.Event(), threading.Event()

    def slowly(into: np.ndarray, source: np.ndarray) -> None:
        copying.set()
        assert go_on.wait(10.0)
        into[:] = source

    monkeypatch.setattr("weft_rl.transport.one_sided.memory.np.copyto", slowly)
    monkeypatch.setattr("weft_rl.transport.one_sided.memory._COPIED_BYTES", SIZE // 4)
    into = empty()
    receiver.broadcast(into, 10.0)
    sender.broadcast(filled(1), 10.0)
    assert copying.wait(10.0)
    receiver.abort()
    assert not receiver.settle(0.01)
    go_on.set()
    assert receiver.settle(10.0)
    assert int(into.sum()) == SIZE // 4  # the piece that was under way


@pytest.mark.usefixtures("no_descriptors")
def test_a_sender_survives_a_time_without_descriptors(join: Join) -> None:
    sender, (receiver,) = join(1)
    work = receiver.broadcast(empty(), 10.0)
    send(sender)
    assert work.wait_until(soon())


def test_sizes_must_agree(join: Join) -> None:
    sender, (receiver,) = join(1)
    work = receiver.broadcast(torch.zeros(5, dtype=torch.uint8), 10.0)
    sender.broadcast(filled(1), 10.0)
    assert work.wait_until(soon())
    with pytest.raises(OneSidedError, match="sends 1,048,576 bytes where 5 are expected"):
        work.finish()


# -- strangers and liars ---------------------------------------------------------------------


def listed(store: StoreDouble) -> str:
    until(lambda: "one-sided/0" in store.values)
    return store.values["one-sided/0"].decode().split()[1]


def test_another_process_with_the_wrong_secret_is_refused(
    join: Join, store: StoreDouble, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, members.__name__)
    store.set("one-sided/2", f"{hashlib.sha256(b'its own').hexdigest()} ")
    sender, _ = join(1, num_others=1)
    name = listed(store)
    for rank in (2, 0, 7):
        stranger = MemberConnection(connect(name, 5.0))
        stranger.send(Hello(rank, bytes(32)))
        with pytest.raises(PeerError, match=r"gone|closed"):
            stranger.receive(5.0)
        stranger.close()
    odd = MemberConnection(connect(name, 5.0))
    odd.send(Taken(0))
    with pytest.raises(PeerError, match=r"gone|closed"):
        odd.receive(5.0)
    odd.close()
    assert not sender.error  # nobody was harmed
    own = f"the peer (pid {os.getpid()})"
    assert [record.getMessage() for record in caplog.records] == [
        f"refused on a group's socket: {own} {why}"
        for why in (
            "says that it is rank 2, and is not the group's",
            "says that it is rank 0, which is not awaited",
            "says that it is rank 7, which is not awaited",
            "began with Taken",
        )
    ]
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_the_silent_keep_no_receiver_out(join: Join, store: StoreDouble) -> None:
    sender, _ = join(0, num_others=1)
    name = listed(store)
    with contextlib.ExitStack() as silent:
        for _ in range(3 * members._MAX_SILENT):
            silent.enter_context(connect(name, 5.0))
        receiver = OneSidedReceiver(store, 1, torch.device("cpu"))
        work = receiver.broadcast(into := empty(), 10.0)
        sender.broadcast(filled(7), 10.0)
        assert work.wait_until(soon())
        work.finish()
        assert into.eq(7).all()
        receiver.abort()


def test_a_rank_has_one_place(join: Join, store: StoreDouble) -> None:
    sender, (receiver,) = join(1)
    until(lambda: joined(sender))
    again = MemberConnection(connect(listed(store), 5.0))
    again.send(Hello(1, receiver._place.secret))
    with pytest.raises(PeerError, match=r"gone|closed"):
        again.receive(5.0)
    again.close()


def test_another_user_at_a_groups_socket_is_warned_of(
    join: Join,
    store: StoreDouble,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else may enter the directory, so it is root, or the directory is not as it should."""
    sender, _ = join(1)
    until(lambda: joined(sender))
    name, uid = listed(store), os.geteuid()
    with connect(name, 5.0) as stranger, monkeypatch.context() as patch:
        patch.setattr("weft_rl.ipc.connection.os.geteuid", lambda: uid + 1)
        stranger.send(b"x")
        stranger.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):  # it was not read
            assert stranger.recv(1) == b""
        until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"(pid {os.getpid()}) is of uid {uid}, this process of {uid + 1}" in record.getMessage()
    assert not sender.error


Lie = Callable[[MemberConnection, bytes], None]


def _no_welcome(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Taken(1))


def _other_secret(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(bytes(32)))


def _unknown_buffer(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(secret))
    connection.send(Ready(0, 7, 0, SIZE))


def _beyond_the_end(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(secret))
    file, _ = export_of(buffer := filled(1))
    connection.send(Export(1, buffer.numel()), file.fd)
    connection.send(Ready(0, 1, 256, SIZE))


def _longer_tail(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(secret))
    file, _ = export_of(filled(1))
    connection.send(Export(1, SIZE), file.fd)
    connection.send(Ready(0, 1, 0, SIZE, b"t" * 33))


def _smaller_file(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(secret))
    file, _ = export_of(buffer := filled(1))
    connection.send(Export(1, buffer.numel() + 1), file.fd)


def _unsealed(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(secret))
    fd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    connection.send(Export(1, SIZE), fd)
    os.close(fd)


def _no_memory_file(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(secret))
    with open("/dev/zero", "rb") as file:
        connection.send(Export(1, SIZE), file.fileno())


def _too_many_buffers(connection: MemberConnection, secret: bytes) -> None:
    connection.send(Welcome(secret))
    file, _ = export_of(buffer := filled(1))
    for number in range(65):
        connection.send(Export(number, buffer.numel()), file.fd)


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        (_no_welcome, "began with Taken"),
        (_other_secret, "says that it is rank 0, and is not the group's"),
        (_unknown_buffer, "never handed over buffer 7"),
        (_beyond_the_end, r"bytes [\d,]+ to 1,048,832 of 1,048,576"),
        (_longer_tail, "33 bytes beside a bucket, where 32 are expected at most"),
        (_smaller_file, "has 1,048,576 of 1,048,577 bytes"),
        (_unsealed, "not sealed against shrinking"),
        (_no_memory_file, "cannot be mapped"),
        (_too_many_buffers, "more than 64 buffers"),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else "",
)
def test_a_sender_that_lies_is_found_out(
    directory: Path, store: StoreDouble, lie: Lie, found: str
) -> None:
    listener, name = listen(1)
    secret = b"s" * 32
    store.set("one-sided/0", f"{hashlib.sha256(secret).hexdigest()} {name}")
    receiver = OneSidedReceiver(store, 1, torch.device("cpu"))
    work = receiver.broadcast(empty(), 10.0, BucketOptions(tail_bytes=32))
    connection = MemberConnection(listener.accept()[0])
    try:
        assert isinstance(connection.receive(5.0)[0], Hello)
        lie(connection, secret)
        assert work.wait_until(soon())
        with pytest.raises(OneSidedError, match=found):
            work.finish()
        until(lambda: not receiver.thread.is_alive())
        assert not mapped_by(receiver)
    finally:
        unlink(name)
        connection.close()
        listener.close()


_SENDER = """
import os, sys, time
import torch
from tests.doubles.rendezvous import StoreDouble
from weft_rl.transport.one_sided.memory import allocate_file
from weft_rl.transport.one_sided.members import OneSidedSender

store = StoreDouble()
store.set("one-sided/1", sys.argv[1] + " ")
sender = OneSidedSender(store, 2)
print(store.get("one-sided/0").decode(), flush=True)
sender.broadcast(allocate_file(2**20).fill_(7), 60.0).wait_until(time.monotonic() + 60.0)
child = os.fork()  # it loads data, say
if child:
    print(child, flush=True)
time.sleep(60.0 if child else 20.0)
os._exit(0)
"""


def test_a_sender_that_is_killed_is_an_error_at_once_and_its_pages_stay(
    directory: Path, store: StoreDouble
) -> None:
    """Also where a child of it lives on."""
    receiver = OneSidedReceiver(store, 1, torch.device("cpu"))
    until(lambda: "one-sided/1" in store.values)
    digest = store.values["one-sided/1"].decode().strip()
    command = [sys.executable, "-c", _SENDER, digest]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
        try:
            assert sender.stdout is not None
            store.set("one-sided/0", sender.stdout.readline().strip())
            into = empty()
            assert receiver.broadcast(into, 60.0).wait_until(soon())
            child = int(sender.stdout.readline())
            mapped = next(iter(mapped_by(receiver).values())).content
            waiting = receiver.broadcast(empty(), 60.0)
            began = time.monotonic()
        finally:
            sender.send_signal(signal.SIGKILL)
    try:
        assert waiting.wait_until(soon())
        assert time.monotonic() - began < 5.0
        os.kill(child, 0)  # it was there all the time
        (left,) = directory.iterdir()
        os.utime(left, (1.0, 1.0))  # it died a while ago
        listener, name = listen(1)  # who starts on this host removes the sockets of the dead
        listener.close()
        unlink(name)
        assert not os.listdir(directory)
    finally:
        os.kill(child, signal.SIGKILL)
    with pytest.raises(OneSidedError, match=r"closed its socket|gone"):
        waiting.finish()
    assert int(mapped.min()) == int(mapped.max()) == int(into.min()) == 7


def test_what_is_lent_is_the_senders_until_it_is_given_back(join: Join) -> None:
    sender, (receiver,) = join(1)
    buffer = filled(1)
    sent = sender.broadcast(buffer, 10.0)
    into = empty()
    work = receiver.broadcast(into, 10.0, BucketOptions(True, 3))
    assert work.wait_until(soon())
    work.finish()
    assert work.arrived.tail == b"\1\1\1"
    assert work.arrived.lent is not None
    assert int(work.arrived.lent.min()) == int(work.arrived.lent.max()) == 1
    assert not into.any()
    assert not sent.wait_until(time.monotonic() + 0.05)  # it may not be written yet
    work.give_back()
    assert sent.wait_until(soon())
    assert work.arrived.lent is None
    work.give_back()  # again: nothing
    other = receiver.broadcast(into, 10.0)  # whoever does not borrow gets a copy
    sender.broadcast(buffer, 10.0)
    assert other.wait_until(soon())
    assert other.arrived.lent is None
    assert bool(into.all())


@pytest.mark.parametrize("tail", [b"", b"tail", b"t" * 20_000])
def test_what_a_receiver_drops_is_neither_copied_nor_lent(join: Join, tail: bytes) -> None:
    sender, (receiver, other) = join(2)
    room = 2 * MAX_TAIL_BYTES
    sent = sender.broadcast(filled(1), 10.0, BucketOptions(False, room, tail))
    into = torch.empty(1, dtype=torch.uint8).expand(SIZE)  # it must not be written
    options = BucketOptions(True, room, is_dropped=True)
    dropped = receiver.broadcast(into, 10.0, options)
    taken = other.broadcast(empty(), 10.0, BucketOptions(True, room))
    for work in (dropped, taken):
        assert work.wait_until(soon())
        work.finish()
    assert (dropped.arrived.lent, dropped.arrived.tail) == (None, None)
    assert taken.arrived.lent is not None
    for work in (dropped, taken):
        work.give_back()
        assert work.keep()
    assert sent.wait_until(soon())


@pytest.mark.parametrize("borrows", [True, False])
@pytest.mark.parametrize(
    ("room", "tail"), [(64, b"tail"), (64, b"t" * 64), (2 * MAX_TAIL_BYTES, b"t" * 20_000)]
)
def test_a_tail_goes_beside_the_buffer_unless_it_is_long(
    join: Join, room: int, tail: bytes, *, borrows: bool
) -> None:
    sender, (receiver, late) = join(2)
    buffer, into = filled(1), empty()
    sent = sender.broadcast(buffer, 10.0, BucketOptions(False, room, tail))
    is_beside = len(tail) <= MAX_TAIL_BYTES
    assert (bytes(buffer[SIZE - room :][: len(tail)].tolist()) != tail) == is_beside
    for each in (receiver, late):  # whoever comes late is told the same
        work = each.broadcast(into.zero_(), 10.0, BucketOptions(borrows, room))
        assert work.wait_until(soon())
        work.finish()
        content, found = work.arrived
        assert found is not None
        assert found == tail if is_beside else found.startswith(tail) and len(found) == room
        assert (content is not None) == borrows
        content = into if content is None else content
        assert bool((content[: SIZE - room] == 1).all())
        work.give_back()
    assert sent.wait_until(soon())


def test_a_receiver_that_is_behind_can_be_told_of_all_that_is_under_way(join: Join) -> None:
    """Eight buckets at most; nobody waits until it has read of the first."""
    sender, (receiver,) = join(1)
    first = receiver.broadcast(empty(), 10.0)
    sender.broadcast(filled(0), 10.0)
    assert first.wait_until(soon())
    with receiver._copying:  # its thread reads nothing from now on
        held = receiver.broadcast(empty(), 10.0)
        tail = b"t" * MAX_TAIL_BYTES
        sender.broadcast(filled(1), 10.0)
        sent = [
            sender.broadcast(filled(value), 10.0, BucketOptions(False, MAX_TAIL_BYTES, tail))
            for value in range(2, 10)
        ]
        assert not any(work.done for work in sent)
    assert held.wait_until(soon())
    for _ in sent:
        work = receiver.broadcast(empty(), 10.0, BucketOptions(tail_bytes=MAX_TAIL_BYTES))
        assert work.wait_until(soon())
        work.finish()
        assert work.arrived.tail == tail


def test_what_is_lent_stays_mapped_when_the_group_ends(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(FileMapping, "close", lambda mapping: closed.append(id(mapping)))
    sender, (receiver,) = join(1)
    sender.broadcast(filled(1), 10.0)
    work = receiver.broadcast(empty(), 10.0, BucketOptions(borrows=True))
    assert work.wait_until(soon())
    sender.abort()
    stays(lambda: not closed, 0.1)
    with pytest.raises(OneSidedError, match="left while its memory was read"):
        work.give_back()
    until(lambda: closed)


def test_what_is_lent_lives_as_long_as_anybody_reads_it(directory: Path) -> None:
    file, begin = export_of(filled(3))
    export, fd = file.offer()
    mapping = FileMapping(fd, export.num_bytes)
    with pytest.raises(OneSidedError, match="bytes 1 to"):
        mapping.lent(begin + 1, export.num_bytes)
    lent = mapping.lent(begin, export.num_bytes)
    assert lent is not None
    del mapping, file
    gc.collect()
    assert int(lent.min()) == int(lent.max()) == 3


def test_nothing_is_lent_to_whoever_has_stopped_reading(join: Join) -> None:
    sender, (receiver,) = join(1)
    work = receiver.broadcast(empty(), 10.0, BucketOptions(borrows=True))
    work.give_back()
    sender.broadcast(filled(1), 10.0)
    assert work.wait_until(soon())
    assert work.arrived.lent is None
    assert not receiver._lent.total()


def test_a_sender_that_frees_what_it_has_lent_is_refused(join: Join) -> None:
    sender, (receiver,) = join(1)
    buffer = filled(1)
    sender.broadcast(buffer, 10.0)
    work = receiver.broadcast(empty(), 10.0, BucketOptions(borrows=True))
    assert work.wait_until(soon())
    (member,) = joined(sender).values()
    member.connection.send(Withdraw(export_of(buffer)[0].export_id))
    until(lambda: receiver.error)
    assert "being read" in receiver.error
    assert mapped_by(receiver)
    until(lambda: sender.error)  # it was told, and may write there from now on
    with pytest.raises(OneSidedError, match="left while its memory was read"):
        work.give_back()
    until(lambda: not mapped_by(receiver))
