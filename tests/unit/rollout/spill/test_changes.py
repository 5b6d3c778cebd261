"""Bases that are written to disk as changes, and read back."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rollout_side.spill.folder as spill_folder
from rollout_side.memory.versions import StagedVersion
from rollout_side.spill.files import CHANGES, FACTS, Link, read_into, read_manifest, write_changes
from rollout_side.spill.listing import MAX_LINKS
from tests.unit.rollout.spill.held_versions import FINGERPRINT, LARGE, changed, flip, held
from tests.unit.rollout.spill.workers import Worker, listed, parsed
from tests.waits import until
from weft_rl.contract.errors import DigestMismatchError, InvalidManifestError, TransferAbortedError

Start = Callable[..., Worker]


def push(worker: Worker, before: StagedVersion | None, number: int) -> StagedVersion:
    """Hold a base and have it spilled: whole, or as a delta of the one before."""
    copy = held("base@1", LARGE) if before is None else changed(before, f"base@{number}")
    worker.hold(copy)
    name = str(copy.version)
    worker.follow(name, served_base=number, serves_all=True)
    until(lambda: copy.version in listed(worker.spiller))
    return copy


def chain_of(worker: Worker, copy: StagedVersion) -> list[str]:
    place = worker.folder.place_of(copy.version, copy.content_digest)
    return [path.name.rpartition(".")[0] for path in worker.folder.listing().chain_of(place)]


def check_restored(worker: Worker, copy: StagedVersion) -> None:
    worker.restore(copy, f"t-back-{copy.version}")
    staged = worker.store.staged(f"t-back-{copy.version}", copy.content_digest)
    for (name, left), (_, right) in zip(staged.tensors(), copy.tensors(), strict=True):
        assert left.view(torch.uint8).equal(right.view(torch.uint8)), name
    worker.store.discard(f"t-back-{copy.version}")


def test_a_delta_is_written_as_such_and_a_new_process_reads_it(start: Start) -> None:
    worker = start(retain=1)
    one = push(worker, None, 1)
    two = push(worker, one, 2)
    three = push(worker, two, 3)
    assert (one.changes, two.changes, three.changes) == ([], [], []), "they are on disk"
    assert chain_of(worker, three) == ["base@1", "base@2", "base@3"]
    place = worker.folder.place_of(three.version, three.content_digest)
    assert {path.name for path in place.iterdir()} == {CHANGES, FACTS, "weft.manifest"}
    assert sum(path.stat().st_size for path in place.iterdir()) < three.manifest.total_bytes / 10
    worker.spiller.close()
    again = start(retain=1)
    assert listed(again.spiller) == parsed("base@3", "base@2", "base@1")
    for copy in (three, two, one):
        facts = again.folder.facts(copy.version, copy.content_digest).to_proto()
        assert facts.content_digest.value == copy.content_digest
        check_restored(again, copy)


def test_after_so_many_changes_a_base_is_whole_and_what_it_had_followed_from_leaves(
    start: Start,
) -> None:
    worker = start(retain=1)
    copy: StagedVersion | None = None
    for number in range(1, MAX_LINKS + 2):
        copy = push(worker, copy, number)
        assert len(chain_of(worker, copy)) == number
        assert len(worker.names) == number
    check_restored(worker, copy)  # type: ignore[arg-type]
    copy = push(worker, copy, MAX_LINKS + 2)
    assert chain_of(worker, copy) == [str(copy.version)]
    until(lambda: worker.names == {str(copy.version)})
    check_restored(worker, copy)


def test_a_disk_that_is_slower_than_pushes_gets_their_changes_together(start: Start) -> None:
    worker = start(retain=1)
    one = push(worker, None, 1)
    copies = [one]
    for number in (2, 3, 4):
        copies.append(changed(copies[-1], f"base@{number}"))
        worker.hold(copies[-1])
    last = copies[-1]
    worker.follow("base@4", served_base=4, serves_all=True)
    until(lambda: last.version in listed(worker.spiller))
    assert chain_of(worker, last) == ["base@1", "base@4"]
    check_restored(worker, last)


def test_without_room_beside_the_former_base_one_is_whole(start: Start) -> None:
    """The former leaves first, as where none came as changes."""
    need = held("base@1", LARGE).manifest.total_bytes + 2**20
    worker = start(retain=1, capacity_bytes=need)
    one = push(worker, None, 1)
    two = push(worker, one, 2)
    assert chain_of(worker, two) == ["base@2"]
    assert worker.names == {"base@2"}


def _other_elements(directory: Path) -> None:
    """Changes of another base than the one before it."""
    other = changed(changed(held("base@1", LARGE), "base@7"), "base@8")
    shutil.rmtree(directory)
    directory.mkdir()
    link = Link(directory.with_name("one"), other.changes[1:])
    write_changes(directory, other, link, FINGERPRINT, going_on=lambda: True)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda d: (d / CHANGES).write_bytes((d / CHANGES).read_bytes()[:-3]),
    "cut head": lambda d: (d / CHANGES).write_bytes((d / CHANGES).read_bytes()[:9]),
    "missing": lambda d: (d / CHANGES).write_bytes(b""),
    "size": lambda d: flip(d / CHANGES, 7),
    "payload's size": lambda d: flip(d / CHANGES, 15),
    "runs": lambda d: flip(d / CHANGES, 24),
    "payload": lambda d: flip(d / CHANGES, -1000),
    "lost bucket": lambda d: _lose_bucket(d / CHANGES),
    "doubled bucket": lambda d: (d / CHANGES).write_bytes((d / CHANGES).read_bytes() * 2),
    "other elements": _other_elements,
}


def _lose_bucket(path: Path) -> None:
    data = path.read_bytes()
    table, payload = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8))
    path.write_bytes(data[16 + table + payload :])


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_changes_are_another_digest_or_an_error(tmp_path: Path, what: str) -> None:
    one = held("base@1", LARGE)
    two = changed(one, "base@2")
    whole, link = tmp_path / "one", tmp_path / "two"
    whole.mkdir()
    link.mkdir()
    spill_folder.write_version(whole, one, "", FINGERPRINT, going_on=lambda: True)
    write_changes(link, two, Link(whole, two.changes), FINGERPRINT, going_on=lambda: True)
    manifest = read_manifest(link)
    data = torch.empty(manifest.wire_bytes, dtype=torch.uint8)
    assert read_into([whole, link], manifest, data, lambda: None) == two.content_digest
    DAMAGE[what](link)
    found = "an error"
    with contextlib.suppress(InvalidManifestError):
        found = read_into([whole, link], manifest, data, lambda: None).hex()
    assert found != two.content_digest.hex()


def test_a_write_of_changes_is_given_up(tmp_path: Path) -> None:
    two = changed(held("base@1", LARGE), "base@2")
    with pytest.raises(TransferAbortedError, match="was dropped while"):
        write_changes(
            tmp_path, two, Link(tmp_path, two.changes), FINGERPRINT, going_on=lambda: False
        )


def test_a_damaged_base_is_refused_with_all_that_follow_from_it(start: Start) -> None:
    worker = start(retain=1)
    one = push(worker, None, 1)
    two = push(worker, one, 2)
    three = push(worker, two, 3)
    place = worker.folder.place_of(one.version, one.content_digest)
    flip(place / "model.safetensors", -1)
    with pytest.raises(DigestMismatchError, match=r"is not the committed base@2"):
        worker.restore(two)
    assert listed(worker.spiller) == ()
    worker.follow("base@3", served_base=3, serves_all=True, retired=parsed("math@1"))
    until(lambda: listed(worker.spiller) == parsed("base@3"))
    assert chain_of(worker, three) == ["base@3"], "it is written whole, from memory"
    check_restored(worker, three)


def test_a_base_whose_former_one_was_removed_is_not_listed_and_written_whole(start: Start) -> None:
    worker = start(retain=1)
    one = push(worker, None, 1)
    two = push(worker, one, 2)
    worker.folder.remove(worker.folder.place_of(one.version, one.content_digest))
    worker.look()
    assert listed(worker.spiller) == ()
    worker.follow("base@2", served_base=2, serves_all=True, retired=parsed("math@1"))
    worker.lists("base@2")
    assert chain_of(worker, two) == ["base@2"]
    check_restored(worker, two)


def test_a_base_whose_former_one_leaves_while_it_is_written_is_written_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica that shares the directory removes it."""
    worker = start(retain=1)
    one = push(worker, None, 1)
    real = spill_folder.write_changes

    def overtaken(*args: Any, **options: Any) -> None:
        real(*args, **options)
        worker.folder.remove(worker.folder.place_of(one.version, one.content_digest))

    monkeypatch.setattr(spill_folder, "write_changes", overtaken)
    two = worker.hold(changed(one, "base@2"))
    worker.follow("base@2", served_base=2, serves_all=True)
    until(lambda: not two.changes)
    worker.follow("base@2", served_base=2, serves_all=True, retired=parsed("math@1"))
    worker.lists("base@2")
    assert chain_of(worker, two) == ["base@2"]


def test_two_replicas_write_changes_into_one_directory(start: Start) -> None:
    workers = [start(owner, retain=1) for owner in ("r0", "r1")]
    copies = [[worker.hold(held("base@1", LARGE))] for worker in workers]
    for number in range(1, 6):
        for worker, own in zip(workers, copies, strict=True):
            if number > 1:
                own.append(worker.hold(changed(own[-1], f"base@{number}")))
            worker.follow(f"base@{number}", served_base=number, serves_all=True)
        for worker, own in zip(workers, copies, strict=True):
            until(lambda w=worker, c=own[-1]: _look(w, c))  # type: ignore[misc]
    for worker, own in zip(workers, copies, strict=True):
        check_restored(worker, own[-1])


def _look(worker: Worker, copy: StagedVersion) -> bool:
    worker.look()
    return copy.version in listed(worker.spiller)
