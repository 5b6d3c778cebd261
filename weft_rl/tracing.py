"""OpenTelemetry spans where tracing is on; elsewhere nothing, not even an import.

A server that was told to trace has a tracer of its own (``weft_rl.telemetry.traces``). A
trainer has what it has set up by itself, and its pushes are children of its current span.
A context travels between processes as one line, W3C's ``traceparent``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from weft_rl import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenTelemetrySpan
    from opentelemetry.trace import TracerProvider

_log = logging.getLogger(__name__)

_API: Final = "opentelemetry.trace"
_HEADER: Final = "traceparent"
#: Of a traceparent; version 00 has 55.
MAX_TRACEPARENT_CHARS: Final = 128
#: Of an error's message that a span keeps.
_MAX_MESSAGE_CHARS: Final = 2_000

Value = str | int | float | bool


class Span:
    """Span of one process's work; this one is nobody's, and keeps nothing."""

    @property
    def traceparent(self) -> str:
        """Traceparent that its children are made with; empty where nobody traces."""
        return ""

    def set(self, **values: Value) -> None:
        """Add attributes, ``policy=...`` as ``weft.policy``."""

    def fail(self, error: BaseException) -> None:
        """Give the span the status ERROR, with the error's message, and its reason as
        ``error.type``."""
        self.set_failed(str(getattr(error, "reason", type(error).__name__)), str(error))

    def set_failed(self, reason: str, message: str) -> None:
        """Give the span the status ERROR as ``fail`` does, for an error that is not at hand."""

    def end(self) -> None:
        """End the span now; a second call is ignored."""


class Tracer:
    """Maker of spans; this one begins none. Thread-safe."""

    def start(
        self, name: str, *, parent: str = "", began_ns: int | None = None, **values: Value
    ) -> Span:
        """Begin a span that the caller ends.

        Args:
            parent: A traceparent; without one, or if it is malformed, the parent is the
                thread's current span, if there is one.
            began_ns: When it has begun, ``time.time_ns()``; now, if it is not said.
            values: Attributes, as of ``Span.set``.
        """
        return NO_SPAN

    @contextlib.contextmanager
    def span(self, name: str, *, parent: str = "", **values: Value) -> Iterator[Span]:
        """Make a span the thread's (or task's) current one inside the ``with``; what is raised
        there is its error. Arguments are those of ``start``."""
        yield NO_SPAN

    def current(self) -> str:
        """Return the traceparent of the thread's current span; empty if there is none."""
        return ""

    def close(self) -> None:
        """Export the spans that have ended; blocks at most 2 s."""


NO_SPAN: Final = Span()
NO_TRACER: Final = Tracer()


def of_process() -> Tracer:
    """Return the tracer over the provider that this process has set up by itself.

    Whoever has set a tracer provider up has imported OpenTelemetry; so we need not.
    """
    if _API not in sys.modules:
        return NO_TRACER
    from opentelemetry import trace

    return ProviderTracer(trace.get_tracer_provider())


def untraced(transfer_id: str) -> str:
    """Return the traceparent of a transfer where nobody traces: an empty one."""
    return ""


def call_metadata(traceparent: str) -> tuple[tuple[str, str], ...] | None:
    """Return metadata for a gRPC call, so that its receiver's spans are children of ours."""
    return ((_HEADER, traceparent),) if traceparent else None


def parent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the traceparent in a call's metadata; empty if it has none that could be one."""
    for key, value in metadata or ():
        if key == _HEADER and isinstance(value, str) and len(value) <= MAX_TRACEPARENT_CHARS:
            return value
    return ""


class ProviderTracer(Tracer):
    """Tracer that begins spans at an OpenTelemetry provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("weft", __version__)

    def start(
        self, name: str, *, parent: str = "", began_ns: int | None = None, **values: Value
    ) -> Span:
        try:
            context = _propagator().extract({_HEADER: parent}) if parent else None
            return _ProviderSpan(
                self._tracer.start_span(
                    name, context, attributes=_attributes(values), start_time=began_ns
                )
            )
        except Exception:  # noqa: BLE001 (a span processor is anybody's: no push fails for it)
            _log.exception("a span could not be begun")
            return NO_SPAN

    @contextlib.contextmanager
    def span(self, name: str, *, parent: str = "", **values: Value) -> Iterator[Span]:
        span = self.start(name, parent=parent, began_ns=None, **values)
        with _as_current(span):
            try:
                yield span
            except BaseException as error:
                span.fail(error)
                raise
            finally:
                span.end()

    def current(self) -> str:
        return _traceparent()


class _ProviderSpan(Span):
    def __init__(self, span: OpenTelemetrySpan) -> None:
        self.inner = span

    @property
    def traceparent(self) -> str:
        from opentelemetry.trace import set_span_in_context

        return _traceparent(set_span_in_context(self.inner))

    def set(self, **values: Value) -> None:
        self.inner.set_attributes(_attributes(values))

    def set_failed(self, reason: str, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.inner.set_attribute("error.type", reason)
        self.inner.set_status(Status(StatusCode.ERROR, message[:_MAX_MESSAGE_CHARS]))

    def end(self) -> None:
        if not self.inner.is_recording():
            return
        try:
            self.inner.end()
        except Exception:  # noqa: BLE001 (as in ``ProviderTracer.start``)
            _log.exception("a span could not be ended")


def _as_current(span: Span) -> contextlib.AbstractContextManager[object]:
    if not isinstance(span, _ProviderSpan):
        return contextlib.nullcontext()
    from opentelemetry.trace import use_span

    return use_span(span.inner, record_exception=False, set_status_on_exception=False)


def _attributes(values: Mapping[str, Value]) -> dict[str, Value]:
    return {f"weft.{name}": value for name, value in values.items()}


def _propagator() -> Any:
    # Not the process's own choice: that may send baggage along, which is not ours to send.
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _traceparent(context: Any = None) -> str:
    carrier: dict[str, str] = {}
    _propagator().inject(carrier, context)
    return carrier.get(_HEADER, "")
