"""The directory of sockets: whose it is, what is removed there, and whom one connects to."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.unit.transport.one_sided.conftest import listening
from weft_rl.transport.one_sided import directory as sockets
from weft_rl.transport.one_sided.directory import connect, why_unavailable
from weft_rl.transport.one_sided.messages import OneSidedError
from weft_rl.transport.one_sided.trial import TrialAnswerer

DEAD, STARTING = "d" * 32, "." + "5" * 32
OLD_SECONDS = 120.0


def age(path: Path, seconds: float = OLD_SECONDS) -> None:
    """Let it have been made so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def leave(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> None:
    """As a process that died: its socket stays."""
    with socket.socket(socket.AF_UNIX, kind) as dead:
        dead.bind(str(path))
        dead.listen(1)


def sweep() -> None:
    """As every process that comes to listen."""
    with listening():
        pass


def test_it_is_its_users_alone(directory: Path) -> None:
    assert why_unavailable() == ""
    directory.chmod(0o750)
    assert "must be this user's" in why_unavailable()
    with pytest.raises(OneSidedError, match="mode 0750"):
        TrialAnswerer()


def test_it_is_made_where_it_is_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ONE_SIDED_DIR", str(directory / "new"))
    assert why_unavailable() == ""
    assert (directory / "new").stat().st_mode & 0o777 == 0o700


def test_it_is_no_link_no_file_and_no_long_path(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "link").symlink_to(directory)
    (directory / "file").touch()
    for path, why in {
        str(directory / "link"): "is no directory",
        str(directory / "file"): "cannot be used",
        "relative": "no absolute path",
        str(directory / ("x" * 90)): "too long a path",
        str(directory / "none" / "none"): "cannot be used",
    }.items():
        monkeypatch.setenv("WEFT_ONE_SIDED_DIR", path)
        assert why in why_unavailable()


# -- what is removed -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DEAD, STARTING])
def test_sockets_of_the_dead_are_removed_after_a_minute(directory: Path, name: str) -> None:
    leave(directory / name)
    for seconds, is_left in ((0.0, True), (30.0, True), (OLD_SECONDS, False)):
        age(directory / name, seconds)
        sweep()
        assert (directory / name).exists() == is_left


@pytest.mark.parametrize("name", ["precious.txt", "0" * 32, "." + "0" * 32, "F" * 32, "f" * 33])
def test_whatever_else_lies_there_stays(directory: Path, name: str) -> None:
    """Also under a name as Weft's sockets have, and where Linux refuses connections alike."""
    kept = directory / name
    elsewhere = directory / "elsewhere"
    leave(elsewhere)
    for make in (kept.touch, kept.mkdir, lambda: kept.symlink_to(elsewhere)):
        make()
        age(kept)
        age(elsewhere)
        sweep()
        assert os.path.lexists(kept)
        assert elsewhere.exists()
        kept.rmdir() if kept.is_dir() else kept.unlink()


@pytest.mark.parametrize("name", ["agent.sock", "f" * 31, "f" * 33, "F" * 32, "g" * 32])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_dead_sockets_of_other_programs_stay(
    directory: Path, name: str, kind: socket.SocketKind
) -> None:
    leave(directory / name, kind)
    age(directory / name)
    sweep()
    assert (directory / name).exists()


def test_the_living_stay_and_are_not_knocked_at(directory: Path) -> None:
    """A connection would occupy a place among those that its owner has not accepted yet."""
    with listening(backlog=0) as (_, name):
        age(directory / name)
        for _ in range(20):
            sweep()
        connect(name, 0.0).close()


def test_one_that_does_not_listen_yet_is_not_taken_for_one_of_the_dead(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as starting:
        starting.bind(str(directory / STARTING))
        age(directory / STARTING)
        sweep()
        assert (directory / STARTING).exists()


def test_the_dead_are_found_among_any_number_of_other_files(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_MAX_SWEPT", 2)
    for number in range(50):
        (directory / f"other-{number}").touch()
    leave(directory / DEAD)
    age(directory / DEAD)
    sweep()
    assert not (directory / DEAD).exists()
    assert len([*directory.iterdir()]) == 50


# -- whom one connects to ------------------------------------------------------------------------


def test_who_does_not_accept_yet_is_waited_for(directory: Path) -> None:
    """Of a full backlog the kernel says EAGAIN at once, whatever a socket's timeout."""
    with listening(backlog=0) as (listener, name):
        first = connect(name, 5.0)
        accepted: list[socket.socket] = []
        later = threading.Timer(0.2, lambda: accepted.append(listener.accept()[0]))
        later.start()
        connect(name, 5.0).close()
        later.join()
        first.close()
        accepted[0].close()


def test_who_never_accepts_is_waited_for_until_the_deadline(directory: Path) -> None:
    with listening(backlog=0) as (_, name):
        first = connect(name, 5.0)
        began = time.monotonic()
        with pytest.raises(OneSidedError, match=r"has not accepted a connection for 0\.3 s"):
            connect(name, 0.3)
        assert 0.3 <= time.monotonic() - began < 5.0
        first.close()


def test_who_is_not_there_is_not_waited_for(directory: Path) -> None:
    leave(directory / DEAD)
    began = time.monotonic()
    for name in (DEAD, "0" * 32):
        with pytest.raises(OneSidedError, match="the peer has no socket in"):
            connect(name, 60.0)
    assert time.monotonic() - began < 5.0
