"""Exact versions that answer requests for ``math``, ``math@17``, ``base`` or ``base@3``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rollout_side.agent.registration import HeartbeatOrders
from rollout_side.engine import AliasRefusals
from weft_rl.contract.errors import NotFoundError, PeerUnavailableError
from weft_rl.contract.names import (
    BASE_POLICY,
    AdapterVersions,
    PolicyVersion,
    VersionVector,
    check_name,
)
from weft_rl.contract.replica_report import AbsentPolicy

#: Versions that an answer lists at most, and characters of the list; see ``rpc.status``.
_MAX_LISTED = 10
_MAX_CHARS = 200


def resolve(
    asked: str,
    served: VersionVector,
    newest: Callable[[str], int],
    refused: AliasRefusals,
    absent: Mapping[str, AbsentPolicy],
) -> PolicyVersion:
    """Return the exact version that answers a request.

    Args:
        asked: A policy, or one version of it.
        served: Versions that can be asked for now.
        newest: Returns the highest known number of a policy; 0 if there is none.
        refused: Aliases that are not answered.
        absent: Policies that the pool does not serve any more.

    Raises:
        InvalidNameError: ``asked`` names neither a policy nor a version.
        NotFoundError: The version is not served, and will not be. Metadata ``versions`` lists
            what is served of the policy, or instead of it, the newest last.
        PeerUnavailableError: ``VERSION_AHEAD``: the version may come. ``COORDINATOR_AWAY``,
            ``REFUSING``: the alias is not answered.
    """
    if "@" in asked:
        wanted = PolicyVersion.parse(asked)
        if served.holds(wanted):
            return wanted
        gone = absent.get(wanted.policy)
        known = max(newest(wanted.policy), gone.last_version if gone else 0)
        if not known and wanted.policy != BASE_POLICY and not refused.why(wanted.policy):
            raise _unknown(asked, served)
        if wanted.version > known:
            newest_known = f"up to @{known}" if known else "none"
            raise PeerUnavailableError(
                f"{asked} is not here yet: of {wanted.policy} this replica knows {newest_known}",
                reason="VERSION_AHEAD",
            )
        there = _listed(_versions(wanted.policy, served))
        raise NotFoundError(
            (f"{gone.reason}; " if gone else f"{asked} was retired, rolled back or replaced; ")
            + (f"of {wanted.policy} there is {there}" if there else "nothing is left of it"),
            metadata={"versions": there},
        )
    check_name(asked, "policy")
    if why := refused.why(asked):
        there = _listed(_versions(asked, served))
        raise PeerUnavailableError(
            f"{why}; ask another replica, or for an exact version" + (f", {there}" * bool(there)),
            reason=refused.reason,
        )
    if asked == BASE_POLICY:
        return PolicyVersion(BASE_POLICY, served.base)
    alias = served.adapters.get(asked, AdapterVersions()).alias
    if not alias:
        raise _unknown(asked, served, absent.get(asked))
    return PolicyVersion(asked, alias)


def _unknown(asked: str, served: VersionVector, gone: AbsentPolicy | None = None) -> NotFoundError:
    """Return the error for a policy that is not served here, or is unknown."""
    there = _listed(_versions(asked, served) or _names(served))
    why = gone.reason if gone else f"nothing here is called {asked}"
    return NotFoundError(
        f"{why}; there is {there}",
        reason="POLICY_UNKNOWN",
        metadata={"versions": there},
    )


#: Until the coordinator has answered for the first time, and whenever it has not for long.
OUT_OF_CONTACT = AliasRefusals(
    every="bare names are refused out of contact with the coordinator: what they stand for "
    "may be another version by now",
    is_away=True,
)


def refused_aliases(answer: HeartbeatOrders, served: VersionVector) -> AliasRefusals:
    """Return the aliases that stand for other versions in the pool than here.

    Used while in contact with the pool. Without the pool's base every answer would be of former
    weights, so all aliases are refused.
    """
    behind = {
        version.policy: f"the pool serves {version}, and this replica does not yet"
        for version in answer.lacking
        if _is_behind(
            version, _alias(answer.vector, version.policy), _alias(served, version.policy)
        )
    }
    every = behind.pop(BASE_POLICY, "")
    if every:
        every = f"this replica serves {BASE_POLICY}@{served.base}, and {every}"
    elif answer.base_doubt and not served.base:
        every = f"this replica may not answer as {BASE_POLICY}@0: {answer.base_doubt}"
    elif answer.lacking_more:
        every = "the pool serves much that this replica does not yet"
    return AliasRefusals(every=every, named=behind)


def _alias(served: VersionVector, policy: str) -> int:
    """Return the number of the version that a name stands for; 0 for none."""
    if policy == BASE_POLICY:
        return served.base
    return served.adapters.get(policy, AdapterVersions()).alias


def _is_behind(pool: PolicyVersion, reported: int, now: int) -> bool:
    """Return whether a policy's name still stands for another version than in the pool.

    The replica may have switched since that answer. Such an order is younger than the answer,
    except those of a clone, which brings older versions first.

    Args:
        pool: The version in the pool.
        reported: The number that the heartbeat reported.
        now: The number by now.
    """
    return now == reported or now < pool.version


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
    """Join the last of these versions, as many as fit whole."""
    listed = ""
    for version in [*versions][: -_MAX_LISTED - 1 : -1]:
        longer = f"{version}, {listed}" if listed else version
        if len(longer) > _MAX_CHARS:
            break
        listed = longer
    return listed
