"""Names that people choose, ``policy@version``, and the vector of those that a replica serves;
and how far a version may be counted.

A process continues above the numbers that it is told (versions, tokens, epochs, generations), so a
number near the end of what a message can hold would leave no room to count. What is told is
followed up to ``MAX_FOLLOWED``; counting on from there stays below ``MAX_COUNTED``, and that below
``MAX_VERSION``, the bound of ``weft.v1``. What is beyond is refused.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from weft_rl.contract.errors import InvalidNameError, InvalidRequestError
from weft_rl.contract.options import shown_value

#: The policy whose bytes are the base model's weights.
BASE_POLICY = "base"
#: Largest version of a policy; exact in JSON, too, and as large as a message can hold.
MAX_VERSION: Final = 2**53 - 1
#: Largest number that is followed on a peer's word: nobody counts so far.
MAX_FOLLOWED: Final = 2**52
#: Largest number that a coordinator tells or orders.
MAX_COUNTED: Final = 2**52 + 2**51
#: By how much a number in an order may be above what the coordinator has told in an answer, before
#: it is asked.
HEAD_ROOM: Final = 2**20

_SENDER_PREFIX = "replica:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it may name a ``what`` ("policy", "trainer", "replica").

    Raises:
        InvalidNameError: The rule is 1 to 63 of ``[A-Za-z0-9._-]``, the first one a letter or
            digit, and no ``..``. Such a name is safe in a URL, a path, a Kubernetes label and in
            ``policy@version``.
    """
    if not isinstance(name, str):  # handed over by a user's program
        raise InvalidNameError(f"{shown_value(name)} cannot name a {what}: names are strings")
    if not _NAME.fullmatch(name) or ".." in name:
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise InvalidNameError(
            f"{shown!r} cannot name a {what}: use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit, without '..'"
        )
    return name


def replica_sender(replica_id: str) -> str:
    """Return the name of a replica as the sender of a clone; no trainer can be named so."""
    return f"{_SENDER_PREFIX}{replica_id}"


def is_replica_sender(trainer_id: str) -> bool:
    """Return whether a sender is a replica, not a trainer."""
    return trainer_id.startswith(_SENDER_PREFIX)


def check_adapter_name(policy: str) -> str:
    """Return ``policy`` if it may name an adapter's policy, which cannot be ``base``.

    Raises:
        InvalidNameError: As ``check_name``, or it is ``base``.
    """
    check_name(policy, "policy")
    if policy == BASE_POLICY:
        raise InvalidNameError("'base' names the base model's weights; choose another name")
    return policy


@dataclass(frozen=True, order=True, slots=True)
class PolicyVersion:
    """One version of one policy; ``str()`` gives ``math@17``.

    Versions start at 1, grow, and are never reused; ``base@0`` is what an engine
    was started with.
    """

    policy: str
    version: int

    def __str__(self) -> str:
        return f"{self.policy}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read ``math@17``.

        Raises:
            InvalidNameError: Not of that form, or of a number above ``MAX_VERSION``.
        """
        policy, at, number = text.rpartition("@")
        if not at or not number.isascii() or not number.isdigit():
            raise InvalidNameError(f"{text[:80]!r} is not of the form name@version")
        digits = number.lstrip("0") or "0"
        if len(digits) > len(str(MAX_VERSION)) or int(digits) > MAX_VERSION:
            raise InvalidNameError(f"{text[:80]!r} has a number above {MAX_VERSION}")
        return cls(check_name(policy, "policy"), int(digits))


def version_of(given: str | PolicyVersion) -> PolicyVersion:
    """Return a version that was given as ``math@17`` or as a value.

    Raises:
        InvalidNameError: It is neither.
    """
    if isinstance(given, PolicyVersion):
        return given
    if not isinstance(given, str):  # handed over by a user's program
        raise InvalidNameError(
            f"{shown_value(given)} is no version: give 'name@N' or a PolicyVersion"
        )
    return PolicyVersion.parse(given)


#: Version of the base that an engine was started with.
STARTED_WITH: Final = PolicyVersion(BASE_POLICY, 0)


def name_in_the_way(policy: str, served_names: Iterable[str]) -> str:
    """Return the server's own name that requests for an adapter would get instead of it: the
    policy's, or one of the form ``policy@N``. Empty when there is none."""
    for name in served_names:
        head, at, number = name.rpartition("@")
        if name == policy or (at and head == policy and number.isascii() and number.isdigit()):
            return name
    return ""


def provenance(trained_on: int | None, served_over: int) -> str:
    """Format an adapter's two bases, shown wherever they differ.

    For example ``trained on base@0, served over base@1``.

    Args:
        trained_on: Version of the base; None where nobody knows.
        served_over: Version of the base that it is served over.
    """
    known = "?" if trained_on is None else trained_on
    return f"trained on {BASE_POLICY}@{known}, served over {BASE_POLICY}@{served_over}"


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
    revision: int = field(default=0, compare=False)
    """Number of changes of it in its replica's process; what is told may arrive out of order."""

    @cached_property
    def key(self) -> Hashable:
        """Hashable value that is equal for equal vectors, as ``adapters`` cannot be hashed."""
        entries = sorted((name, e.versions, e.alias) for name, e in self.adapters.items())
        return self.base, tuple(entries)

    @cached_property
    def aliases(self) -> Mapping[str, int]:
        """Version that each bare name stands for, where it stands for one."""
        return {policy: entry.alias for policy, entry in self.adapters.items() if entry.alias}

    def holds(self, version: PolicyVersion) -> bool:
        """Return whether ``version`` can be requested here."""
        if version.policy == BASE_POLICY:
            return version.version == self.base
        entry = self.adapters.get(version.policy)
        return entry is not None and version.version in entry.versions

    def with_base(self, version: int) -> VersionVector:
        """Return the vector after the base was switched."""
        return replace(self, base=version)

    def with_adapter(self, version: PolicyVersion, alias: int = 0) -> VersionVector:
        """Return the vector after an adapter version was added and its alias flipped to it, or to
        ``alias``, a version that is held."""
        old = self.adapters.get(version.policy, AdapterVersions())
        entry = AdapterVersions(
            tuple(sorted({*old.versions, version.version})), alias or version.version
        )
        return replace(self, adapters={**self.adapters, version.policy: entry})

    def without_adapter(self, version: PolicyVersion) -> VersionVector:
        """Return the vector after an adapter version was retired."""
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
        """List the versions that ``have`` lacks to serve all of this, as ``policy@version``;
        sorted.

        Retained older adapter versions are not counted: what must be there is the
        base and the version behind each alias.
        """
        lacking = [] if have.base == self.base else [str(PolicyVersion(BASE_POLICY, self.base))]
        if self.aliases == have.aliases:  # most often so, and quick to see of thousands
            return lacking
        theirs = have.aliases
        return lacking + [
            str(PolicyVersion(policy, alias))
            for policy, alias in sorted(self.aliases.items())
            if theirs.get(policy) != alias
        ]


def check_followed(who: str, what: str, number: int, counted: int = 0) -> None:
    """Refuse a number that nobody can have counted to.

    Args:
        who: Peer that tells the number, for messages.
        what: Description of the number, for messages.
        number: Number that is told.
        counted: Number that this process has counted to; up to it all are taken.

    Raises:
        InvalidRequestError: It is above ``MAX_FOLLOWED``, and above ``counted``.
    """
    if number > max(MAX_FOLLOWED, counted):
        raise InvalidRequestError(
            f"{who} reports {what} {number}, which nobody can have counted to (the largest taken "
            f"is {MAX_FOLLOWED}): restart it, and find where the number came from",
            metadata={"field": what, "number": str(number)},
        )


def check_counted(what: str, number: int) -> None:
    """Refuse a number in an order or an answer to which no coordinator can have counted.

    Raises:
        InvalidRequestError: It is above ``MAX_COUNTED``.
    """
    if number > MAX_COUNTED:
        raise InvalidRequestError(
            f"{what} {number} is out of range: no coordinator counts above {MAX_COUNTED}",
            metadata={"field": what, "number": str(number)},
        )


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 replica``, ``2 replicas``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
