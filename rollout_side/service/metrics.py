"""Metrics of a replica: its memory and disk, its switches, its readiness.

No label names a version or a policy, so the number of series is fixed. vLLM's own metrics are on
the OpenAI port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_side.agent.agent import Agent
from rollout_side.config import RolloutConfig
from rollout_side.engine import SwitchTimes
from rollout_side.waits import answer_within
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.errors import TransferTimeoutError
from weft_rl.contract.names import BASE_POLICY
from weft_rl.telemetry.metrics import process_registry

#: Interval at which the spill directory, which may be slow, is measured.
SPILL_LOOK_SECONDS: Final = 15.0
_SECONDS_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
_BECAME: Final[Mapping[RunningRequests, str]] = {
    "recompute": "recomputed",
    "keep": "kept",
    "abort": "aborted",
}


class ReplicaMetrics(Collector):
    """Metrics of one replica; gauges are read on whichever thread asks."""

    def __init__(self, agent: Agent, config: RolloutConfig) -> None:
        self.registry: CollectorRegistry = process_registry()
        self._agent = agent
        self._config = config
        self._spill_bytes = 0
        self._drafted_before = (0, 0)
        self._switches = Counter(
            "weft_switches", "Switches to a version.", ["kind"], registry=self.registry
        )
        self._load = Histogram(
            "weft_load_seconds",
            "How long the engine took to load a version.",
            ["kind"],
            registry=self.registry,
            buckets=_SECONDS_BUCKETS,
        )
        self._pause = Histogram(
            "weft_replica_pause_seconds",
            "How long generation was paused here, at each switch of the base.",
            registry=self.registry,
            buckets=_SECONDS_BUCKETS,
        )
        self._met = Counter(
            "weft_requests_at_switch",
            "Requests that had tokens when the base changed, by what became of them.",
            ["became"],
            registry=self.registry,
        )
        for became in _BECAME.values():
            self._met.labels(became)
        for kind in ("base", "adapter"):
            self._switches.labels(kind)
            self._load.labels(kind)
        self.registry.register(self)

    def switched(self, policy: str, times: SwitchTimes) -> None:
        """Count a switch."""
        kind = "base" if policy == BASE_POLICY else "adapter"
        self._switches.labels(kind).inc()
        if kind == "base":
            self._drafted_before = self._agent.engine.draft_counts()
        if times.load_seconds:  # else it was served already, or an alias was flipped
            self._load.labels(kind).observe(times.load_seconds)
        if times.pause_seconds:
            self._pause.observe(times.pause_seconds)
        if times.num_begun:
            self._met.labels(_BECAME[self._config.running_requests]).inc(times.num_begun)

    async def watch_spill(self, measure: Callable[[], int]) -> None:
        """Measure the spill directory at intervals, until cancelled."""
        while True:
            # The spiller logs a disk that fails or hangs.
            with contextlib.suppress(OSError, TransferTimeoutError):
                self._spill_bytes = await answer_within(
                    SPILL_LOOK_SECONDS, "the size of the spill directory", measure
                )
            await asyncio.sleep(SPILL_LOOK_SECONDS)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, for prometheus_client."""
        engine, memory = self._agent.engine, self._agent.serving.memory
        capabilities = engine.capabilities
        used = GaugeMetricFamily("weft_store_bytes", "Bytes held, by store.", labels=["store"])
        limit = GaugeMetricFamily("weft_store_limit_bytes", "Their bounds.", labels=["store"])
        stores = [
            ("adapters", memory.adapter_bytes, capabilities.adapter_capacity_bytes),
            ("staging", memory.staging_bytes, capabilities.staging_capacity_bytes),
        ]
        if engine.spills:
            stores.append(("spill", self._spill_bytes, self._config.spill_bytes))
        for store, num_bytes, bound in stores:
            used.add_metric([store], num_bytes)
            limit.add_metric([store], bound)
        yield used
        yield limit
        yield GaugeMetricFamily(
            "weft_undo_versions",
            "Versions of the base that can be switched to in place, by what deltas have changed.",
            len(memory.undo_bases),
        )
        drafted, accepted = self._drafted()
        if drafted:
            yield GaugeMetricFamily(
                "weft_draft_acceptance",
                "Share of the tokens drafted since the base changed last that were accepted.",
                accepted / drafted,
            )
        yield GaugeMetricFamily(
            "weft_replica_ready",
            "Whether it serves what the pool does, and takes requests.",
            int(self._agent.is_ready),
        )
        yield GaugeMetricFamily(
            "weft_requests_running", "Requests that have not ended.", engine.num_requests()
        )

    def _drafted(self) -> tuple[int, int]:
        """Return the tokens drafted, and those accepted, since the base changed last."""
        now, before = self._agent.engine.draft_counts(), self._drafted_before
        return now[0] - before[0], now[1] - before[1]
