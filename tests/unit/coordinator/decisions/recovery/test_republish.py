"""What nobody holds any more: whose owner is asked, when, and until when."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from weft.coordinator.decisions import effects, events
from weft.coordinator.decisions.recovery.republish import publish_again_version
from weft.coordinator.decisions.replicas.replica_state import explain_state
from weft.coordinator.decisions.state.replica import OutOfService
from weft.coordinator.decisions.state.values import Phase, ReplicaState

AFTER_SECONDS = 5.0


def _lost(*policies: str) -> Machine:
    """A pool of one that came back empty."""
    m = Machine(publish_again_after_seconds=AFTER_SECONDS).pool("r0")
    for policy in policies:
        m.acquire(policy)
        m.run_to(Phase.COMMITTED, policy)
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2")
    return m


def _told(m: Machine, policy: str) -> int:
    """What a renewal says."""
    ticket = next(m.ids)
    m.do(events.RenewLease(ticket, policy, m.tokens[policy]))
    answer = m.answer(ticket)
    assert isinstance(answer, effects.LeaseAnswer)
    return answer.publish_again_version


def _announced(m: Machine) -> list[str]:
    return [e.subject for e in m.ever(effects.Announce) if e.kind == "publish_again_wanted"]


def test_the_owner_is_asked_once_it_lasts_and_until_it_has_pushed() -> None:
    m = _lost("base", "math")
    m.pass_time(AFTER_SECONDS - 1)
    assert (_told(m, "base"), _told(m, "math")) == (0, 0)
    m.pass_time(2)
    assert (_told(m, "base"), _told(m, "math")) == (1, 1)
    m.pass_time(20)
    assert _announced(m) == ["base@1", "math@1"]
    m.run_to(Phase.COMMITTED, "base")
    m.run_to(Phase.COMMITTED, "math")
    m.pass_time(1)
    assert (_told(m, "base"), _told(m, "math")) == (0, 0)
    assert not m.state.republish


def test_who_acquires_the_policy_is_told_at_once() -> None:
    m = _lost("math")
    m.pass_time(AFTER_SECONDS + 1)
    m.do(events.ReleasePolicy(0, "math", m.tokens["math"]))
    assert publish_again_version(m.state, "math") == 1
    ticket = m.acquire("math", trainer="t2")
    answer = m.answer(ticket)
    assert isinstance(answer, effects.LeaseAnswer)
    assert answer.publish_again_version == 1


def test_a_replica_that_comes_back_with_a_copy_ends_it() -> None:
    m = _lost("base")
    m.pass_time(AFTER_SECONDS + 1)
    assert _told(m, "base") == 1
    m.register("r1", spilled=("base@1",))
    m.pass_time(1)
    assert _told(m, "base") == 0


def test_what_only_a_quarantined_replica_holds_is_asked_for() -> None:
    m = Machine(publish_again_after_seconds=AFTER_SECONDS).pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.do(
        events.TakeOutOfService(0, "r0", OutOfService(ReplicaState.QUARANTINED, "answers nonsense"))
    )
    m.pass_time(AFTER_SECONDS + 1)
    assert _told(m, "math") == 0, "nobody lacks it"
    m.register("r1")
    m.pass_time(AFTER_SECONDS + 1)
    assert _told(m, "math") == 1
    m.do(events.Uncordon(0, "r0"))
    m.pass_time(1)
    assert _told(m, "math") == 0


def test_a_short_absence_is_nobodys_business() -> None:
    m = _lost("base")
    m.pass_time(AFTER_SECONDS - 2)
    m.register("r1", retained=(1,))
    m.pass_time(AFTER_SECONDS)
    m.do(events.Leave(0, "r1", "i1"))
    m.pass_time(AFTER_SECONDS - 2)
    assert not _announced(m)
    m.pass_time(3)
    assert _announced(m) == ["base@1"]


def test_what_is_served_without_a_copy_is_not_asked_for_until_somebody_lacks_it() -> None:
    m = Machine().pool("r0")
    m.retain_base = 0
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.pass_time(20)
    assert not m.state.republish
    m.register("r1")
    m.pass_time(20)
    assert _announced(m) == ["base@1"]


def test_an_older_version_of_an_adapter_is_not_asked_for() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    for replica_id in ("r0", "r1"):
        m.do(events.Leave(0, replica_id, "i1"))
    m.register("r2")
    m.run_to(Phase.COMMITTED)
    m.pass_time(20)
    assert not _announced(m), "math@2 is held, and math@1 cannot be published again"


@pytest.mark.parametrize("owned", [True, False])
def test_standing_says_who_brings_it_back(owned: bool) -> None:
    m = _lost("math")
    if not owned:
        m.do(events.ReleasePolicy(0, "math", m.tokens.pop("math")))
    m.pass_time(AFTER_SECONDS + 1)
    _, why = explain_state(m.state, m.state.replicas["r0"])
    who = (
        "its owner t1 is asked to publish it again"
        if owned
        else "nobody owns it now, push it again"
    )
    assert why == f"lacks math@1, which no replica in contact holds: {who}"
    (said,) = [e for e in m.ever(effects.Announce) if e.kind == "publish_again_wanted"]
    assert who in said.message
