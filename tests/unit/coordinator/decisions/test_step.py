"""One step: a request is refused by the error that a rule raises, and changes nothing."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.errors import NotReadyError
from weft_rl.coordinator.decisions.policies import leases
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.step import RULES, step


def test_a_refused_request_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    error = NotReadyError("not now", reason="TRANSFER_UNDER_WAY")

    def renew(change: Change, event: events.RenewLease) -> None:
        change.next_epoch()
        change.drop_replica("r0")
        raise error

    monkeypatch.setitem(RULES, events.RenewLease, renew)
    state, done = step(m.state, events.RenewLease(7, "math", 1), m.now)
    assert done == [effects.Refuse(7, error)]
    assert state == m.state


def test_an_error_without_a_caller_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Machine().pool("r0")

    def expire_leases(change: Change) -> None:
        raise NotReadyError("a bug", reason="TRANSFER_UNDER_WAY")

    monkeypatch.setattr(leases, "expire_leases", expire_leases)
    with pytest.raises(AssertionError, match="Tick"):
        step(m.state, events.Tick(), m.now)
