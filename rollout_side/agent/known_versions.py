"""What is known of versions by their numbers: the digests that stand behind them, and how far
numbers have gone."""

from __future__ import annotations

from collections.abc import Callable

from rollout_side.version_facts import VersionFacts
from weft_rl.containers.lru import Lru
from weft_rl.contract.names import PolicyVersion

#: Policies whose newest number is remembered once nothing of them is served.
_MAX_POLICIES = 4_096


class KnownVersions:
    """Of one replica; as far as its orders have told."""

    def __init__(self) -> None:
        #: Of versions that are served or retained.
        self.facts: dict[PolicyVersion, VersionFacts] = {}
        self._newest: Lru[str, int] = Lru(_MAX_POLICIES)

    def newest(self, policy: str) -> int:
        """The highest number of a policy that was served here; 0 if none was."""
        return self._newest.get(policy) or 0

    def served(self, version: PolicyVersion) -> None:
        """Note that a version is served."""
        self._newest.put(version.policy, max(version.version, self.newest(version.policy)))

    def note(
        self,
        version: PolicyVersion,
        facts: VersionFacts | None,
        is_held: Callable[[PolicyVersion], bool],
    ) -> None:
        """Know what is served under a number, and no longer what is not held any more."""
        held = {v: f for v, f in self.facts.items() if v != version and is_held(v)}
        self.facts = held if facts is None else {**held, version: facts}

    def other_digest(self, version: PolicyVersion, content_digest: bytes | None) -> bytes:
        """The digest of a version, where it is known not to be ``content_digest``; else empty.
        None is anybody's."""
        facts = self.facts.get(version)
        is_other = facts is not None and content_digest not in (None, facts.digest)
        return facts.digest if facts is not None and is_other else b""
