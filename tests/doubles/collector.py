"""A collector of traces: takes what OTLP exporters send, and keeps it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Seen:
    """A span that has come."""

    service: str
    instance: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    message: str


class Collector(pb_grpc.TraceServiceServicer):
    """Listens on loopback as long as it is used as a context.

    Args:
        hangs: Whether it never answers.
    """

    def __init__(self, *, hangs: bool = False) -> None:
        self._hangs = hangs
        self._spans: list[Seen] = []
        self._changed = threading.Condition()
        self._ends = threading.Event()
        #: Set by the first call.
        self.was_called = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._server.stop(None).wait(_WAIT_SECONDS)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.was_called.set()
        if self._hangs:
            self._ends.wait(60)
        with self._changed:
            for of_resource in request.resource_spans:
                resource = _plain(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self._spans += [_seen(resource, span) for span in of_scope.spans]
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def spans(self) -> list[Seen]:
        """What has come so far, in the order of their ends."""
        with self._changed:
            return sorted(self._spans, key=lambda span: span.end_ns)

    def wait(self, number: int, name: str = "") -> list[Seen]:
        """Wait until so many spans (of that name) have come; all of them, as ``spans``."""
        until = time.monotonic() + _WAIT_SECONDS
        with self._changed:
            while sum(not name or span.name == name for span in self._spans) < number:
                assert self._changed.wait(until - time.monotonic()), [s.name for s in self._spans]
        return self.spans()


def _seen(resource: dict[str, Any], span: Span) -> Seen:
    return Seen(
        service=resource["service.name"],
        instance=resource.get("service.instance.id", ""),
        name=span.name,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        message=span.status.message,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
