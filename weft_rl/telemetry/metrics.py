"""Metrics that every server process has, and the text that shows a registry's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from weft_rl import __version__
from weft_rl.contract.errors import REASONS
from weft_rl.rpc.security.credentials import UNUSED_FILES

#: Of refusals with a reason that another version of Weft may have.
_OTHER: Final = "OTHER"
#: Scrapes within so long of each other get the same text.
SAME_TEXT_SECONDS: Final = 0.25
#: The formats that it is kept in: a scraper may make up others.
_MAX_FORMATS: Final = 8


def process_registry() -> CollectorRegistry:
    """Return a registry that says which build runs, and what it uses of the machine."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Gauge("weft_build_info", "The version of Weft.", ["version"], registry=registry)
    build.labels(__version__).set(1)
    unused = Gauge(
        "weft_unused_files",
        "Files of access rules, certificates and tokens that changed and are not used.",
        registry=registry,
    )
    unused.set_function(lambda: len(UNUSED_FILES.list()))
    return registry


def refusal_counter(registry: CollectorRegistry) -> Callable[[str], None]:
    """Return a function that counts calls answered with an error, by reason."""
    counter = Counter(
        "weft_refusals", "Calls answered with an error, by reason.", ["reason"], registry=registry
    )

    def count(reason: str) -> None:
        counter.labels(reason if reason in REASONS else _OTHER).inc()

    return count


class MetricsText:
    """Text of what a registry says, made at most once in ``SAME_TEXT_SECONDS``.

    So many scrapes at once cost as much as one.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._made: dict[Any, tuple[float, bytes]] = {}

    def __call__(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        now = self._clock()
        made_at, body = self._made.get(content_type, (float("-inf"), b""))
        if now - made_at >= SAME_TEXT_SECONDS:
            body = encode(self._registry)
            if len(self._made) >= _MAX_FORMATS:
                self._made.clear()
            self._made[content_type] = (now, body)
        return Response(body, headers={"Content-Type": content_type})
