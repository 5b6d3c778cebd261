"""Versions of a policy that are kept: queries of the pool's state."""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.contract.errors import NotFoundError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState, Settings, num_retained
from weft_rl.coordinator.decisions.state.values import VersionRecord, VersionState

_SERVED_ONCE = (VersionState.COMMITTED, VersionState.RETIRED)


def kept_versions(policy: Policy, settings: Settings) -> frozenset[int]:
    """Return the newest versions, the pinned ones, and always the one behind the alias."""
    newest = policy.versions[-num_retained(policy, settings) :]
    return frozenset((*newest, *policy.pinned, policy.served_version))


def may_be_kept(state: PoolState, policy: Policy) -> frozenset[int]:
    """Return the versions that are kept, or would be if the change under way were undone."""
    kept = kept_versions(policy, state.settings)
    for transfer in state.transfers.values():
        if transfer.policy == policy.name and transfer.may_be_undone:
            brought = {transfer.version} if transfer.purpose.brings_version else set()
            versions = tuple(v for v in policy.versions if v not in brought)
            before = replace(policy, versions=versions, served_version=transfer.served_before)
            kept |= kept_versions(before, state.settings)
    for version, case in state.unserved.items():
        if version.policy == policy.name:
            others = tuple(v for v in policy.versions if v != version.version)
            replaced = case.transfer.served_before
            before = replace(policy, versions=others, served_version=replaced)
            kept |= kept_versions(before, state.settings)
    return kept


def requestable(state: PoolState, policy: Policy) -> list[int]:
    """List the versions of an adapter that can be requested and will not leave by themselves."""
    kept = kept_versions(policy, state.settings)
    return [version for version in policy.versions if version in kept]


def ways_back(state: PoolState, policy: Policy) -> list[int]:
    """List the versions that an adapter can go back to now."""
    return [
        number
        for number in requestable(state, policy)
        if number != policy.served_version and PolicyVersion(policy.name, number) in state.copies
    ]


def known_policy(state: PoolState, version: PolicyVersion, record: VersionRecord | None) -> Policy:
    """Return the policy of a version that was served once.

    Raises:
        NotFoundError: There is no such policy, or the version was never served.
    """
    policy = state.policies.get(version.policy)
    if policy is None:
        raise unknown_policy(state, version.policy)
    started_with = version == PolicyVersion(BASE_POLICY, 0)
    if not started_with and (record is None or record.state not in _SERVED_ONCE):
        why = ""
        if record is not None and record.state is VersionState.FAILED:
            why = f", every replica refused it: {record.failure.message if record.failure else ''}"
        raise NotFoundError(f"{version} was never served{why}")
    return policy


def unknown_policy(state: PoolState, policy: str) -> NotFoundError:
    """Return the error for a call that names an unknown or a forgotten policy."""
    why = f"no policy {policy[:80]!r} is known"
    if policy in state.forgotten:
        why = f"the policy {policy!r} was forgotten by an operator: a push begins it anew"
    return NotFoundError(why, reason="POLICY_UNKNOWN")
