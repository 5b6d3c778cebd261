"""What counts what: a history of steps gives exactly these numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.unit.coordinator.decisions.machine import (
    DIGEST,
    GONE,
    LAYOUT,
    LOAD_FAILED,
    SPEC,
    Machine,
)
from weft_rl.contract.manifest import WSUM64, WireBucket, make_send_plan
from weft_rl.contract.names import VersionVector
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import ContentDigest, Phase
from weft_rl.coordinator.decisions.step import step
from weft_rl.coordinator.runtime.metrics import PoolMetrics, pool_registry


class Counted(Machine):
    """A pool that consists of events, each step of which is counted."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.registry, self.metrics = pool_registry(lambda: self.state, lambda: self.now)

    def do(self, event: events.Event) -> list[effects.Effect]:
        before = self.state
        self.state, self.last = step(before, event, self.now)
        self.metrics.count(event, before, self.state, self.last)
        self.all += self.last
        return self.last

    def value(self, name: str, **labels: str) -> float:
        found = self.registry.get_sample_value(f"weft_{name}", labels)
        assert found is not None, f"there is no weft_{name} with {labels}"
        return found

    def pushes(self, kind: str = "adapter") -> dict[str, float]:
        """Pushes of a kind that were started, and that ended, by result."""
        results = ("committed", "aborted", "failed")
        ended = {r: self.value("pushes_finished_total", kind=kind, result=r) for r in results}
        counts = {"started": self.value("pushes_started_total", kind=kind), **ended}
        return {name: count for name, count in counts.items() if count}


def _pool(*replicas: str, policies: tuple[str, ...] = ("math",), **settings: Any) -> Counted:
    m = Counted(**settings)
    m.pool(*replicas)
    for policy in policies:
        m.acquire(policy)
    return m


def test_policies_that_are_lost() -> None:
    m = _pool("r0")
    m.run_to(Phase.COMMITTED)
    m.do(events.ReleasePolicy(0, "math", m.tokens.pop("math")))
    assert m.value("policies_lost") == 0
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2")
    m.pass_time(6.0)
    assert m.value("policies_lost") == 1
    m.do(events.ForgetPolicy(0, "math", False))
    assert m.value("policies_lost") == 0


def test_adapters_over_another_base() -> None:
    m = _pool("r0", policies=("math", "code", "base"))
    m.run_to(Phase.COMMITTED, adapter=dataclasses.replace(SPEC, trained_on_base_version=0))
    m.run_to(Phase.COMMITTED, "code", adapter=SPEC)  # nobody knows what that was trained on
    assert m.value("policies_over_another_base") == 0
    m.run_to(Phase.COMMITTED, "base")
    assert m.value("policies_over_another_base") == 1
    m.run_to(Phase.COMMITTED, adapter=dataclasses.replace(SPEC, trained_on_base_version=1))
    assert m.value("policies_over_another_base") == 0


def test_a_push_that_is_committed() -> None:
    m = _pool("r0", "r1")
    ticket = m.begin()
    assert m.pushes() == {"started": 1}
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.now += 2.0
    m.stage_all(ticket)
    m.now += 0.25
    m.answer_commits(ticket)
    assert m.pushes() == {"started": 1, "committed": 1}
    assert m.pushes("base") == {}
    assert m.value("stage_seconds_sum", kind="adapter") == pytest.approx(2.0)
    assert m.value("commit_seconds_sum", kind="adapter") == pytest.approx(0.25)
    assert m.value("bytes_staged_total", kind="adapter") == LAYOUT.total_bytes
    assert m.value("pause_seconds_count") == 0, "an adapter pauses nothing"


def test_a_push_that_is_given_up_is_aborted_and_staged_nothing() -> None:
    m = _pool("r0")
    ticket = m.run_to(Phase.STAGING)
    m.stage(ticket, 0)
    m.stage(ticket, 1, ContentDigest(WSUM64, b"\2" * 8, DIGEST.size_bytes))
    assert m.pushes() == {"started": 1, "aborted": 1}
    assert m.value("stage_seconds_count", kind="adapter") == 0
    assert m.value("commit_seconds_count", kind="adapter") == 0
    assert m.value("bytes_staged_total", kind="adapter") == 0


def test_a_push_that_no_replica_can_switch_to_has_failed() -> None:
    m = _pool("r0", "r1")
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    assert m.pushes() == {"started": 1, "failed": 1}
    assert m.value("stage_seconds_count", kind="adapter") == 1


def test_one_replica_that_switches_makes_it_committed() -> None:
    m = _pool("r0", "r1")
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commits(ticket, r1=LOAD_FAILED)
    assert m.pushes() == {"started": 1, "committed": 1}


def test_a_push_that_waits_is_not_started_until_its_turn() -> None:
    m = _pool("r0", policies=("math", "code"))
    first = m.begin("math")
    m.begin("code")
    assert m.pushes() == {"started": 1}
    assert m.value("transfers_waiting") == 1
    m.finish(first)
    assert m.pushes() == {"started": 2, "committed": 1}
    assert m.value("transfers_waiting") == 0


def test_a_delta_counts_what_it_sends_beside_what_it_stages() -> None:
    m = _pool("r0", policies=("base",))
    m.run_to(Phase.COMMITTED, "base")
    assert m.value("transfer_bytes_total", form="delta") == 0
    plan = make_send_plan(1, [WireBucket(0, 0, 256, 1)], DIGEST.value)
    m.run_to(Phase.COMMITTED, "base", send_plan=plan)
    m.run_to(Phase.STAGING, "base", send_plan=plan)
    assert m.value("transfer_bytes_total", form="whole") == LAYOUT.total_bytes
    assert m.value("transfer_bytes_total", form="delta") == 256
    assert m.value("bytes_staged_total", kind="base") == 2 * LAYOUT.total_bytes


def test_a_mixed_push_counts_both_of_what_it_sends() -> None:
    m = _pool("r0", policies=("base",))
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1", vector=VersionVector(1))
    whole = LAYOUT.total_bytes
    wires = [WireBucket(0, 0, 256, 1), WireBucket(0, 0, 512, 1)]
    plan = make_send_plan(1, wires, DIGEST.value, 1)
    m.run_to(Phase.COMMITTED, "base", send_plan=plan)
    assert m.value("transfer_bytes_total", form="delta") == 256
    assert m.value("transfer_bytes_total", form="whole") == 2 * whole
    assert m.value("bytes_staged_total", kind="base") == 2 * whole


def test_a_push_of_the_base_pauses_generation() -> None:
    m = _pool("r0", policies=("base",))
    m.run_to(Phase.COMMITTED, "base")
    assert m.pushes("base") == {"started": 1, "committed": 1}
    assert m.value("pause_seconds_sum") == 0.5
    assert m.value("pause_seconds_count") == 1


def test_a_rollback_of_the_base_pauses_it_too_and_is_no_push() -> None:
    m = _pool("r0", policies=("base",))
    m.base_copies = 2
    m.run_to(Phase.COMMITTED, "base")
    m.run_to(Phase.COMMITTED, "base")
    ticket = m.roll_back("base", 1)
    m.answer_commits(ticket)
    assert m.pushes("base") == {"started": 2, "committed": 2}
    assert m.value("rollbacks_total", result="succeeded") == 1
    assert m.value("pause_seconds_count") == 3


def _joining() -> tuple[Counted, int]:
    """A clone of the base to a replica that has just come."""
    m = _pool("r0", policies=("base",))
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1")
    m.do(events.Tick())
    (clone,) = m.answer_look_ups()
    return m, clone


def test_clones() -> None:
    m, clone = _joining()
    m.finish(clone)
    assert m.value("clones_total", result="succeeded") == 1
    assert m.pushes("base") == {"started": 1, "committed": 1}
    assert m.value("bytes_staged_total", kind="base") == LAYOUT.total_bytes, "of the push alone"
    assert m.value("pause_seconds_count") == 2


def test_clones_that_end_otherwise() -> None:
    m, clone = _joining()
    push = m.begin("base")
    assert m.value("clones_total", result="interrupted") == 1
    m.finish(push)
    m, clone = _joining()
    m.do(events.JoinAnswered(f"t{clone}", "r1", GONE))
    assert m.value("clones_total", result="failed") == 1
    assert m.value("clones_total", result="succeeded") == 0


def test_heartbeats_that_are_missed() -> None:
    m = _pool("r0", heartbeat_seconds=2.0, lost_after_seconds=9.0)
    m.pass_time(10.0)
    assert m.value("heartbeats_missed_total") == 0
    m.pass_time(6.0, beats=False)  # three are due, and then one comes
    m.pass_time(0.25)
    assert m.value("heartbeats_missed_total") == 2
    m.pass_time(12.0, beats=False)
    assert m.value("replicas", state="lost", reason="silent") == 1
    assert m.value("heartbeats_missed_total") == 2 + 4, "9 s of silence"
    m.register("r0", "i2")
    m.pass_time(4.0)
    assert m.value("heartbeats_missed_total") == 6


def test_a_replica_that_leaves_has_missed_nothing() -> None:
    m = _pool("r0", "r1")
    m.do(events.Leave(1, "r1", "i1"))
    assert m.value("heartbeats_missed_total") == 0
    assert m.value("replicas", state="ready", reason="") == 1


@pytest.mark.parametrize("min_replicas", [0, 1])
def test_a_member_that_stalls_counts_once_whether_the_push_continues_or_not(
    min_replicas: int,
) -> None:
    m = _pool("r0", "r1", stall_seconds=5.0)
    ticket = m.begin(min_replicas=min_replicas)
    group = m.transfer(ticket).group_id
    for rank in (0, 2):
        m.do(events.RankAttends(group, rank))
    m.pass_time(6.0)
    assert m.value("stalls_total") == 1
    assert m.value("replicas", state="suspect", reason="stalled") == 1
    assert m.pushes().get("aborted", 0) == (min_replicas == 0)


@pytest.mark.parametrize("replicas", [("r0",), ("r0", "r1")])
def test_a_member_that_stalls_after_the_commit_counts_once(replicas: tuple[str, ...]) -> None:
    m = _pool(*replicas, stall_seconds=5.0)
    ticket = m.run_to(Phase.COMMITTING)
    for replica_id in replicas[1:]:
        m.answer_commit(ticket, replica_id)
    m.pass_time(6.0)
    assert m.value("stalls_total") == 1


def test_gauges() -> None:
    m = _pool("r0", "r1", policies=("math", "base"))
    assert m.value("leases_held") == 2
    assert m.value("versions_served", kind="base") == 1
    for _ in range(2):
        m.run_to(Phase.COMMITTED, "math")
    assert m.value("versions_served", kind="adapter") == 2
    assert m.value("replicas", state="ready", reason="") == 2
    m.pass_time(20.0, renews=False)
    assert m.value("leases_held") == 0


def test_replicas_by_state_and_by_the_kind_of_reason() -> None:
    m = _pool("r0", "r1", "r2", "r3", policies=("base",))
    m.run_to(Phase.COMMITTED, "base")
    assert m.value("replicas", state="ready", reason="") == 4
    for name, no_pushes in (("r1", False), ("r2", True)):
        m.do(events.Cordon(next(m.ids), name, "disk", no_pushes))
    m.do(events.Drain(next(m.ids), "r3", 60.0, "new kernel"))
    m.beat("r0", version_vector=m.state.vector, refusing="it starts")
    m.register("r4")
    m.register("r5", dirty_reason="a load failed midway")
    seen = {
        tuple(sample.labels.values()): sample.value
        for metric in m.registry.collect()
        for sample in metric.samples
        if sample.name == "weft_replicas" and sample.value
    }
    assert seen == {
        ("out_of_service", "operator"): 2,
        ("quarantined", "mixed_weights"): 1,
        ("draining", "leaving"): 1,
        ("pending_weights", "versions_missing"): 1,
        ("pending_weights", "not_open"): 1,
    }


def _series(registry: CollectorRegistry) -> set[str]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}"
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_the_number_of_series_is_fixed() -> None:
    m = Counted()
    before = _series(m.registry)
    m.pool(*(f"r{i}" for i in range(9)))
    for i in range(9):
        m.acquire(f"policy-{i}")
        m.run_to(Phase.COMMITTED, f"policy-{i}")
    assert _series(m.registry) == before


def test_metrics_do_not_share_a_registry() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    PoolMetrics(first)
    PoolMetrics(second)
    assert _series(first) == _series(second)
