"""Traces of pushes: one a push, over OTLP, from trainer, coordinator and replicas."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opentelemetry.trace
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from rollout_side.receive.incoming_buckets import ReceiveRing
from tests.doubles.collector import Collector, Seen
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, peft_of, until, weights
from tests.waits import stays
from trainer_side import Publisher
from weft_rl.contract.errors import DigestMismatchError, LoadFailedError, WeftError
from weft_rl.telemetry.config import TelemetryConfig
from weft_rl.telemetry.traces import open_tracer
from weft_rl.tracing import Tracer

_OF_A_PUSH = {
    ("trainer", "weft.push"): 1,
    ("trainer", "weft.push.describe"): 1,
    ("trainer", "weft.push.plan"): 1,
    ("trainer", "weft.push.begin"): 1,
    ("trainer", "weft.push.send"): 1,
    ("trainer", "weft.push.await"): 1,
    ("weft-coordinator", "weft.transfer"): 1,
    ("weft-coordinator", "weft.transfer.forming"): 1,
    ("weft-coordinator", "weft.transfer.staging"): 1,
    ("weft-coordinator", "weft.transfer.committing"): 1,
    ("weft-replica", "weft.receive"): 2,
    ("weft-replica", "weft.switch"): 2,
}
_SECRET_NAMES = ("token", "secret", "nonce")


class TracedPool:
    """A coordinator and two replicas that trace."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.engines: list[EngineDouble] = []
        self.tracers: list[Tracer] = []

    def add_replica(self, replica_id: str) -> None:
        tracer = open_tracer("weft-replica", replica_id)
        engine = EngineDouble(weights(Model()), tracer=tracer)
        self.pool.add_replica(replica_id, engine)
        self.engines.append(engine)
        self.tracers.append(tracer)

    def close(self) -> None:
        for tracer in self.tracers:
            tracer.close()


@pytest.fixture
def traced_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], TracedPool]]:
    """Makes the pool, whose spans are sent to an endpoint as they end."""
    stack = contextlib.ExitStack()

    def make(endpoint: str) -> TracedPool:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        telemetry = TelemetryConfig(traces=True)
        pool = stack.enter_context(running_pool(tmp_path / "weft.db", telemetry=telemetry))
        traced = TracedPool(pool)
        stack.callback(traced.close)
        for replica_id in ("replica-0", "replica-1"):
            traced.add_replica(replica_id)
        return traced

    with stack:
        yield make


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def provider(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    """What the trainer has set up; a process has one, which cannot be set again."""
    provider = TracerProvider(resource=Resource({"service.name": "trainer"}))
    exporter = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(opentelemetry.trace, "get_tracer_provider", lambda: provider)
    yield provider
    provider.shutdown()


def _publisher(pool: Pool, **options: Any) -> Publisher:
    settings: dict[str, Any] = {"trainer_id": "t", "timeout_seconds": 20, "progress": None}
    return Publisher(pool.target, **settings | options)


def _wait_for_pushes(collector: Collector, number: int) -> list[Seen]:
    for (_, name), count in _OF_A_PUSH.items():
        collector.wait(number * count, name)
    return collector.wait(number, "step")


def _last_trace(collector: Collector) -> list[Seen]:
    """Of the push that ended last, once the coordinator has sent its part."""
    trace_id = [span for span in collector.spans() if span.name == "weft.push"][-1].trace_id

    def spans() -> list[Seen]:
        return [span for span in collector.spans() if span.trace_id == trace_id]

    until(lambda: "weft.transfer" in {span.name for span in spans()})
    return spans()


def _of(spans: list[Seen], name: str) -> Seen:
    (found,) = [span for span in spans if span.name == name]
    return found


def _check_whole(spans: list[Seen]) -> None:
    """One trace, of exactly these spans, each within its parent."""
    counts: dict[tuple[str, str], int] = {}
    for span in spans:
        counts[span.service, span.name] = counts.get((span.service, span.name), 0) + 1
        assert not span.failed, span
    counts.pop(("weft-coordinator", "weft.transfer.waiting"), None)  # for the preflight
    assert counts == _OF_A_PUSH
    assert len({span.trace_id for span in spans}) == 1
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert 0 < span.begin_ns <= span.end_ns
        if span.name == "weft.push":
            continue
        parent = by_id[span.parent_id]
        is_top = span.name in ("weft.transfer", "weft.receive", "weft.switch")
        wanted = span.name.rpartition(".")[0] if not is_top else "weft.transfer"
        assert parent.name == ("weft.push" if span.name == "weft.transfer" else wanted)
        assert parent.begin_ns <= span.begin_ns, (span, parent)
        assert span.end_ns <= parent.end_ns, (span, parent)


def test_each_push_is_one_trace_of_all_who_take_part(traced_pool, collector, provider):
    pool = traced_pool(collector.endpoint).pool
    seen: list[Seen] = []
    with _publisher(pool) as publisher:
        for number in (1, 2):  # the second one finds the group there: nobody is asked to join
            with provider.get_tracer("training").start_as_current_span("step") as step:
                report = publisher.push_adapter(peft_of(Model(), number), "math").report
            spans = [s for s in _wait_for_pushes(collector, number) if s not in seen]
            seen += spans
            root = _of(spans, "weft.push")
            assert root.parent_id == step.get_span_context().span_id.to_bytes(8, "big")
            assert root.trace_id == step.get_span_context().trace_id.to_bytes(16, "big")
            _check_whole([span for span in spans if span.name != "step"])
            assert root.attributes == {
                "weft.policy": "math",
                "weft.kind": "adapter",
                "weft.backend": "one-sided",
                "weft.bytes": report.total_bytes,
                "weft.version": number,
                "weft.transfer_id": _of(spans, "weft.transfer").attributes["weft.transfer_id"],
                "weft.replicas": 2,
            }
            for name in ("weft.receive", "weft.switch"):
                of_name = [span for span in spans if span.name == name]
                assert {span.instance for span in of_name} == {"replica-0", "replica-1"}
                for span in of_name:
                    assert span.attributes["weft.version"] == number
            received = next(span for span in spans if span.name == "weft.receive")
            assert received.attributes["weft.bytes"] == report.total_bytes
            assert received.attributes["weft.verify_seconds"] > 0
    for span in seen:
        assert not [key for key in span.attributes for name in _SECRET_NAMES if name in key]


def test_a_push_beside_the_training_is_a_part_of_the_step_that_asked(
    traced_pool, collector, provider
):
    pool = traced_pool(collector.endpoint).pool
    with _publisher(pool) as publisher:
        with provider.get_tracer("training").start_as_current_span("step") as step:
            pushed = publisher.push_base_async(Model(seed=3))
        assert str(pushed.result(20).version) == "base@1"
    spans = [span for span in _wait_for_pushes(collector, 1) if span.name != "step"]
    _check_whole(spans)
    root = _of(spans, "weft.push")
    assert root.parent_id == step.get_span_context().span_id.to_bytes(8, "big")
    assert root.attributes["weft.kind"] == "base"


def test_a_push_that_fails_says_why_in_its_spans(traced_pool, collector, provider):
    traced = traced_pool(collector.endpoint)
    with _publisher(traced.pool) as publisher:
        with pytest.raises(WeftError) as refused:
            publisher.push_adapter(peft_of(Model(), 1, r=32), "math")
        root = _of(collector.wait(1, "weft.push"), "weft.push")
        assert (root.failed, root.attributes["error.type"]) == (True, refused.value.reason)
        assert root.message == str(refused.value)

        for engine in traced.engines:
            engine.fail_next_load = LoadFailedError("no room for it")
        with pytest.raises(WeftError) as failed:
            publisher.push_adapter(peft_of(Model(), 1), "math")
        collector.wait(2, "weft.switch")
        spans = _last_trace(collector)
    reason = failed.value.reason
    for name in ("weft.push", "weft.push.await", "weft.transfer", "weft.transfer.committing"):
        span = _of(spans, name)
        assert (span.failed, span.attributes["error.type"]) == (True, reason), span
    switches = [span for span in spans if span.name == "weft.switch"]
    assert [span.attributes["error.type"] for span in switches] == ["LOAD_FAILED"] * 2
    assert len({span.trace_id for span in spans}) == 1


def test_a_receiver_that_refuses_bytes_says_why_in_its_span(
    traced_pool, collector, provider, monkeypatch
):
    def refuse(self: ReceiveRing, index: int, nonce: int, *_: object) -> None:
        raise DigestMismatchError(f"bucket {index} is not what was sent")

    with _publisher(traced_pool(collector.endpoint).pool) as publisher:
        publisher.push_adapter(peft_of(Model(), 1), "math")
        monkeypatch.setattr(ReceiveRing, "accept", refuse)
        with pytest.raises(WeftError):
            publisher.push_adapter(peft_of(Model(), 2), "math")
        collector.wait(4, "weft.receive")
        spans = _last_trace(collector)
    received = [span for span in spans if span.name == "weft.receive"]
    assert "DIGEST_MISMATCH" in {span.attributes["error.type"] for span in received}
    for name in ("weft.push", "weft.push.send", "weft.transfer", "weft.transfer.staging"):
        # It is sent again in another group, as replicas that fail by themselves may be left out.
        assert [span for span in spans if span.name == name][-1].failed, name


def test_what_no_trainer_began_is_a_trace_of_its_own(traced_pool, collector):
    traced = traced_pool(collector.endpoint)
    with _publisher(traced.pool) as publisher:  # which does not trace
        publisher.push_adapter(peft_of(Model(), 1), "math")
        transfer = _of(collector.wait(1, "weft.transfer"), "weft.transfer")
        assert transfer.parent_id == b""
        traced.add_replica("late")
        spans = collector.wait(2, "weft.transfer")
    clone = next(s for s in spans if s.name == "weft.transfer" and s != transfer)
    assert clone.attributes["weft.purpose"] == "clone"
    assert clone.attributes["weft.replica"] == "late"
    assert clone.parent_id == b""
    assert clone.trace_id != transfer.trace_id
    collector.wait(3, "weft.switch")
    of_clone = {s.name: s.instance for s in collector.spans() if s.trace_id == clone.trace_id}
    assert of_clone["weft.receive"] == of_clone["weft.switch"] == "late"


def test_nobody_traces_who_was_not_told_to(tmp_path, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", EngineDouble(weights(Model())))
        with _publisher(pool) as publisher:
            publisher.push_adapter(peft_of(Model(), 1), "math")
        stays(lambda: not collector.was_called.is_set(), 0.2)


@pytest.mark.parametrize("is_down", [True, False], ids=["down", "hangs"])
def test_a_collector_that_does_not_answer_is_no_matter_of_a_pushs(
    traced_pool, is_down, caplog, collector, provider
):
    caplog.set_level(logging.INFO)
    with Collector(hangs=True) as hanging:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # and never listens
            down = f"http://127.0.0.1:{bound.getsockname()[1]}"
            traced = traced_pool(down if is_down else hanging.endpoint)
            with _publisher(traced.pool) as publisher:
                publisher.push_adapter(peft_of(Model(), 1), "math")
                if not is_down:
                    assert hanging.was_called.wait(10)
                began = time.monotonic()
                for number in range(2, 12):
                    publisher.push_adapter(peft_of(Model(), number), "math")
                assert time.monotonic() - began < 5
        began = time.monotonic()
        traced.pool.stop_coordinator()
        traced.close()
        assert time.monotonic() - began < 3 * 2
    said = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert said == []
    told = [r for r in caplog.records if "spans cannot be exported" in r.getMessage()]
    assert len(told) <= 3  # of the coordinator and two replicas, once each
