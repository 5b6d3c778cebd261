"""Metrics of the coordinator: counters of each step, and gauges read from the state.

A step is counted once its saves are on disk, by comparing the states before and after it.
Gauges are read when somebody asks. No label names a version, a policy or a replica, so the
number of series is fixed.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.effects import EventKind
from weft_rl.coordinator.decisions.state.pool import PoolState, live_lease
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Phase, PolicyKind, StateReason
from weft_rl.telemetry.metrics import process_registry

#: A LoRA adapter takes milliseconds, a base of a trillion parameters minutes.
_SECONDS_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800,
)  # fmt: skip
_KINDS: Final = {PolicyKind.BASE: "base", PolicyKind.ADAPTER: "adapter"}
_REPAIRS: Final = {
    EventKind.CLONE_ENDED: ("clone", "succeeded"),
    EventKind.CLONE_FAILED: ("clone", "failed"),
    EventKind.CLONE_INTERRUPTED: ("clone", "interrupted"),
    EventKind.RESTORE_ENDED: ("restore", "succeeded"),
    EventKind.RESTORE_FAILED: ("restore", "failed"),
}
_STALLED: Final = "STALLED"


class PoolMetrics:
    """Counters and histograms of one coordinator.

    Args:
        registry: Registry that takes them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=_SECONDS_BUCKETS)

        self._started = counter("weft_pushes_started", "Pushes that got a version.", "kind")
        self._finished = counter(
            "weft_pushes_finished",
            "Pushes that ended: committed, aborted (before the commit point), or failed (no "
            "replica could switch).",
            "kind",
            "result",
        )
        self._stage = histogram(
            "weft_stage_seconds", "Of each push, from the first byte to the commit point.", "kind"
        )
        self._commit = histogram(
            "weft_commit_seconds", "Of each push, from the commit point to its end.", "kind"
        )
        self._pause = histogram(
            "weft_pause_seconds",
            "Longest pause of generation at any replica, of each switch of the base.",
        )
        self._bytes = counter(
            "weft_bytes_staged",
            "Bytes of the versions that pushes have staged, once each however many replicas.",
            "kind",
        )
        self._sent = counter(
            "weft_transfer_bytes",
            "Payload bytes of pushes that were staged, once each however many replicas.",
            "form",
        )
        self._missed = counter(
            "weft_heartbeats_missed", "Heartbeats that replicas were due and did not send."
        )
        self._repairs = {
            "clone": counter("weft_clones", "Copies from replica to replica.", "result"),
            "restore": counter(
                "weft_restores", "Versions that replicas took from their own copies.", "result"
            ),
        }
        self._rollbacks = counter("weft_rollbacks", "Rollbacks that were begun.", "result")
        self._stalls = counter(
            "weft_stalls", "Members given up for a transfer because they made no progress."
        )
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Create every series at zero: one that appears with its first event has no rate at it."""
        for kind in _KINDS.values():
            for metric in (self._started, self._stage, self._commit, self._bytes):
                metric.labels(kind)
            for result in ("committed", "aborted", "failed"):
                self._finished.labels(kind, result)
        for form in ("whole", "delta"):
            self._sent.labels(form)
        for repair, result in _REPAIRS.values():
            self._repairs[repair].labels(result)
        for result in ("succeeded", "failed"):
            self._rollbacks.labels(result)

    def count(
        self,
        event: events.Event,
        before: PoolState,
        after: PoolState,
        done: Sequence[effects.Effect],
    ) -> None:
        """Count what one step has changed; on the event loop, so quick.

        Args:
            done: The step's effects.
        """
        if isinstance(event, events.Heartbeat):
            self._count_late(event.replica_id, before, after)
        is_tick = isinstance(event, events.Tick)
        for effect in done:
            if isinstance(effect, effects.Announce):
                if effect.kind in _REPAIRS:
                    repair, result = _REPAIRS[effect.kind]
                    self._repairs[repair].labels(result).inc()
                elif is_tick and effect.kind is EventKind.REPLICA_LOST:
                    self._count_silent(effect.subject, before, after)
        if after.transfers is not before.transfers:
            for name, transfer in after.transfers.items():
                if (was := before.transfers.get(name)) is not transfer:
                    self._count_course(was, transfer)
        if after.history is not before.history:
            for name, ended in after.history.items():
                if name not in before.history:
                    self._count_course(before.transfers.get(name), ended)
                    self._count_end(ended)

    # -- transfers -------------------------------------------------------------------

    def _count_course(self, was: Transfer | None, now: Transfer) -> None:
        """Count what a transfer has reached with this step: stalls, start, commit point."""
        for known, found in (
            (was.losses if was else {}, now.losses),
            (was.refusals if was else {}, now.refusals),
        ):
            new = [n for n, why in found.items() if why.reason == _STALLED and n not in known]
            self._stalls.inc(len(new))
        if now.purpose.name != "push":
            return
        kind = _KINDS[now.kind]
        if now.phase is not Phase.WAITING and (was is None or was.phase is Phase.WAITING):
            self._started.labels(kind).inc()
        if now.commit_at and not (was and was.commit_at):
            self._stage.labels(kind).observe(now.commit_at - now.start_at)
            self._bytes.labels(kind).inc(now.layout.total_bytes)
            self._sent.labels("delta" if now.delta_from else "whole").inc(now.sent_bytes)
            if now.sent_whole:
                self._sent.labels("whole").inc(now.layout.total_bytes)

    def _count_end(self, ended: Transfer) -> None:
        if ended.failure and ended.failure.reason == _STALLED and not ended.refusals:
            self._stalls.inc()
        if ended.purpose.name == "rollback":
            self._rollbacks.labels("failed" if ended.failure else "succeeded").inc()
        if ended.commit_at and ended.served_by and ended.kind is PolicyKind.BASE:
            self._pause.observe(ended.pause_seconds)
        if ended.purpose.name != "push":
            return
        kind, result = _KINDS[ended.kind], "committed"
        if ended.failure:
            result = "failed" if ended.commit_at else "aborted"
        self._finished.labels(kind, result).inc()
        if ended.commit_at:
            self._commit.labels(kind).observe(ended.end_at - ended.commit_at)

    # -- heartbeats --------------------------------------------------------------------

    def _count_late(self, replica_id: str, before: PoolState, after: PoolState) -> None:
        """Count the heartbeats that were missed before the one that has come."""
        was, now = before.replicas.get(replica_id), after.replicas.get(replica_id)
        if was is None or now is None or was.lost:
            return
        intervals = (now.last_heard - was.last_heard) / after.settings.heartbeat_seconds
        self._missed.inc(max(0, round(intervals) - 1))

    def _count_silent(self, replica_id: str, before: PoolState, after: PoolState) -> None:
        """Count the heartbeats that were missed from a replica that was given up."""
        was = before.replicas.get(replica_id)
        if was is not None:
            silence = after.tick_at - was.last_heard
            self._missed.inc(max(0, int(silence / after.settings.heartbeat_seconds)))


class PoolCollector(Collector):
    """Gauges of one coordinator; read on whichever thread asks.

    Args:
        state: Returns the state as it is now, which is replaced and never mutated.
        now: Returns monotonic seconds, as the state has them.
    """

    def __init__(self, state: Callable[[], PoolState], now: Callable[[], float]) -> None:
        self._state = state
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Yield the series, for prometheus_client."""
        state = self._state()
        replicas = Tally(r.announced for r in state.replicas.values())
        yield _gauge(
            "weft_replicas",
            "Replicas by state, and by the kind of reason for it.",
            ("state", "reason"),
            (((one.state.name.lower(), one.label), replicas[one]) for one in StateReason),
        )
        adapters = [p for p in state.policies.values() if p.kind is PolicyKind.ADAPTER]
        served = {"base": int(bool(state.fingerprint))}
        served["adapter"] = sum(len(policy.versions) for policy in adapters)
        yield _gauge(
            "weft_versions_served",
            "Versions that can be requested.",
            ("kind",),
            (((kind,), count) for kind, count in served.items()),
        )
        held = sum(
            live_lease(policy, self._now()) is not None for policy in state.policies.values()
        )
        yield GaugeMetricFamily("weft_leases_held", "Policies that a trainer owns.", held)
        lost = sum(state.is_lost(policy) for policy in state.policies.values())
        yield GaugeMetricFamily(
            "weft_policies_lost",
            "Policies whose served version no replica in contact holds, and that nobody owned.",
            lost,
        )
        over = sum(
            state.is_over_another_base(PolicyVersion(p.name, p.served_version)) for p in adapters
        )
        yield GaugeMetricFamily(
            "weft_policies_over_another_base",
            "Adapters whose served version is over a base of another content than it was "
            "trained on.",
            over,
        )
        waiting = sum(t.phase is Phase.WAITING for t in state.transfers.values())
        yield GaugeMetricFamily(
            "weft_transfers_waiting", "Transfers that wait for their turn.", waiting
        )


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], int]]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def pool_registry(
    state: Callable[[], PoolState], now: Callable[[], float]
) -> tuple[CollectorRegistry, PoolMetrics]:
    """Return a coordinator's registry, and the counters in it."""
    registry = process_registry()
    registry.register(PoolCollector(state, now))
    return registry, PoolMetrics(registry)
