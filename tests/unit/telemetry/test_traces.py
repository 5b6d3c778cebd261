"""A server's own tracer."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import pytest

from tests.doubles.collector import Collector
from tests.waits import until
from weft_rl.contract.errors import UnsupportedError
from weft_rl.telemetry.traces import open_tracer


def test_without_the_extra_it_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"--traces needs .*pip install -e '/.+\[tracing\]'"):
        open_tracer("weft-coordinator")


@pytest.mark.parametrize(
    ("environment", "service"),
    [
        ({}, "weft-replica"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,a=b"}, "mine"),
    ],
)
def test_spans_say_whose_they_are(
    environment: dict[str, str], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracer = open_tracer("weft-replica", "replica-1")
        tracer.start("span").end()
        tracer.close()  # exports what has ended
        (span,) = collector.spans()
    assert (span.service, span.instance) == (service, "replica-1")


def test_that_no_collector_answers_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    tracer = open_tracer("weft-replica")

    def exported(times: int, monkey: Any = tracer) -> None:
        until(lambda: tracer.start("span").end() or monkey._exporter.num_failed >= times)

    exported(3)
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 2.5
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("spans cannot be exported")
