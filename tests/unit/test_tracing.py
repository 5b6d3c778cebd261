"""Spans of who traces, and nothing of who does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weft_rl import tracing
from weft_rl.contract.errors import NotReadyError
from weft_rl.tracing import ProviderTracer, call_metadata, parent_in

_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


def _hex(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def test_a_trainer_without_opentelemetry_never_imports_it() -> None:
    code = (
        "import sys, trainer_side\n"
        "from weft_rl import tracing\n"
        "with tracing.of_process().span('weft.push', policy='math') as span:\n"
        "    span.set(version=1)\n"
        "    assert span.traceparent == tracing.of_process().current() == ''\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_trainers_own_provider_is_used(
    provider: TracerProvider, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    tracer = tracing.of_process()
    with tracer.span("outer", policy="math", version=3) as outer:
        assert tracer.current() == outer.traceparent
        with tracer.span("inner"):
            assert tracer.current() != outer.traceparent
        assert tracer.current() == outer.traceparent
    assert tracer.current() == ""
    inner, outer_seen = exporter.get_finished_spans()
    assert inner.parent is not None
    assert (inner.parent.span_id, inner.name) == (outer_seen.context.span_id, "inner")
    assert dict(outer_seen.attributes or {}) == {"weft.policy": "math", "weft.version": 3}
    assert outer.traceparent.startswith(f"00-{'-'.join(_hex(outer_seen))}-")


def test_a_parent_is_elsewhere_or_nowhere(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    tracer = ProviderTracer(provider)
    for parent in (_PARENT, "00-zz-01", "", _PARENT.replace("-01", "-00")):
        tracer.start("span", parent=parent, began_ns=5).end()
    told, *roots = exporter.get_finished_spans()  # what a parent does not sample is not kept
    assert _hex(told)[0] == _PARENT.split("-")[1]
    assert told.start_time == 5
    assert [root.parent for root in roots] == [None, None]


def test_what_failed_says_why(provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
    tracer = ProviderTracer(provider)
    with pytest.raises(NotReadyError), tracer.span("typed"):
        raise NotReadyError("x" * 5_000, reason="NOT_STAGED")
    with pytest.raises(KeyboardInterrupt), tracer.span("interrupted"):
        raise KeyboardInterrupt
    typed, interrupted = exporter.get_finished_spans()
    assert dict(typed.attributes or {}) == {"error.type": "NOT_STAGED"}
    assert not typed.status.is_ok
    assert len(typed.status.description or "") == 2_000
    assert dict(interrupted.attributes or {}) == {"error.type": "KeyboardInterrupt"}
    assert not typed.events


def test_a_span_processor_that_fails_fails_nothing_else(provider: TracerProvider) -> None:
    class Broken(SpanProcessor):
        begins = False

        def on_start(self, *_: object, **__: object) -> None:
            if not self.begins:
                raise RuntimeError("broken")

        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError("broken")

    broken = Broken()
    provider.add_span_processor(broken)
    tracer = ProviderTracer(provider)
    for broken.begins in (False, True):
        with tracer.span("span") as span:
            span.set(policy="math")
        span.end()


@pytest.mark.parametrize(
    ("metadata", "parent"),
    [
        ([("a", "b"), ("traceparent", _PARENT)], _PARENT),
        ([("traceparent", "x" * 129)], ""),
        ([("traceparent", b"bytes")], ""),
        ([], ""),
        (None, ""),
    ],
)
def test_the_parent_that_a_call_names(
    metadata: list[tuple[str, str | bytes]] | None, parent: str
) -> None:
    assert parent_in(metadata) == parent
    assert parent_in(call_metadata(parent)) == parent
