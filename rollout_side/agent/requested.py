"""Which exact version answers a request for ``math``, ``math@17``, ``base`` or ``base@3``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.contract.errors import NotFoundError, PeerUnavailableError
from weft.contract.names import (
    BASE_POLICY,
    AdapterVersions,
    PolicyVersion,
    VersionVector,
    check_name,
)

#: Versions that an answer lists at most, and characters of the list; see ``rpc.status``.
_MAX_LISTED = 10
_MAX_CHARS = 200


def resolve(
    asked: str,
    served: VersionVector,
    newest: Callable[[str], int],
    *,
    in_contact: bool,
) -> PolicyVersion:
    """The version that answers.

    Args:
        asked: A policy, or one version of it.
        served: What can be asked now.
        newest: The highest number that was heard of a policy; 0 if none was.
        in_contact: Whether anybody can tell what bare names stand for now.

    Raises:
        InvalidNameError: It is neither.
        NotFoundError: It is not served, and will not be: metadata ``versions``, what is served
            of the policy, or instead of it, the newest last.
        PeerUnavailableError: ``VERSION_AHEAD``: it may come. ``COORDINATOR_AWAY``: it is a bare
            name, out of contact.
    """
    if "@" in asked:
        wanted = PolicyVersion.parse(asked)
        if served.holds(wanted):
            return wanted
        heard = newest(wanted.policy)
        if wanted.version > heard:
            known = (
                f"of {wanted.policy} this replica has heard up to @{heard}"
                if heard
                else (f"this replica has heard of no version of {wanted.policy}")
            )
            raise PeerUnavailableError(f"{asked} is not here yet: {known}", reason="VERSION_AHEAD")
        there = _listed(_versions(wanted.policy, served))
        raise NotFoundError(
            f"{asked} was retired, rolled back or replaced; "
            + (f"of {wanted.policy} there is {there}" if there else "nothing is left of it"),
            metadata={"versions": there},
        )
    check_name(asked, "policy")
    if not in_contact:
        there = _listed(_versions(asked, served))
        raise PeerUnavailableError(
            "bare names are refused out of contact with the coordinator: ask for an exact version"
            + (f", {there}" if there else ""),
            reason="COORDINATOR_AWAY",
        )
    if asked == BASE_POLICY:
        return PolicyVersion(BASE_POLICY, served.base)
    alias = served.adapters.get(asked, AdapterVersions()).alias
    if not alias:
        there = _listed(_versions(asked, served) or _names(served))
        raise NotFoundError(
            f"nothing here is called {asked}; there is {there}",
            reason="POLICY_UNKNOWN",
            metadata={"versions": there},
        )
    return PolicyVersion(asked, alias)


def _versions(policy: str, served: VersionVector) -> list[str]:
    if policy == BASE_POLICY:
        return [str(PolicyVersion(BASE_POLICY, served.base))]
    numbers = served.adapters.get(policy, AdapterVersions()).versions
    return [str(PolicyVersion(policy, number)) for number in sorted(numbers)]


def _names(served: VersionVector) -> list[str]:
    aliases = {policy: entry.alias for policy, entry in sorted(served.adapters.items())}
    named = [str(PolicyVersion(policy, alias)) for policy, alias in aliases.items() if alias]
    return [*named, str(PolicyVersion(BASE_POLICY, served.base))]


def _listed(versions: Iterable[str]) -> str:
    """The last of these that have room, whole."""
    listed = ""
    for version in [*versions][: -_MAX_LISTED - 1 : -1]:
        longer = f"{version}, {listed}" if listed else version
        if len(longer) > _MAX_CHARS:
            break
        listed = longer
    return listed
