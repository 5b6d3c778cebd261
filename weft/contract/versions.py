"""What a replica serves, as a value."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from weft.contract.names import BASE_POLICY, PolicyVersion


@dataclass(frozen=True)
class AdapterVersions:
    """Versions of one adapter: those that can be requested, and the alias.

    ``alias`` is the version that the bare name stands for; 0 when none.
    """

    versions: tuple[int, ...] = ()
    alias: int = 0


@dataclass(frozen=True)
class VersionVector:
    """Version of the base and of every adapter that is served."""

    base: int = 0
    adapters: Mapping[str, AdapterVersions] = field(default_factory=dict)

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal vectors, as ``adapters`` cannot be hashed."""
        entries = sorted((name, e.versions, e.alias) for name, e in self.adapters.items())
        return self.base, tuple(entries)

    def holds(self, version: PolicyVersion) -> bool:
        """Whether ``version`` can be requested here."""
        if version.policy == BASE_POLICY:
            return version.version == self.base
        entry = self.adapters.get(version.policy)
        return entry is not None and version.version in entry.versions

    def with_base(self, version: int) -> VersionVector:
        """The vector after the base was switched."""
        return replace(self, base=version)

    def with_adapter(self, version: PolicyVersion, alias: int = 0) -> VersionVector:
        """The vector after an adapter version was added and its alias flipped to it,
        or to ``alias``, a version that is held."""
        old = self.adapters.get(version.policy, AdapterVersions())
        entry = AdapterVersions(
            tuple(sorted({*old.versions, version.version})), alias or version.version
        )
        return replace(self, adapters={**self.adapters, version.policy: entry})

    def without_adapter(self, version: PolicyVersion) -> VersionVector:
        """The vector after an adapter version was retired."""
        old = self.adapters.get(version.policy)
        if old is None:
            return self
        kept = tuple(v for v in old.versions if v != version.version)
        adapters = dict(self.adapters)
        if kept:
            adapters[version.policy] = AdapterVersions(kept, old.alias if old.alias in kept else 0)
        else:
            del adapters[version.policy]
        return replace(self, adapters=adapters)

    def missing_from(self, have: VersionVector) -> list[str]:
        """What ``have`` lacks to serve all of this, as ``policy@version``; sorted.

        Retained older adapter versions are not counted: what must be there is the
        base and the version behind each alias.
        """
        lacking = [] if have.base == self.base else [str(PolicyVersion(BASE_POLICY, self.base))]
        theirs = have.adapters
        for policy, entry in sorted(self.adapters.items()):
            held = theirs.get(policy)
            if entry.alias and (held is None or held.alias != entry.alias):
                lacking.append(str(PolicyVersion(policy, entry.alias)))
        return lacking
