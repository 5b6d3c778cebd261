"""Metrics that every server process has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

from weft_rl import __version__
from weft_rl.contract.errors import REASONS
from weft_rl.rpc.security.unused_files import UNUSED_FILES

#: Of refusals with a reason that another version of Weft may have.
_OTHER: Final = "OTHER"


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
