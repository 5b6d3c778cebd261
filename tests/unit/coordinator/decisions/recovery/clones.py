"""Pools in which a replica lacks what is served."""

from __future__ import annotations

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.values import Phase

BASE_1 = PolicyVersion("base", 1)
GONE_FOR_GOOD = "which no replica in contact holds: its owner t1 is asked to publish it again"


def serving_pool(**settings: int) -> Machine:
    """A pool of one that serves base@1, code@1, math@1 and math@2."""
    m = Machine(**settings).pool("r0")
    for policy in ("base", "code", "math", "math"):
        m.acquire(policy)
        m.run_to(Phase.COMMITTED, policy)
    return m


def next_clone(m: Machine) -> int:
    """The ticket of the next clone, begun or waiting."""
    m.do(events.Tick())
    (ticket,) = m.answer_look_ups()
    return ticket
