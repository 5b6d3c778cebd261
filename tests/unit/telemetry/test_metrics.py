"""Metrics that every server process has, their text, and the options of their port."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

from tests.doubles.http import request
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.telemetry.config import TelemetryConfig
from weft_rl.telemetry.metrics import (
    SAME_TEXT_SECONDS,
    MetricsText,
    process_registry,
    refusal_counter,
)


def test_scrapes_at_once_get_one_text() -> None:
    registry, now = CollectorRegistry(), [0.0]
    counter = Counter("weft_x", "x", registry=registry)
    text = MetricsText(registry, lambda: now[0])
    first = text(request()).body
    counter.inc()
    assert text(request()).body == first
    now[0] += SAME_TEXT_SECONDS
    assert b"weft_x_total 1.0" in text(request()).body
    for version in range(20):
        text(request(accept=f"application/openmetrics-text; version=1.0.{version}"))
    assert len(text._made) <= 8


def test_refusals_with_reasons_of_another_version_are_one_series() -> None:
    registry = process_registry()
    count = refusal_counter(registry)
    for reason in ("ROLE_MISSING", "MADE_UP", "MADE_UP_TOO"):
        count(reason)
    assert registry.get_sample_value("weft_refusals_total", {"reason": "ROLE_MISSING"}) == 1
    assert registry.get_sample_value("weft_refusals_total", {"reason": "OTHER"}) == 2


@pytest.mark.parametrize("address", ["9090", ":9090", "host:", "host:http", "host:70000"])
def test_addresses_that_are_none(address: str) -> None:
    for option in ("metrics", "health"):
        with pytest.raises(InvalidRequestError, match=f"--{option} is"):
            TelemetryConfig(**{option: address})


def test_auth_of_no_port() -> None:
    with pytest.raises(InvalidRequestError, match="--metrics opens"):
        TelemetryConfig(metrics_auth=True)
