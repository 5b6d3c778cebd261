"""Which versions of a spill directory are removed, and which are written as changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_side.memory.versions import StagedVersion
from rollout_side.spill.files import Facts
from rollout_side.spill.listing import MAX_LINKS, SpillListing, link_of
from tests.unit.rollout.spill.held_versions import FINGERPRINT, LARGE, changed, held
from tests.unit.rollout.spill.workers import parsed
from weft_rl.contract.names import PolicyVersion


def listing_of(*bases: tuple[StagedVersion, str]) -> SpillListing:
    """Bases that lie in a directory, with the name of the one that each is changes of."""
    facts = {
        Path(str(copy.version)): Facts(
            copy.version,
            FINGERPRINT,
            copy.content_digest,
            copy.manifest.layout_digest,
            changes_of,
        )
        for copy, changes_of in bases
    }
    return SpillListing({path: own.version for path, own in facts.items()}, facts)


def successive(num_versions: int) -> list[StagedVersion]:
    """base@1 whole, and its successors as changes."""
    copies = [held("base@1", LARGE)]
    while len(copies) < num_versions:
        copies.append(changed(copies[-1], f"base@{len(copies) + 1}"))
    return copies


def names_of(paths: object) -> list[str]:
    assert isinstance(paths, tuple | list)
    return [path.name for path in paths]


@pytest.mark.parametrize(
    ("on_disk", "served", "retain", "gone"),
    [
        ("base@1 base@2 base@3", 3, 1, "base@1 base@2"),
        ("base@1 base@2 base@3", 3, 2, "base@1"),
        ("base@1 base@2", 3, 1, "base@1 base@2"),
        ("base@1 base@2 base@3", 1, 1, "base@2"),
        ("base@1 base@2 base@3", 0, 1, ""),
        ("math@1 math@2 code@1", 3, 1, "math@1"),
    ],
)
def test_which_may_leave(on_disk: str, served: int, retain: int, gone: str) -> None:
    there = {Path(name): PolicyVersion.parse(name) for name in on_disk.split()}
    listing = SpillListing(there, {})
    found = listing.superseded(retired=parsed("math@1"), served_base=served, base_copies=retain)
    assert " ".join(map(str, found)) == gone


def test_what_a_kept_base_follows_from_stays() -> None:
    one, two, three, four = successive(4)
    listing = listing_of((one, ""), (two, "base@1"), (three, "base@2"), (four, ""))
    assert names_of(listing.chain_of(Path("base@3"))) == ["base@1", "base@2", "base@3"]
    serving = {"retired": (), "base_copies": 1}
    assert listing.superseded(served_base=3, **serving) == []  # type: ignore[arg-type]
    gone = listing.superseded(served_base=4, **serving)  # type: ignore[arg-type]
    assert names_of(gone) == ["base@1", "base@2", "base@3"]
    parents = [Path("base@2")]
    gone = listing.superseded(served_base=5, parents=parents, **serving)  # type: ignore[arg-type]
    assert names_of(gone) == ["base@3", "base@4"]


@pytest.mark.parametrize("changes_of", ["base@9", "base@2", "base@3"])
def test_a_base_without_what_it_follows_from_has_no_chain(changes_of: str) -> None:
    _, two, three = successive(3)
    listing = listing_of((two, "base@3"), (three, changes_of))
    assert listing.chain_of(Path("base@3")) == ()
    gone = listing.superseded(retired=(), served_base=4, base_copies=1)
    assert names_of(gone) == ["base@2", "base@3"]


def test_a_base_is_written_as_the_fewest_changes() -> None:
    one, two, three, four = successive(4)
    whole = listing_of((one, ""))
    link = link_of(four, whole, whole.versions, lambda path: 0)
    assert link is not None
    assert (link.parent.name, len(link.changes)) == ("base@1", 3)
    both = listing_of((one, ""), (two, "base@1"))
    link = link_of(four, both, both.versions, lambda path: 0)
    assert link is not None
    assert (link.parent.name, len(link.changes)) == ("base@2", 2)
    assert link.num_bytes == sum(each.num_bytes for each in three.changes[1:]) + (
        four.changes[-1].num_bytes
    )
    assert link_of(four, both, (), lambda path: 0) is None, "none can be read"
    assert link_of(held("base@4", LARGE), both, both.versions, lambda path: 0) is None, "whole"


def test_a_base_of_another_layout_is_followed_by_none() -> None:
    two = successive(2)[1]
    other = listing_of((held("base@1", LARGE, bucket_bytes=2**20), ""))
    (facts,) = other.facts.values()
    assert facts.content_digest == two.changes[0].from_digest
    assert link_of(two, other, other.versions, lambda path: 0) is None


@pytest.mark.parametrize(
    ("num_links", "size_share", "is_linked"),
    [(MAX_LINKS - 1, 0.02, True), (MAX_LINKS, 0.02, False), (2, 0.2, True), (2, 0.25, False)],
)
def test_chains_are_short_and_small(num_links: int, size_share: float, is_linked: bool) -> None:
    *before, last = successive(num_links + 2)
    own = [(copy, f"base@{i}" if i else "") for i, copy in enumerate(before)]
    listing = listing_of(*own)
    size = int(last.manifest.total_bytes * size_share)
    assert bool(link_of(last, listing, listing.versions, lambda path: size)) is is_linked
