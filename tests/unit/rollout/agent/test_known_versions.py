"""A number stands for one content, and what nobody holds any more is forgotten."""

from __future__ import annotations

from rollout_side.agent.serving import KnownVersions
from rollout_side.engine import VersionFacts
from weft_rl.contract.names import PolicyVersion

ONE, TWO = PolicyVersion("math", 1), PolicyVersion("math", 2)


def _facts(digest: bytes) -> VersionFacts:
    return VersionFacts(digest, b"")


def test_other_bytes_of_a_number_are_known() -> None:
    known = KnownVersions()
    known.record_facts(ONE, _facts(b"a"), lambda version: True)
    assert known.other_digest(ONE, b"b") == b"a"
    assert known.other_digest(ONE, b"a") == b""
    assert known.other_digest(ONE, None) == b""
    assert known.other_digest(TWO, b"b") == b""


def test_what_is_not_held_any_more_is_forgotten_and_its_number_is_not() -> None:
    known = KnownVersions()
    known.record_facts(ONE, _facts(b"a"), lambda version: True)
    known.record_served(TWO)
    known.record_facts(TWO, _facts(b"b"), lambda version: version == TWO)
    assert set(known.facts) == {TWO}
    known.record_served(ONE)
    assert known.newest("math") == 2
    known.record_facts(TWO, None, lambda version: True)
    assert known.facts == {}
