"""Which version answers what was asked."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_side.agent.name_resolution import OUT_OF_CONTACT, refused_aliases, resolve
from rollout_side.agent.registration import HeartbeatOrders, OrderKey
from rollout_side.engine import AliasRefusals
from weft_rl.contract.errors import InvalidNameError, NotFoundError, PeerUnavailableError
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import AbsentPolicy, OutOfService

_SERVED = VersionVector(
    base=3,
    adapters={"math": AdapterVersions((2, 4), 2), "code": AdapterVersions((1,), 0)},
)
_NEWEST = {"base": 4, "math": 5, "code": 1}
_NONE = AliasRefusals()
_ABSENT = {
    "chess": AbsentPolicy("chess", 7, "an operator forgot chess"),
    "go": AbsentPolicy("go", 2, "go@2 is lost"),
}


def _resolve(asked: str, refused: AliasRefusals = _NONE) -> str:
    return str(resolve(asked, _SERVED, lambda p: _NEWEST.get(p, 0), refused, _ABSENT))


@pytest.mark.parametrize(
    ("asked", "answers"),
    [("base", "base@3"), ("base@3", "base@3"), ("math", "math@2"), ("math@4", "math@4")],
)
def test_what_is_served_answers(asked: str, answers: str) -> None:
    assert _resolve(asked) == answers
    if "@" in asked:
        assert _resolve(asked, OUT_OF_CONTACT) == answers
    else:
        with pytest.raises(PeerUnavailableError, match=f"{asked}@") as refused:
            _resolve(asked, OUT_OF_CONTACT)
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
        ("other@1", "POLICY_UNKNOWN", "math@2, base@3"),
    ],
)
def test_what_is_gone_is_told_with_what_is_there(asked: str, reason: str, versions: str) -> None:
    with pytest.raises(NotFoundError, match=asked) as refused:
        _resolve(asked)
    assert (refused.value.reason, refused.value.metadata["versions"]) == (reason, versions)


@pytest.mark.parametrize(
    ("asked", "reason", "why"),
    [
        ("chess", "POLICY_UNKNOWN", "an operator forgot chess"),
        ("chess@7", "VERSION_UNKNOWN", "an operator forgot chess"),
        ("go", "POLICY_UNKNOWN", "go@2 is lost"),
        ("go@1", "VERSION_UNKNOWN", "go@2 is lost"),
    ],
)
def test_what_the_pool_does_not_serve_any_more_is_gone_for_a_reason(
    asked: str, reason: str, why: str
) -> None:
    with pytest.raises(NotFoundError, match=why) as refused:
        _resolve(asked)
    assert refused.value.reason == reason


@pytest.mark.parametrize("asked", ["base@5", "math@6", "chess@8"])
def test_what_may_come_is_not_here_yet(asked: str) -> None:
    with pytest.raises(PeerUnavailableError, match="not here yet") as refused:
        _resolve(asked)
    assert refused.value.reason == "VERSION_AHEAD"


def test_a_policy_that_was_never_heard_of_may_come_where_the_pool_may_have_it() -> None:
    for why in (OUT_OF_CONTACT, refused_aliases(_heard("other@1"), _SERVED)):
        with pytest.raises(PeerUnavailableError, match="not here yet") as refused:
            _resolve("other@1", why)
        assert refused.value.reason == "VERSION_AHEAD"


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "@",
        "math@",
        "@1",
        "math@-1",
        "a b",
        "../x@1",
        "math@1@2",
        f"math@{10**20}",
        "m@" + "9" * 5000,
    ],
)
def test_what_no_name_is(asked: str) -> None:
    with pytest.raises(InvalidNameError):
        _resolve(asked)


def test_a_list_is_bounded_and_of_whole_names() -> None:
    for policy, count in (("p" * 63, 3), ("p", 10)):
        versions = tuple(range(1, 50))
        served = VersionVector(adapters={policy: AdapterVersions(versions, 49)})
        with pytest.raises(NotFoundError) as refused:
            resolve(f"{policy}@0", served, lambda _: 49, _NONE, {})
        listed = refused.value.metadata["versions"].split(", ")
        if count == 10:
            assert listed == [f"p@{number}" for number in range(40, 50)]
        else:
            assert listed == [f"{policy}@48", f"{policy}@49"]


def _heard(*lacking: str, vector: VersionVector = _SERVED, **more: Any) -> HeartbeatOrders:
    """What the coordinator answers to a replica that serves ``vector``."""
    return HeartbeatOrders(
        None,
        False,
        False,
        OutOfService(),
        OrderKey(1, 0),
        (),
        vector,
        tuple(map(PolicyVersion.parse, lacking)),
        **more,
    )


def test_who_serves_what_the_pool_does_refuses_no_alias() -> None:
    assert refused_aliases(_heard(), _SERVED) == _NONE


def test_an_alias_that_stands_for_something_else_in_the_pool_is_refused() -> None:
    """And an exact version of it is not, nor another policy."""
    refused = refused_aliases(_heard("math@5", "new@1"), _SERVED)
    for asked in ("math", "new"):
        with pytest.raises(PeerUnavailableError, match="ask another replica") as caught:
            _resolve(asked, refused)
        assert caught.value.reason == "REFUSING"
    assert "the pool serves math@5" in refused.why("math")
    assert [_resolve(asked, refused) for asked in ("math@2", "base")] == ["math@2", "base@3"]


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        (_heard("base@7"), "this replica serves base@3, and the pool serves base@7"),
        (_heard("base@0"), "the pool serves base@0"),  # it was rolled back
        (_heard("math@5", lacking_more=True), "the pool serves much"),
    ],
)
def test_over_another_base_than_the_pools_no_alias_is_answered(
    heard: HeartbeatOrders, why: str
) -> None:
    refused = refused_aliases(heard, _SERVED)
    for asked in ("base", "math", "code"):
        assert why in refused.why(asked)
    assert _resolve("base@3", refused) == "base@3"


def test_base_0_of_other_files_is_refused_until_another_base_is_served() -> None:
    at_first = VersionVector()
    heard = _heard(vector=at_first, base_doubt="model.safetensors differs")
    assert "model.safetensors differs" in refused_aliases(heard, at_first).why("base")
    assert refused_aliases(heard, at_first.with_base(1)) == _NONE


def test_what_was_switched_since_the_coordinators_word_is_younger_than_that() -> None:
    """But not what a clone has brought, older versions first."""
    heard = _heard("math@5", "base@7")
    served = _SERVED.with_base(8).with_adapter(PolicyVersion("math", 6))
    assert refused_aliases(heard, served) == _NONE
    served = _SERVED.with_base(7).with_adapter(PolicyVersion("math", 3))
    assert refused_aliases(heard, served).named.keys() == {"math"}


def test_other_bytes_under_the_number_of_the_pool_are_refused() -> None:
    assert refused_aliases(_heard("math@2"), _SERVED).named.keys() == {"math"}
