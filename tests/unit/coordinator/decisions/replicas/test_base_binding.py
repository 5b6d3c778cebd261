"""Which base model a pool is bound to, and how a wrong one is let go of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Phase

WRONG, RIGHT = "0" * 64, "f" * 64


def _rebind(m: Machine, fingerprint: str = RIGHT) -> int:
    ticket = next(m.ids)
    m.do(events.RebindBase(ticket, fingerprint))
    return ticket


def _is_in(m: Machine, ticket: int) -> bool:
    return isinstance(m.answer(ticket), effects.RegisterAnswer)


@pytest.mark.parametrize("end", ["leaves", "is lost", "comes again itself"])
def test_a_wrong_first_model_binds_for_as_long_as_it_is_there(end: str) -> None:
    m = Machine()
    m.register("r0", base_fingerprint=WRONG)
    m.do(events.ReferenceKnown(WRONG))
    assert m.error(m.register("r1")).reason == "BASE_MISMATCH"
    name = "r1"
    if end == "leaves":
        m.do(events.Leave(99, "r0", "i1"))
    elif end == "is lost":
        m.pass_time(7, beats=False)
    else:
        name = "r0"
        assert m.error(m.register("r0", "i2")).reason == "REQUEST_CONFLICT"
        m.now += 4
    answer = m.answer(m.register(name, "i2"))
    assert answer.reference_wanted
    assert (m.state.fingerprint, m.state.architecture) == (RIGHT, "Tiny")
    assert set(m.state.replicas) == {name}
    assert m.ever(effects.SavePool)[-1] == effects.SavePool(RIGHT, "Tiny")
    assert m.error(m.register("r2", base_fingerprint=WRONG)).reason == "BASE_MISMATCH"


def test_what_was_ever_pushed_binds_until_an_operator_says_otherwise() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.FORMING)
    m.do(events.Leave(99, "r0", "i1"))
    assert m.error(m.register("r1", base_fingerprint=WRONG)).reason == "BASE_MISMATCH"


def test_after_a_restart_replicas_are_given_time_to_register() -> None:
    m = Machine()
    m.state = replace(m.state, fingerprint=WRONG, architecture="Wrong", restart_over_at=m.now + 6)
    assert m.error(m.register("r0")).reason == "BASE_MISMATCH"
    assert m.error(_rebind(m, WRONG)).reason == "REPLICAS_IN_CONTACT"
    m.now += 6
    assert _is_in(m, m.register("r0"))


def test_rebinding_retires_what_was_served_and_keeps_the_numbers() -> None:
    m = Machine().pool("r0")
    for policy in ("base", "math"):
        m.acquire(policy)
        for _ in range(2):
            m.run_to(Phase.COMMITTED, policy)
    m.do(events.Pin(98, PolicyVersion("math", 1), True, m.record(PolicyVersion("math", 1))))
    before = m.state.policies
    m.do(events.Leave(99, "r0", "i1"))
    answer = m.answer(_rebind(m))
    assert isinstance(answer, effects.RetiredAnswer)
    retired = [PolicyVersion("base", 2), PolicyVersion("math", 1), PolicyVersion("math", 2)]
    assert list(answer.retired_versions) == retired
    saved = m.last
    assert [e.version for e in saved if isinstance(e, effects.SaveRetired)] == retired
    assert effects.SavePool("", "") in saved
    assert effects.SavePin(PolicyVersion("math", 1), False) in saved
    assert not m.state.fingerprint
    assert not m.state.vector.base
    assert not m.state.vector.adapters
    for name, policy in m.state.policies.items():
        assert policy.last_version == before[name].last_version == 2
        assert policy.fencing_token == before[name].fencing_token
        assert (policy.served_version, policy.versions, policy.pinned) == (0, (), ())
    assert isinstance(m.answer(_rebind(m, "anything")), effects.RetiredAnswer)  # idempotent
    assert _is_in(m, m.register("r1", base_fingerprint=WRONG))
    m.do(events.ReferenceKnown(WRONG))
    pushed = m.run_to(Phase.COMMITTED, "math")
    assert m.transfer(pushed).version == 3
    assert m.error(m.register("r0", "i2")).reason == "BASE_MISMATCH"


def test_it_is_not_rebound_under_anybody() -> None:
    m = Machine().pool("r0")
    assert m.error(_rebind(m, WRONG)).reason == "BASE_MISMATCH"
    error = m.error(_rebind(m))
    assert (error.reason, error.metadata) == ("REPLICAS_IN_CONTACT", {"member": "r0"})
    m.do(events.Leave(99, "r0", "i1"))
    m.acquire("math")
    waiting = m.begin()
    assert m.error(_rebind(m)).reason == "TRANSFER_UNDER_WAY"
    m.do(events.CallerGone(waiting))
    assert isinstance(m.answer(_rebind(m)), effects.RetiredAnswer)
    assert m.state.fingerprint == ""
