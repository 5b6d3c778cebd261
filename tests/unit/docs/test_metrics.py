"""The metrics that the manual and the dashboard name are those that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig, RolloutConfig
from rollout_side.service.metrics import ReplicaMetrics
from tests.doubles.engine import EngineDouble
from tests.unit.docs.pages import ROOT, page
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.runtime.metrics import pool_registry
from weft_rl.telemetry.metrics import refusal_counter

DASHBOARD = json.loads((ROOT / "helm/weft/dashboards/weft.json").read_text())
ROW = re.compile(r"^\| `(weft_\w+)(?:\{([\w,]+)\})?` \| (counter|gauge|histogram) \|", re.MULTILINE)
USED = re.compile(r"\bweft_[a-z_]+\b")


def described(registry: CollectorRegistry) -> dict[str, tuple[str, frozenset[str]]]:
    """By name as the manual says it, the type and the labels."""
    found = {}
    for metric in registry.collect():
        if metric.name.startswith("weft_"):
            labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            found[name] = (metric.type, frozenset(labels))
    return found


@pytest.fixture(scope="module")
def coordinators() -> dict[str, Any]:
    registry, _ = pool_registry(PoolState, lambda: 0.0)
    refusal_counter(registry)("INTERNAL")
    return described(registry)


@pytest.fixture(scope="module")
def replicas() -> Any:
    config = AgentConfig(coordinator="127.0.0.1:1", replica_id="r0")
    engine = EngineDouble({"w": torch.zeros(2, 2)})
    engine.drafted = 2, 1
    metrics = ReplicaMetrics(Agent(config, engine), RolloutConfig(agent=config, vllm_args=[]))
    refusal_counter(metrics.registry)("INTERNAL")
    yield described(metrics.registry)
    engine.close()


def test_the_manual_names_every_metric(
    coordinators: dict[str, Any], replicas: dict[str, Any]
) -> None:
    text = page("docs/operations.md").prose
    listed = {
        name: (kind, frozenset(labels.split(",") if labels else ()))
        for name, labels, kind in ROW.findall(text)
    }
    shared = {"weft_refusals_total": ("counter", frozenset({"reason"}))}
    shared["weft_build_info"] = ("gauge", frozenset({"version"}))
    shared["weft_unused_files"] = ("gauge", frozenset())
    assert coordinators | replicas == listed | shared
    for name, (_, labels) in shared.items():
        assert f"`{name}{''.join(f'{{{label}}}' for label in labels)}`" in text


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_metrics_that_there_are(
    coordinators: dict[str, Any], replicas: dict[str, Any]
) -> None:
    known = coordinators | replicas
    series = {
        f"{name}{end}"
        for name, (kind, _) in known.items()
        for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    asked = {name for query in queries() for name in USED.findall(query)}
    assert asked <= series
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    others = {"weft_replica_ready", "weft_build_info", "weft_unused_files"}
    others.add("weft_draft_acceptance")  # which most pools have not
    assert set(known) - shown == others, "all are looked at"
    chosen = '{namespace=~"$namespace",release=~"$release",job=~"$job"'
    assert all(chosen in query for query in queries())


def test_the_manual_has_a_line_for_every_alert_with_an_anchor_by_its_name() -> None:
    """The chart adds the anchor to ``runbookUrl``."""
    text = page("docs/operations.md").path.read_text()
    alerts = re.findall(r'^\| <a id="(\w+)"></a>(Weft\w+) \|', text, re.MULTILINE)
    assert all(anchor == name.lower() for anchor, name in alerts)
    of_the_chart = (ROOT / "helm/weft/files/alerts.yaml").read_text()
    assert [name for _, name in alerts] == re.findall(r"- alert: (\w+)", of_the_chart)
