"""What an operator keeps from being retired, and for how long, and what goes at once."""

from __future__ import annotations

from collections.abc import Sequence

from weft.contract.errors import (
    InvalidRequestError,
    NotReadyError,
    UnsupportedError,
    WeftError,
)
from weft.contract.frozen import replace
from weft.contract.names import PolicyVersion
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import (
    Done,
    RetentionAnswer,
    SavePin,
    SavePolicy,
    SaveRetired,
)
from weft.coordinator.decisions.policies.retention import may_be_kept, may_be_undone, retire
from weft.coordinator.decisions.policies.rollback import (
    known_policy,
    others,
    requestable,
    unknown_policy,
)
from weft.coordinator.decisions.state.pool import Policy, PoolState, num_retained
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import PolicyKind, Purpose

#: Most versions of one adapter that are kept by their number.
MAX_RETAINED = 1000


def pin(change: Change, event: events.Pin) -> None:
    """Pin a version or let it go; doing so twice is no error."""
    version = PolicyVersion(event.policy, event.version)
    transfers = change.state.transfers.values()
    try:
        policy = known_policy(change.state, version, event.recorded)
        if event.pinned and policy.kind is PolicyKind.BASE:
            _check_base_pin(change.state, version)
        elif event.pinned and any(_may_vanish(t, version) for t in transfers):
            raise NotReadyError(
                f"replicas switch to {version}, which is withdrawn if none can: ask again when "
                "they have",
                reason="TRANSFER_UNDER_WAY",
            )
        elif event.pinned and version.version not in requestable(change.state, policy):
            raise NotReadyError(f"{version} was retired, or is being", reason="NOT_RETAINED")
        elif event.pinned and version not in change.state.copies:
            raise NotReadyError(f"no replica in contact holds {version}", reason="NOT_RETAINED")
    except WeftError as error:
        change.refuse([event.ticket], error)
        return
    if event.pinned != (version.version in policy.pinned):
        rest = {v for v in policy.pinned if v != version.version}
        pinned = tuple(sorted(rest | ({version.version} if event.pinned else set())))
        change.put_policy(replace(policy, pinned=pinned))
        change.emit(SavePin(version, event.pinned))
        kind = "version_pinned" if event.pinned else "version_unpinned"
        change.announce(kind, str(version), "by an operator")
    change.reply(event.ticket, Done())


def _check_base_pin(state: PoolState, version: PolicyVersion) -> None:
    """Raises:
    NotReadyError: ``TRANSFER_UNDER_WAY`` or ``NOT_RETAINED``.
    """
    if any(t.policy == version.policy and t.targets for t in state.transfers.values()):
        raise NotReadyError(
            f"a base is being brought to replicas, which may drop {version} for it: ask again "
            "when it is there",
            reason="TRANSFER_UNDER_WAY",
        )
    if version not in state.copies:
        raise NotReadyError(
            f"no replica in contact holds a copy of {version}: replicas keep the newest, as many "
            "as their --retain-base says",
            reason="NOT_RETAINED",
        )


def retire_version(change: Change, event: events.RetireVersion) -> None:
    """Retire an adapter version at an operator's order; doing so twice is no error."""
    version = PolicyVersion(event.policy, event.version)
    try:
        policy = known_policy(change.state, version, event.recorded)
        if policy.kind is PolicyKind.BASE:
            raise UnsupportedError(
                "versions of the base are not retired: a push replaces the one that is served"
            )
        if version.version == policy.served_version:
            back = others(change.state, policy)
            advice = (
                f"push a newer version or roll back to {back[-1]}"
                if back
                else ("push a newer version")
            )
            raise NotReadyError(
                f"requests for {policy.name!r} get {version}: {advice} first",
                reason="VERSION_IN_USE",
            )
        if version.version in policy.pinned:
            raise NotReadyError(f"{version} is pinned: unpin it first", reason="VERSION_IN_USE")
        if _may_return(change.state, version):
            raise NotReadyError(
                f"{version} is served again if no replica can switch to what replaces it: ask "
                "again when they have",
                reason="TRANSFER_UNDER_WAY",
            )
    except WeftError as error:
        change.refuse([event.ticket], error)
        return
    if version.version in policy.versions:
        _retire_all(change, policy, [version.version], "by an operator")
        retire(change)
    change.reply(event.ticket, Done())


def _may_return(state: PoolState, version: PolicyVersion) -> bool:
    """Whether a policy may go back to a version, since what replaced it is not served yet."""
    pending = [t for t in state.transfers.values() if may_be_undone(t)]
    pending += [case.transfer for case in state.unserved.values()]
    return any(PolicyVersion(t.policy, t.replaced_version) == version for t in pending)


def _may_vanish(transfer: Transfer, version: PolicyVersion) -> bool:
    pushed = transfer.purpose is Purpose.PUSH and transfer.policy_version == version
    return pushed and may_be_undone(transfer)


def set_retention(change: Change, event: events.SetRetention) -> None:
    """Keep more or fewer of an adapter's newest versions from now on."""
    policy = change.state.policies.get(event.policy)
    try:
        if policy is None:
            raise unknown_policy(event.policy)
        if policy.kind is PolicyKind.BASE:
            raise UnsupportedError(
                "each replica retains as many copies of the base as its --retain-base says"
            )
        if not 0 <= event.num_versions <= MAX_RETAINED:
            raise InvalidRequestError(
                f"keep between 1 and {MAX_RETAINED:,} versions, or 0 for the default"
            )
    except WeftError as error:
        change.refuse([event.ticket], error)
        return
    # What is on its way out may be gone at some replicas: it does not come back.
    kept = may_be_kept(change.state, policy)
    policy = _retire_all(
        change, policy, [v for v in policy.versions if v not in kept], "superseded"
    )
    policy = replace(policy, retain=event.num_versions)
    change.put_policy(policy)
    change.emit(SavePolicy(policy))
    number = num_retained(policy, change.state.settings)
    change.announce("retention_set", policy.name, f"{number} versions, by an operator")
    retire(change)
    change.reply(event.ticket, RetentionAnswer(number))


def _retire_all(change: Change, policy: Policy, versions: Sequence[int], why: str) -> Policy:
    """From now on these cannot be requested; replicas drop them by and by."""
    left = tuple(version for version in policy.versions if version not in versions)
    policy = replace(policy, versions=left)
    change.put_policy(policy)
    for version in versions:
        retired = PolicyVersion(policy.name, version)
        change.emit(SaveRetired(retired, durable=True))
        change.announce("version_retired", str(retired), why)
    return policy
