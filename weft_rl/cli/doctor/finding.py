"""Findings of ``weft doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    check: str
    """Stable name, for programs."""
    level: Level
    says: str
    advice: str = ""
    """Remedy; empty where all is well."""


def ok(check: str, says: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(check, Level.OK, says)


def warn(check: str, says: str, advice: str) -> Finding:
    """Return the finding of something that works but needs attention."""
    return Finding(check, Level.WARN, says, advice)


def fail(check: str, says: str, advice: str) -> Finding:
    """Return the finding of something that does not work."""
    return Finding(check, Level.FAIL, says, advice)
