"""Adapter versions that an operator keeps from being retired, or retires."""

from __future__ import annotations

from dataclasses import replace

from weft.contract.errors import NotReadyError, UnsupportedError, WeftError
from weft.contract.names import PolicyVersion
from weft.coordinator import events
from weft.coordinator.change import Change
from weft.coordinator.effects import Done, SavePin, SaveRetired
from weft.coordinator.retire import retire
from weft.coordinator.rollback import known_policy, requestable
from weft.coordinator.state import PolicyKind


def pin(change: Change, event: events.Pin) -> None:
    """Pin a version or let it go; doing so twice is no error."""
    version = PolicyVersion(event.policy, event.version)
    try:
        policy = known_policy(change.state, version, event.recorded)
        if policy.kind is PolicyKind.BASE:
            raise UnsupportedError(
                "versions of the base cannot be pinned: each replica retains the newest, as many "
                "as its --retain-base says"
            )
        if event.pinned and version.version not in requestable(change.state, policy):
            raise NotReadyError(f"{version} was retired, or is being", reason="NOT_RETAINED")
    except WeftError as error:
        change.refuse([event.ticket], error)
        return
    if event.pinned != (version.version in policy.pinned):
        others = {v for v in policy.pinned if v != version.version}
        pinned = tuple(sorted(others | ({version.version} if event.pinned else set())))
        change.put_policy(replace(policy, pinned=pinned))
        change.emit(SavePin(version, event.pinned))
        kind = "version_pinned" if event.pinned else "version_unpinned"
        change.announce(kind, str(version), "by an operator")
    change.reply(event.ticket, Done())


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
            raise NotReadyError(
                f"requests for {policy.name!r} get {version}: push a newer version or roll back "
                "first",
                reason="VERSION_IN_USE",
            )
        if version.version in policy.pinned:
            raise NotReadyError(f"{version} is pinned: unpin it first", reason="VERSION_IN_USE")
    except WeftError as error:
        change.refuse([event.ticket], error)
        return
    if version.version in policy.versions:
        left = tuple(v for v in policy.versions if v != version.version)
        change.put_policy(replace(policy, versions=left))
        change.emit(SaveRetired(version, durable=True))
        change.announce("version_retired", str(version), "by an operator")
        retire(change)
    change.reply(event.ticket, Done())
