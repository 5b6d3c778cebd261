"""Which pool an empty catalog belongs to, and who is let in before that is known."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.coordinator.decisions.state import effects


def _begun(*, recover: bool = False, pool_id: str = "") -> Machine:
    machine = Machine(recover=recover, lost_after_seconds=6.0)
    machine.state = dataclasses.replace(
        machine.state, pool_id=pool_id, fresh_pool_id="made up", started_at=machine.now
    )
    return machine


@pytest.mark.parametrize("recover", [False, True])
def test_a_catalog_of_a_pool_takes_nobody_of_another(recover: bool) -> None:
    machine = _begun(recover=recover, pool_id="ours")
    machine.register("r0", pool_id="ours")
    for ticket in (
        machine.register("r1", pool_id="theirs"),
        machine.acquire("math", pool_id="theirs"),
    ):
        error = machine.error(ticket)
        assert (error.reason, error.metadata["given"]) == ("POOL_MISMATCH", "theirs")
    assert set(machine.state.replicas) == {"r0"}
    assert machine.state.pool_id == "ours"


def test_an_empty_one_is_of_a_new_pool() -> None:
    machine = _begun()
    ticket = machine.register("r0", pool_id="lost")
    assert "--recover" in str(machine.error(ticket))
    assert machine.state.pool_id == ""
    machine.register("r1")
    assert machine.state.pool_id == "made up"
    assert machine.found(effects.SavePoolId) == [effects.SavePoolId("made up")]
    assert "pool made up" in str(machine.error(machine.acquire("math", pool_id="lost")))


def test_one_that_recovers_is_of_the_pool_of_the_first_who_was_there() -> None:
    machine = _begun(recover=True)
    for ticket in (machine.register("new"), machine.acquire("math")):
        assert machine.error(ticket).reason == "POOL_RECOVERING"
    machine.pass_time(17)
    assert "up to 18 s after its start" in str(machine.error(machine.register("new")))
    machine.register("r0", pool_id="lost")
    assert machine.state.pool_id == "lost"
    machine.register("new")
    assert set(machine.state.replicas) == {"new", "r0"}
    assert machine.error(machine.register("r1", pool_id="theirs")).reason == "POOL_MISMATCH"


def test_one_that_waited_for_them_in_vain_is_of_a_new_pool() -> None:
    machine = _begun(recover=True)
    machine.pass_time(19)
    machine.register("new")
    assert machine.state.pool_id == "made up"
    assert machine.error(machine.register("late", pool_id="lost")).reason == "POOL_MISMATCH"
