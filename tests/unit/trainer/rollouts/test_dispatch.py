"""Which replica a prompt goes to."""

from __future__ import annotations

import pytest

from trainer_side.rollouts.dispatch import BusyReplica, PromptDispatcher, PromptRequirements
from trainer_side.rollouts.requests import WantedVersions
from weft_rl.contract.names import AdapterVersions, VersionVector

BASE = PromptRequirements(WantedVersions("base"))


def _target(name: str, *, base: int = 0, port: int = 1, **adapters: tuple[int, ...]) -> BusyReplica:
    entries = {policy: AdapterVersions(held, held[-1]) for policy, held in adapters.items()}
    return BusyReplica(name, f"{name}:{port}", VersionVector(base, entries))


def _dispatch(*targets: BusyReplica, max_requests: int = 9) -> PromptDispatcher[str]:
    dispatch: PromptDispatcher[str] = PromptDispatcher(max_requests)
    dispatch.update(targets, 0.0)
    return dispatch


def _wait(
    dispatch: PromptDispatcher[str], what: str, place: PromptRequirements = BASE, cost: int = 10
) -> None:
    dispatch.wait(place, dispatch.number(), cost, what)


def _all(dispatch: PromptDispatcher[str], now: float = 0.0) -> list[tuple[str, str]]:
    taken = []
    while (one := dispatch.next(now)) is not None:
        taken.append((one[0], one[1].replica_id))
    return taken


def test_the_fewest_outstanding_tokens_win() -> None:
    dispatch = _dispatch(_target("a"), _target("b"))
    for what, cost in (("long", 100), ("short", 10), ("short", 10), ("short", 10)):
        _wait(dispatch, what, cost=cost)
    assert _all(dispatch) == [("long", "a"), ("short", "b"), ("short", "b"), ("short", "b")]
    dispatch.targets["a"].progressed(1.0, 95)
    _wait(dispatch, "next")
    assert _all(dispatch) == [("next", "a")]


def test_what_has_no_room_waits_in_order_and_is_not_passed_by_its_kind() -> None:
    dispatch = _dispatch(_target("a", math=(1,)), max_requests=1)
    math = PromptRequirements(WantedVersions("math", at_least=2))
    _wait(dispatch, "1")
    _wait(dispatch, "math", math)
    _wait(dispatch, "2")
    assert _all(dispatch) == [("1", "a")]
    a = dispatch.targets["a"]
    dispatch.release(a, 0)
    assert _all(dispatch) == [("2", "a")]  # math@2 is not there
    dispatch.update([_target("a", math=(1, 2))], 1.0)
    _wait(dispatch, "3")
    dispatch.release(a, 0)
    assert _all(dispatch) == [("math", "a")]
    dispatch.release(a, 0)
    assert _all(dispatch) == [("3", "a")]


def test_one_that_comes_back_goes_before_those_that_came_after_it() -> None:
    dispatch = _dispatch(_target("a"), max_requests=1)
    first = dispatch.number()
    _wait(dispatch, "second")
    dispatch.wait(BASE, first, 10, "first")
    assert _all(dispatch) == [("first", "a")]


@pytest.mark.parametrize(
    ("wanted", "goes_to"),
    [
        (WantedVersions("math", exact=3), "new"),
        (WantedVersions("math", exact=2), "new"),  # both have it: the name decides
        (WantedVersions("math", exact=1), "old"),
        (WantedVersions("math", at_least=3), "new"),
        (WantedVersions("math", at_least=4), None),
        (WantedVersions("base", exact=0), "old"),
        (WantedVersions("base", at_least=1), "new"),
        (WantedVersions("math", exact=9), "new"),  # nobody has it: whoever is asked says why
        (WantedVersions("poet"), "new"),
        (WantedVersions("poet", at_least=1), None),
    ],
)
def test_versions_decide(wanted: WantedVersions, goes_to: str | None) -> None:
    dispatch = _dispatch(_target("old", math=(1, 2)), _target("new", base=1, math=(2, 3)))
    _wait(dispatch, "prompt", PromptRequirements(wanted))
    expected = [] if goes_to is None else [("prompt", goes_to)]
    assert _all(dispatch) == expected
    assert str(wanted) in dispatch.why_waiting(wanted) or expected


def test_a_version_that_one_is_told_to_serve_is_asked_of_all_that_may_have_it_by_now() -> None:
    dispatch = _dispatch(_target("a", math=(1, 2)), _target("b", math=(1,)), _target("c"))
    for wanted in (
        WantedVersions("math", exact=2),
        WantedVersions("math", exact=1),
        WantedVersions("math", at_least=2),
    ):
        for _ in range(3):
            _wait(dispatch, str(wanted), PromptRequirements(wanted))
    taken = _all(dispatch)
    assert {name for what, name in taken if what == "math@2"} == {"a", "b", "c"}
    assert {name for what, name in taken if what == "math@1"} == {"a", "b", "c"}
    assert {name for what, name in taken if "newer" in what} == {"a", "b", "c"}


def test_what_is_said_to_come_is_not_asked_for_before_the_routes_tell_of_it() -> None:
    place = PromptRequirements(WantedVersions("math", exact=3), is_ahead=True)
    dispatch = _dispatch(_target("a", math=(1, 2)), _target("b"))
    _wait(dispatch, "prompt", place)
    assert _all(dispatch, 99.0) == []
    dispatch.update([_target("a", math=(2, 3)), _target("b")], 100.0)
    assert _all(dispatch, 100.0) == [("prompt", "a")]
    _wait(dispatch, "skipped", place)
    dispatch.update([_target("a"), _target("b", math=(4,))], 101.0)
    assert _all(dispatch, 101.0) == [("skipped", "b")]  # which says that it never came


def test_one_that_failed_is_left_alone_longer_each_time() -> None:
    dispatch = _dispatch(_target("a"))
    a, seconds = dispatch.targets["a"], []
    now = 0.0
    for _ in range(7):
        a.failed(now)
        a.failed(now)  # what ran beside it fails, too: once
        again = dispatch.next_time(now)
        assert again is not None
        seconds.append(again - now)
        _wait(dispatch, "prompt")
        assert _all(dispatch, again - 0.01) == []
        assert _all(dispatch, again) == [("prompt", "a")]
        now = again
    assert seconds == [0.5, 1, 2, 4, 8, 15, 15]
    a.progressed(now, 1)
    a.failed(now)
    assert dispatch.next_time(now) == now + 0.5


def test_the_failed_one_is_avoided_where_there_is_another() -> None:
    place = PromptRequirements(WantedVersions("base"), avoid=frozenset({"a"}))
    dispatch = _dispatch(_target("a"), _target("b"), max_requests=1)
    _wait(dispatch, "1", place)
    _wait(dispatch, "2", place)
    assert _all(dispatch) == [("1", "b")]  # the other one waits for b
    dispatch.update([_target("a")], 1.0)
    assert _all(dispatch) == [("2", "a")]


def test_one_that_refused_is_not_asked_again_while_another_has_it() -> None:
    place = PromptRequirements(WantedVersions("math", exact=1), refused=frozenset({"a"}))
    dispatch = _dispatch(_target("a", math=(1,)), _target("b", math=(1,)))
    assert dispatch.is_served(place)
    _wait(dispatch, "prompt", place)
    assert _all(dispatch) == [("prompt", "b")]
    assert not _dispatch(_target("a", math=(1,))).is_served(place)


def test_replicas_that_are_not_listed_finish_what_they_have() -> None:
    dispatch = _dispatch(_target("a"))
    _wait(dispatch, "1")
    a, cost = dispatch.targets["a"], 10
    assert dispatch.next(0.0) == ("1", a, cost)
    dispatch.update([], 1.0)
    _wait(dispatch, "2")
    assert _all(dispatch) == []
    assert dispatch.why_waiting(BASE.wanted) == "no replica may be sent requests"
    assert a.is_stalled(5.0, 4.0)
    dispatch.release(a, cost)
    assert dispatch.targets == {}


def test_another_process_at_another_address_begins_anew() -> None:
    dispatch = _dispatch(_target("a"))
    _wait(dispatch, "1")
    old, cost = dispatch.targets["a"], 10
    assert dispatch.next(0.0) == ("1", old, cost)
    old.failed(0.0)
    dispatch.update([_target("a", port=2)], 1.0)
    _wait(dispatch, "2")
    assert _all(dispatch, 1.0) == [("2", "a")]
    assert old.is_stalled(9.0, 4.0)  # what is left with the former one is watched, too
    dispatch.release(old, cost)
    assert dispatch.targets["a"].num_requests == 1


def test_one_that_sends_nothing_is_stalled_only_with_requests() -> None:
    dispatch = _dispatch(_target("a"), _target("b"))
    assert not any(target.is_stalled(99.0, 1.0) for target in dispatch.targets.values())
    _wait(dispatch, "prompt")
    taken = dispatch.next(100.0)
    assert taken is not None
    assert not taken[1].is_stalled(101.0, 1.0)
    assert taken[1].is_stalled(101.1, 1.0)
    taken[1].progressed(101.1, 1)
    assert not taken[1].is_stalled(102.0, 1.0)


def test_what_waits_no_more_is_forgotten() -> None:
    dispatch = _dispatch()
    _wait(dispatch, "1")
    _wait(dispatch, "2")
    dispatch.forget(BASE, "1")
    dispatch.forget(BASE, "other")
    dispatch.update([_target("a")], 0.0)
    assert _all(dispatch) == [("2", "a")]
