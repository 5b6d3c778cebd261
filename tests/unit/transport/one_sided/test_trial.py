"""Whether two processes can read each other's memory, and why they cannot."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.unit.transport.one_sided.conftest import listening
from weft_rl.ipc.connection import PeerError
from weft_rl.transport.one_sided import memory, trial
from weft_rl.transport.one_sided.directory import connect
from weft_rl.transport.one_sided.messages import (
    MESSAGES,
    MemberConnection,
    OneSidedError,
    Taken,
    Tried,
    Try,
)
from weft_rl.transport.one_sided.trial import TrialAnswerer, Trials, why_not_readable


@pytest.fixture
def answerer(directory: Path) -> Iterator[TrialAnswerer]:
    made = TrialAnswerer()
    yield made
    made.close()
    assert not made._listener._thread.is_alive()


def test_a_process_on_this_host_can(answerer: TrialAnswerer, directory: Path) -> None:
    assert why_not_readable([answerer.name] * 3) == ""
    answerer.close()
    assert [*directory.iterdir()] == []
    assert "has no socket in" in why_not_readable([answerer.name])


def _no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_trainer_without_a_descriptor_to_spare_is_told_so_and_takes_another_backend(
    answerer: TrialAnswerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", _no_descriptor)
        assert "no room for a buffer of 32 bytes: [Errno 24]" in why_not_readable([answerer.name])


def test_a_replica_without_a_descriptor_to_spare_answers_no_trial(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("weft_rl.ipc.listener.select.epoll", _no_descriptor)
        with pytest.raises(OneSidedError, match=r"no trial can be answered: .*Too many open"):
            TrialAnswerer()
    assert [*directory.iterdir()] == []


def test_a_process_that_could_is_not_asked_again(
    answerer: TrialAnswerer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(names: Sequence[str], device: torch.device) -> str:
        asked.extend(names)
        return why_not_readable(names, device)

    monkeypatch.setattr(trial, "why_not_readable", ask)
    trials, other = Trials(), TrialAnswerer()
    assert trials.why_not_readable([answerer.name]) == ""
    assert "no socket" in trials.why_not_readable([answerer.name, "0" * 32])
    assert trials.why_not_readable([answerer.name, other.name]) == ""
    assert trials.why_not_readable([other.name, answerer.name]) == ""
    assert asked == [answerer.name, "0" * 32, other.name]
    other.close()


@pytest.mark.parametrize("name", ["0" * 32, "../../etc/passwd", "x" * 200, "nul\0", ""])
def test_a_process_elsewhere_cannot(directory: Path, name: str) -> None:
    why = why_not_readable([name])
    assert "no socket" in why or "takes part in no trial" in why


def test_one_that_says_nothing_is_waited_for_no_longer(directory: Path) -> None:
    with listening() as (_, name):
        assert "silent until" in why_not_readable([name], timeout_seconds=0.05)


def test_one_that_reads_other_bytes_cannot(directory: Path) -> None:
    with listening() as (listener, name):

        def lie() -> None:
            connection = MemberConnection(listener.accept()[0])
            _, fd = connection.receive(5.0)
            assert fd is not None
            os.close(fd)
            connection.send(Tried(bytes(32)))
            connection.close()

        thread = threading.Thread(target=lie)
        thread.start()
        assert "read other bytes" in why_not_readable([name])
        thread.join()


def test_the_silent_delay_no_trial(answerer: TrialAnswerer) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(3 * trial._MAX_SILENT):
            silent.enter_context(connect(answerer.name, 5.0))
        assert why_not_readable([answerer.name], timeout_seconds=1.0) == ""


def test_an_answerer_survives_odd_askers(answerer: TrialAnswerer) -> None:
    records = [
        MESSAGES.pack_head(number) + content
        for number, content in map(MESSAGES.encode, (Taken(1), Try(2**40)))
    ]
    for odd in (b"", b"x", b"x" * 300, *records):
        asker = connect(answerer.name, 5.0)
        asker.send(odd)
        asker.close()
    asking = MemberConnection(connect(answerer.name, 5.0))
    buffer = memory.allocate_file(64)
    asking.send(Try(2**40), memory.export_of(buffer)[0].offer()[1])
    with pytest.raises(PeerError, match="closed"):
        asking.receive(5.0)
    asking.close()
    assert why_not_readable([answerer.name]) == ""


@pytest.mark.usefixtures("no_descriptors")
def test_an_answerer_survives_a_time_without_descriptors(answerer: TrialAnswerer) -> None:
    assert why_not_readable([answerer.name]) == ""


@pytest.mark.parametrize("num_bytes", [3 * 2**30, 4096])
def test_a_file_with_holes_is_not_filled_by_who_maps_it(
    answerer: TrialAnswerer, num_bytes: int
) -> None:
    """A sparse file of a stranger's would take as much memory as it says."""
    fd = os.memfd_create("holes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        connection = MemberConnection(connect(answerer.name, 2.0))
        try:
            connection.send(Try(num_bytes), fd)
            with pytest.raises(PeerError):
                connection.receive(2.0)
        finally:
            connection.close()
        assert os.fstat(fd).st_blocks == 0, "nothing of it was made"
        with pytest.raises(OneSidedError, match="has holes"):
            memory.FileMapping(fd, num_bytes)
        assert os.fstat(fd).st_blocks == 0
    finally:
        os.close(fd)
    assert why_not_readable([answerer.name]) == "", "it answers others"
