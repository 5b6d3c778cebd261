"""Versions in a spill directory, and which of them are removed, or followed by changes.

A base that came as changes is written as such (``Link``), if the base that they change is there. It
can be read as long as all is there that it follows from, down to a base that is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout_side.memory.versions import StagedVersion
from rollout_side.spill.files import Facts, Link
from weft_rl.contract.names import BASE_POLICY, PolicyVersion

#: Changes follow one another on disk so many times at most, and have at most this part of the
#: bytes of the base together: all are read as a version is restored.
MAX_LINKS = 16
_LINKS_SHARE = 2


@dataclass(frozen=True)
class SpillListing:
    """Versions that lie in a spill directory at one time."""

    versions: Mapping[Path, PolicyVersion]
    """Version of each directory."""
    facts: Mapping[Path, Facts]
    """Facts of the bases, as far as they can be read."""

    def chain_of(self, path: Path) -> tuple[Path, ...]:
        """Return the directories that a version is read from: a whole one, then those of changes,
        its own last. Empty if one is missing."""
        chain: list[Path] = []
        while path in self.versions and path not in chain:
            chain.insert(0, path)
            facts = self.facts.get(path)
            if facts is None or not facts.changes_of:
                return tuple(chain)
            path = path.parent / facts.changes_of
        return ()

    def superseded(
        self,
        *,
        retired: Collection[PolicyVersion],
        served_base: int,
        base_copies: int,
        parents: Collection[Path] = (),
    ) -> list[Path]:
        """List the versions to remove: retired adapters, and bases that need not be kept. The
        served base is kept, and the ``base_copies`` newest, the served one counted among them; and
        whatever these follow from.

        Args:
            served_base: Base that this replica and its pool serve; 0 if that is not certain, which
                keeps all bases.
            parents: Bases whose changes are to be written.
        """
        bases = {v.version for v in self.versions.values() if v.policy == BASE_POLICY}
        kept = {served_base, *sorted(bases | {served_base})[-base_copies:]}

        def may_leave(version: PolicyVersion) -> bool:
            if version.policy == BASE_POLICY:
                return served_base > 0 and version.version not in kept
            return version in retired

        leaving = [path for path, version in self.versions.items() if may_leave(version)]
        staying = [*parents, *(path for path in self.versions if path not in leaving)]
        needed = {each for path in staying for each in self.chain_of(path)}
        return [path for path in leaving if path not in needed]


def link_of(
    copy: StagedVersion,
    listing: SpillListing,
    usable: Collection[Path],
    size_bytes: Callable[[Path], int],
) -> Link | None:
    """Return the changes that a held base can be written as: the fewest; None if it is to be whole.

    Args:
        usable: Versions that can be read.
        size_bytes: Returns the bytes of a version's files.
    """
    layout, most_bytes = copy.manifest.layout_digest, copy.manifest.total_bytes // _LINKS_SHARE
    there = {
        facts.content_digest: path
        for path, facts in listing.facts.items()
        if path in usable and facts.layout_digest == layout
    }
    for at in reversed(range(len(copy.changes))):
        parent = there.get(copy.changes[at].from_digest)
        if parent is None:
            continue
        link, older = Link(parent, copy.changes[at:]), listing.chain_of(parent)[1:]
        is_small = link.num_bytes + sum(map(size_bytes, older)) <= most_bytes
        return link if is_small and len(older) < MAX_LINKS else None
    return None
