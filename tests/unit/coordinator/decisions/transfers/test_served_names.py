"""Names that a replica's server has of its own: no adapter is pushed that is called so."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.names import name_in_the_way
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.values import Phase


@pytest.mark.parametrize(
    ("served", "found"),
    [
        (("tiny", "math"), "math"),
        (("math@17",), "math@17"),
        (("tiny", "mathematics", "math@", "math@x", "math@1@2", "@math"), ""),
        (("org/math", "/models/math", "code@3"), ""),
    ],
)
def test_which_names_are_in_the_way(served: tuple[str, ...], found: str) -> None:
    assert name_in_the_way("math", served) == found


@pytest.mark.parametrize("name", ["math", "math@17"])
def test_a_push_of_a_name_that_a_server_has_is_refused_at_begin(name: str) -> None:
    m = Machine().pool("r0")
    m.register("r1", served_names=("tiny", name))
    m.acquire("math")
    error = m.error(m.begin())
    assert error.reason == "INVALID_NAME"
    assert error.metadata == {"replica": "r1", "name": name}
    assert "r1" in error.message
    assert name in error.message
    assert m.state.policies["math"].last_version == 0
    m.acquire("code")
    m.run_to(Phase.COMMITTED, "code")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")


def test_a_replica_that_came_while_a_push_waited_is_asked_too() -> None:
    m = Machine().pool("r0")
    m.acquire("code")
    m.run_to(Phase.STAGING, "code")
    m.acquire("math")
    waits = m.begin()
    m.register("r1", served_names=("math",))
    assert not m.answered(waits)
    m.stage_all(next(int(t[1:]) for t in m.state.transfers if t != f"t{waits}"))
    m.answer_commits(next(int(t[1:]) for t in m.state.transfers if t != f"t{waits}"))
    assert m.error(waits).reason == "INVALID_NAME"


def test_one_out_of_service_counts_since_it_comes_back_and_one_that_is_lost_does_not() -> None:
    m = Machine().pool("r0")
    m.register("r1", served_names=("math",))
    m.do(events.Cordon(99, "r1", "its fans are loud", no_pushes=True))
    m.acquire("math")
    assert m.error(m.begin()).reason == "INVALID_NAME"
    m.do(events.Leave(0, "r1", "i1"))
    m.run_to(Phase.COMMITTED)


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.COMMITTED])
def test_a_replica_whose_server_has_the_name_of_an_adapter_is_not_taken(phase: Phase) -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(phase)
    error = m.error(m.register("r1", served_names=("math@3",)))
    assert error.reason == "INVALID_NAME"
    assert error.metadata == {"policy": "math", "name": "math@3"}
    assert "r1" not in m.state.replicas
    m.answer(m.register("r2", served_names=("tiny", "base")))


def test_a_policy_that_was_never_served_keeps_nobody_out() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.answer(m.register("r1", served_names=("math",)))
