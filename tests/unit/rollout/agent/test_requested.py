"""Which version answers what was asked."""

from __future__ import annotations

import pytest

from rollout_side.agent.requested import resolve
from weft.contract.errors import InvalidNameError, NotFoundError, PeerUnavailableError
from weft.contract.names import AdapterVersions, VersionVector

_SERVED = VersionVector(
    base=3,
    adapters={"math": AdapterVersions((2, 4), 2), "code": AdapterVersions((1,), 0)},
)
_NEWEST = {"base": 4, "math": 5, "code": 1}


def _resolve(asked: str, *, in_contact: bool = True) -> str:
    return str(resolve(asked, _SERVED, lambda p: _NEWEST.get(p, 0), in_contact=in_contact))


@pytest.mark.parametrize(
    ("asked", "answers"),
    [("base", "base@3"), ("base@3", "base@3"), ("math", "math@2"), ("math@4", "math@4")],
)
def test_what_is_served_answers(asked: str, answers: str) -> None:
    assert _resolve(asked) == answers
    if "@" in asked:
        assert _resolve(asked, in_contact=False) == answers
    else:
        with pytest.raises(PeerUnavailableError, match=f"{asked}@") as refused:
            _resolve(asked, in_contact=False)
        assert refused.value.reason == "COORDINATOR_AWAY"


@pytest.mark.parametrize(
    ("asked", "reason", "versions"),
    [
        ("base@4", "VERSION_UNKNOWN", "base@3"),
        ("base@0", "VERSION_UNKNOWN", "base@3"),
        ("math@3", "VERSION_UNKNOWN", "math@2, math@4"),
        ("math@5", "VERSION_UNKNOWN", "math@2, math@4"),
        ("other", "POLICY_UNKNOWN", "math@2, base@3"),
        ("code", "POLICY_UNKNOWN", "code@1"),
    ],
)
def test_what_is_gone_is_told_with_what_is_there(asked: str, reason: str, versions: str) -> None:
    with pytest.raises(NotFoundError, match=asked) as refused:
        _resolve(asked)
    assert (refused.value.reason, refused.value.metadata["versions"]) == (reason, versions)


@pytest.mark.parametrize("asked", ["base@5", "math@6", "other@1"])
def test_what_may_come_is_not_here_yet(asked: str) -> None:
    with pytest.raises(PeerUnavailableError, match="not here yet") as refused:
        _resolve(asked)
    assert refused.value.reason == "VERSION_AHEAD"


@pytest.mark.parametrize("asked", ["", "@", "math@", "@1", "math@-1", "a b", "../x@1", "math@1@2"])
def test_what_no_name_is(asked: str) -> None:
    with pytest.raises(InvalidNameError):
        _resolve(asked)


def test_a_list_is_bounded_and_of_whole_names() -> None:
    for policy, count in (("p" * 63, 3), ("p", 10)):
        versions = tuple(range(1, 50))
        served = VersionVector(adapters={policy: AdapterVersions(versions, 49)})
        with pytest.raises(NotFoundError) as refused:
            resolve(f"{policy}@0", served, lambda _: 49, in_contact=True)
        listed = refused.value.metadata["versions"].split(", ")
        if count == 10:
            assert listed == [f"p@{number}" for number in range(40, 50)]
        else:
            assert listed == [f"{policy}@48", f"{policy}@49"]
