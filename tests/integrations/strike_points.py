"""Where replicas of ``struck.py`` are killed; for environments without what that one needs."""

from __future__ import annotations

from pathlib import Path

from tests.fault.strikes import Strike

_STRUCK_SECONDS = 5.0


def in_generation(work: Path) -> Strike:
    """Return the strike at the first answer of one replica of the pool in ``work``."""
    return Strike("vllm replica", "in a generation", "SIGKILL", str(work / "in-generation"))


def in_push(work: Path) -> Strike:
    """Return the strike at another replica, once the first bucket of a push has come."""
    return Strike("coordinator", "at the first bucket", "SIGKILL", str(work / "in-push"))


def check_struck(*strikes: Strike) -> None:
    """Fail unless all have struck."""
    for strike in strikes:
        strike.await_struck(_STRUCK_SECONDS)
