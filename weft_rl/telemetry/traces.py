"""Tracer of a server process: spans leave by OTLP, on a thread of their own.

OpenTelemetry's environment variables say where to, how often, and how many spans may wait. Its
provider is ours alone: vLLM has one of its own in the same process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from weft_rl.contract.errors import UnsupportedError
from weft_rl.distribution import distribution_with
from weft_rl.tracing import ProviderTracer, Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_log = logging.getLogger(__name__)

#: What what has not been exported at the end of a process may take.
_FLUSH_SECONDS: Final = 1.5
_EXPORTERS_LOGGER: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"


def open_tracer(service: str, instance: str = "") -> Tracer:
    """Open a tracer whose spans are exported; the caller closes it.

    Call it in the process that uses it, and not before a fork: gRPC does not survive one.

    Args:
        service: ``service.name`` of its spans, unless the environment says another.
        instance: ``service.instance.id``, if there are several.

    Raises:
        UnsupportedError: A package of the extra ``tracing`` is not installed.
    """
    try:
        return _ExportingTracer(service, instance)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"--traces needs {error.name}, which is not installed: "
            f"pip install {distribution_with('tracing')}"
        ) from None


class _ExportingTracer(ProviderTracer):
    def __init__(self, service: str, instance: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = _QuietExporter(OTLPSpanExporter())
        # Its queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2,048): what finds no room is dropped.
        self._processor = BatchSpanProcessor(cast("SpanExporter", self._exporter))
        provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        super().__init__(provider)

    def close(self) -> None:
        # An export under way may take as long as the collector lets it.
        thread = threading.Thread(target=self._processor.shutdown, name="weft-flush", daemon=True)
        thread.start()
        thread.join(_FLUSH_SECONDS)
        if thread.is_alive():
            _log.info("the last spans could not be exported in %.1f s", _FLUSH_SECONDS)
            self._exporter.shutdown()


def _resource(service: str, instance: str) -> Resource:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = {"service.name": service, **({"service.instance.id": instance} if instance else {})}
    environment = OTELResourceDetector().detect().attributes
    return Resource.create({**ours, **environment})


class _QuietExporter:
    """Exporter that logs the first failed export and the first that works again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        #: Tries that have failed since one succeeded.
        self.num_failed = 0
        self._thread = 0
        self._is_ended = threading.Lock()
        logging.getLogger(_EXPORTERS_LOGGER).addFilter(self._is_of_others)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; on the processor's own thread."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._thread = threading.get_ident()
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self.num_failed:
                _log.info("spans are exported again")
            self.num_failed = 0
        else:
            if not self.num_failed:
                _log.warning(
                    "spans cannot be exported, and are dropped until the collector answers"
                )
            self.num_failed += 1
        return result

    def shutdown(self) -> None:
        """End the exporter, and an export under way; a second call is ignored."""
        if not self._is_ended.acquire(blocking=False):
            return
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: nothing waits in this exporter."""
        return True

    def _is_of_others(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread
