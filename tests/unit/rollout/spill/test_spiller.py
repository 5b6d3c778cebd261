"""When what is written, removed and read; several replicas in one directory; full disks."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollout_side.spill.files as spill_files
import rollout_side.spill.folder as spill_folder
from rollout_side.engine import SpillOrder
from rollout_side.memory.versions import StagedVersion
from rollout_side.spill import spiller
from rollout_side.spill.folder import SpillFolder
from rollout_side.spill.listing import SpillListing
from rollout_side.spill.spiller import Spiller
from tests.unit.rollout.spill.held_versions import BASE, CONFIG, held
from tests.unit.rollout.spill.workers import Worker, listed, parsed
from tests.waits import until
from weft_rl.contract.errors import CapacityError, DigestMismatchError, NotReadyError


def test_what_is_held_is_written_and_a_new_process_reads_it(start: Callable[..., Worker]) -> None:
    first = start()
    copies = [first.hold("base@1"), first.hold("math@2")]
    first.follow("math@2", "base@1", "math@9")  # which is not held any more
    first.lists("base@1", "math@2")
    first.spiller.close()
    again = start()
    assert listed(again.spiller) == parsed("base@1", "math@2")
    found = [(copy.version, copy.content_digest) for copy in again.spiller.copies]
    assert found == [(c.version, c.content_digest) for c in copies]
    for copy in copies:
        facts = again.folder.facts(copy.version, copy.content_digest).to_proto()
        assert facts.content_digest.value == copy.content_digest
        assert facts.content_digest.size_bytes == copy.manifest.total_bytes
        assert facts.layout_digest == copy.manifest.layout_digest
        assert facts.adapter.config_json == (CONFIG if copy.version.policy == "math" else "")
        again.restore(copy, f"t-{copy.version}")
        staged = again.store.staged(f"t-{copy.version}", copy.content_digest)
        assert staged.manifest == copy.manifest
        for (name, left), (_, right) in zip(staged.tensors(), copy.tensors(), strict=True):
            assert left.equal(right), name


def test_the_directory_is_read_as_often_for_many_versions_as_for_few(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    names = [f"math@{number}" for number in range(1, 31)]
    for name in names:
        worker.hold(name)
    worker.follow(*names)
    worker.lists(*names)
    read, real = list[None](), SpillFolder.listing

    def listing(folder: SpillFolder) -> SpillListing:
        read.append(None)
        return real(folder)

    worker.spiller.close()
    monkeypatch.setattr(SpillFolder, "listing", listing)
    again = Spiller(worker.store, worker.folder, 2)
    again.follow(SpillOrder(keep=parsed(*names)))
    until(lambda: len(read) >= 5)
    again.close()
    assert len(read) == 5


def test_retired_and_superseded_versions_leave(start: Callable[..., Worker]) -> None:
    worker = start(retain=1)
    for version in ("math@1", "math@2", "base@1"):
        worker.hold(version)
    worker.follow("math@1", "math@2", "base@1", served_base=1, serves_all=True)
    worker.lists("math@1", "math@2", "base@1")
    worker.hold("base@2")
    worker.follow("math@2", "base@2", retired=parsed("math@1"), served_base=2, serves_all=True)
    worker.lists("math@2", "base@2")
    assert worker.names == {"math@2", "base@2"}


def test_one_who_serves_other_than_the_pool_removes_no_base(start: Callable[..., Worker]) -> None:
    worker = start(retain=1)
    for number in (1, 2):
        worker.hold(f"base@{number}")
        worker.follow(f"base@{number}", served_base=number)
        until(lambda number=number: parsed(f"base@{number}")[0] in listed(worker.spiller))
    assert worker.names == {"base@1", "base@2"}


def test_two_replicas_share_a_directory(start: Callable[..., Worker]) -> None:
    first, second = start("r0"), start("r1")
    copy = first.hold("base@1")
    second.hold("base@1")
    for worker in (first, second):
        worker.follow("base@1")
    until(lambda: listed(first.spiller) or listed(second.spiller))
    # Whichever was first; the other looks again only at a new order, or much later.
    for worker in (first, second):
        worker.follow("base@1", served_base=1)
        worker.lists("base@1")
    assert len(list(first.folder.path.iterdir())) == 1
    third = start("r2")
    third.restore(copy)


def _partial(folder: SpillFolder, copy: StagedVersion, owner: str) -> Path:
    path = folder.path / f".partial.{copy.version}.{copy.content_digest.hex()}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half of it")
    (path / ".weft-owner").write_text(f"{owner} token")
    return path


@pytest.mark.parametrize(
    ("owner", "age_seconds", "is_taken_over"),
    [("r0", 0, True), ("r9", 0, False), ("r9", spill_folder.STALE_SECONDS + 60, True)],
)
def test_what_a_crash_left_is_never_a_version_and_is_taken_over_in_time(
    start: Callable[..., Worker], owner: str, age_seconds: float, is_taken_over: bool
) -> None:
    worker = start()
    copy = worker.hold("base@1")
    partial = _partial(worker.folder, copy, owner)
    then = time.time() - age_seconds
    for path in (*partial.iterdir(), partial):
        os.utime(path, (then, then))
    assert not worker.folder.listing().versions
    assert worker.folder.write(copy, "", going_on=lambda: True) is is_taken_over
    assert bool(worker.folder.listing().versions) is is_taken_over
    assert partial.exists() is not is_taken_over


def test_a_start_clears_away_what_its_former_process_left(start: Callable[..., Worker]) -> None:
    worker = start()
    mine = _partial(worker.folder, held("base@1", BASE), "r0")
    others = _partial(worker.folder, held("math@1", BASE), "r9")
    (worker.folder.path / ".removed.1").mkdir()
    worker.folder.open()
    assert (mine.exists(), others.exists()) == (False, True)
    assert not (worker.folder.path / ".removed.1").exists()


def test_who_is_second_leaves_what_is_there(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start("r0"), start("r1")
    copy = first.hold("base@1")
    real = spill_folder.write_version

    def overtaken(directory: Path, *args: Any, **kwargs: Any) -> None:
        real(directory, *args, **kwargs)
        monkeypatch.setattr(spill_folder, "write_version", real)
        directory.rename(directory.with_name(".aside"))
        assert second.folder.write(copy, "", going_on=lambda: True)
        directory.with_name(".aside").rename(directory)

    monkeypatch.setattr(spill_folder, "write_version", overtaken)
    assert first.folder.write(copy, "", going_on=lambda: True)
    assert first.names == {"base@1"}
    first.restore(copy)


def test_a_write_that_was_taken_over_publishes_nothing(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    copy = worker.hold("base@1")
    real = spill_folder.write_version

    def slow(directory: Path, *args: Any, **kwargs: Any) -> None:
        real(directory, *args, **kwargs)
        (directory / ".weft-owner").write_text("r9 token")

    monkeypatch.setattr(spill_folder, "write_version", slow)
    assert not worker.folder.write(copy, "", going_on=lambda: True)
    assert not worker.folder.listing().versions


def test_a_full_disk_leaves_nothing_and_is_tried_again(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    copy = worker.hold("base@1")
    worker.hold("math@1")
    real, is_full = spill_folder.write_version, threading.Event()

    def write(directory: Path, copy: StagedVersion, *args: Any, **kwargs: Any) -> None:
        real(directory, copy, *args, **kwargs)
        if copy.version.policy == "base":
            is_full.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill_folder, "write_version", write)
    worker.follow("base@1", "math@1")
    worker.lists("math@1")
    assert is_full.is_set()
    assert worker.names == {"math@1"}
    with pytest.raises(OSError, match="No space left"):
        worker.folder.write(copy, "", going_on=lambda: True)
    monkeypatch.setattr(spill_folder, "write_version", real)
    monkeypatch.setattr("rollout_side.spill.spiller._RETRY_SECONDS", 0.0)
    worker.spiller._retry_at.clear()
    worker.follow("base@1", "math@1", served_base=1)
    worker.lists("base@1", "math@1")


def test_the_bound_is_kept(start: Callable[..., Worker]) -> None:
    worker = start(capacity_bytes=2**20 + 5000)
    first, second = worker.hold("base@1"), worker.hold("base@2")
    assert worker.folder.write(first, "", going_on=lambda: True)
    with pytest.raises(CapacityError, match="larger --spill-gib"):
        worker.folder.write(second, "", going_on=lambda: True)
    assert worker.names == {"base@1"}


def test_a_push_that_needs_the_memory_takes_it_and_the_write_is_given_up(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(retain=1)
    worker.hold("base@1")
    reached, go_on = threading.Event(), threading.Event()
    real = spill_folder.write_version

    def wait(*args: Any, **kwargs: Any) -> None:
        reached.set()
        go_on.wait(10)
        real(*args, **kwargs)

    monkeypatch.setattr(spill_folder, "write_version", wait)
    worker.follow("base@1")
    assert reached.wait(10)
    worker.hold("base@2")  # the copy of base@1 is dropped, and may be written over
    go_on.set()
    worker.follow("base@2", served_base=2)
    worker.lists("base@2")
    assert worker.names == {"base@2"}


def test_a_damaged_version_is_refused_not_listed_and_written_anew(
    start: Callable[..., Worker],
) -> None:
    worker = start()
    copy = worker.hold("math@1")
    worker.follow("math@1")
    worker.lists("math@1")
    (path,) = worker.folder.listing().versions
    weights = path / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    usage = worker.store.usage()
    with pytest.raises(DigestMismatchError, match="have digest"):
        worker.restore(copy)
    assert listed(worker.spiller) == ()
    assert worker.store.usage().staging_bytes == usage.staging_bytes
    worker.follow("math@1", served_base=1)
    worker.lists("math@1")
    worker.restore(copy, "t-2")


def test_what_cannot_be_restored(start: Callable[..., Worker]) -> None:
    worker = start()
    copy = worker.hold("base@1")
    with pytest.raises(NotReadyError, match="is not being restored"):
        worker.spiller.restored("t-nothing")
    with pytest.raises(NotReadyError, match="cannot be restored") as caught:
        worker.restore(copy)
    assert caught.value.reason == "NOT_RETAINED"
    worker.folder.write(copy, "", going_on=lambda: True)
    worker.spiller.restore("t-2", copy.version, copy.content_digest, b"other")
    with pytest.raises(DigestMismatchError, match="layout is another"):
        until(lambda: worker.spiller.restored("t-2"))


def test_a_version_of_another_catalog_gives_way_to_the_one_that_is_served(
    start: Callable[..., Worker],
) -> None:
    worker = start()
    other = held("math@1", BASE[:2])
    worker.folder.write(other, CONFIG, going_on=lambda: True)
    copy = worker.hold("math@1")
    worker.look()
    with pytest.raises(NotReadyError, match="does not exist"):
        worker.restore(copy)
    assert listed(worker.spiller) == (), "it is of no use here"
    worker.follow("math@1")
    worker.lists("math@1")
    assert [p.name for p in worker.folder.listing().versions] == [
        f"math@1.{copy.content_digest.hex()}"
    ]


# -- disks that hang, and names that are none ---------------------------------------------------


@pytest.mark.parametrize("where", ["manifest", "tensors"])
def test_a_read_that_hangs_is_given_up_and_others_are_made(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A pipe that nobody writes to stands for a disk that does not answer."""
    monkeypatch.setattr(spiller, "STALL_SECONDS", 0.2)
    worker = start()
    stuck, well = worker.hold("math@1"), worker.hold("code@1")
    for copy in (stuck, well):
        worker.folder.write(copy, CONFIG, going_on=lambda: True)
    place = worker.folder.place_of(stuck.version, stuck.content_digest)
    file = place / ("weft.manifest" if where == "manifest" else "adapter_model.safetensors")
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    worker.look()
    with pytest.raises(NotReadyError, match=r"math@1 .* has not answered for 0\.2 s"):
        worker.restore(stuck)
    assert worker.spiller.ended_restore == "t-back"
    assert listed(worker.spiller) == parsed("code@1")
    worker.restore(well, "t-other")
    with pytest.raises(NotReadyError, match="the disk does not answer"):
        worker.restore(stuck, "t-again")  # no second thread hangs
    file.write_bytes(content)  # ends the read
    (thread,) = worker.spiller._hung.values()
    thread.join(10)
    assert not thread.is_alive()
    held_bytes = worker.store.usage()
    with pytest.raises(NotReadyError):
        worker.store.staged("t-back", stuck.content_digest)
    assert held_bytes == worker.store.usage()
    worker.spiller._refused.clear()
    worker.look()
    assert set(listed(worker.spiller)) == set(parsed("math@1", "code@1"))


def test_a_slow_disk_is_no_disk_that_hangs(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spiller, "STALL_SECONDS", 0.3)
    worker = start()
    copy = worker.hold("math@1")
    worker.folder.write(copy, CONFIG, going_on=lambda: True)
    real = spill_files._read_tensor

    def slow(*args: Any) -> None:
        time.sleep(0.2)
        real(*args)

    monkeypatch.setattr(spill_files, "_read_tensor", slow)
    began = time.monotonic()
    worker.restore(copy)
    assert time.monotonic() - began > 0.3


def test_a_directory_that_hangs_does_not_keep_a_worker_from_starting(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spiller, "STALL_SECONDS", 0.1)
    go_on = threading.Event()
    real = SpillFolder.listing

    def listing(folder: SpillFolder) -> SpillListing:
        go_on.wait(10)
        return real(folder)

    monkeypatch.setattr(SpillFolder, "listing", listing)
    worker = start()
    assert listed(worker.spiller) == ()
    copy = worker.hold("math@1")
    worker.follow("math@1")
    go_on.set()
    worker.lists("math@1")
    worker.restore(copy)


@pytest.mark.parametrize(
    "name",
    [
        "math@99999999999999999999",
        f"math@{2**53}",
        f"math@{'9' * 200}",
        "math@007",
        "math@-1",
        "math@",
        "math@1",
    ],
)
def test_what_is_no_version_is_skipped_and_named_once(
    start: Callable[..., Worker], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    worker = start()
    worker.hold("math@1")
    foreign = worker.folder.path / (name if name == "math@1" else f"{name}.{'0' * 16}")
    foreign.mkdir()
    worker.follow("math@1")
    worker.lists("math@1")
    worker.look()
    said = [r for r in caplog.records if "is no spilled version" in r.getMessage()]
    assert len(said) == 1
    assert str(foreign) in said[0].getMessage()
    assert foreign.exists()
