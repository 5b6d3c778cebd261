"""Findings: the lines of what the doctor says."""

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
    """Subject of a check, and its result."""

    check: str
    """Stable name, for programs."""
    level: Level
    says: str
    advice: str = ""
    """Remedy; empty where all is well."""


def ok(check: str, says: str) -> Finding:
    """Return a finding about which there is nothing to do."""
    return Finding(check, Level.OK, says)


def warn(check: str, says: str, advice: str) -> Finding:
    """Return a finding of something that works, and should be looked at."""
    return Finding(check, Level.WARN, says, advice)


def fail(check: str, says: str, advice: str) -> Finding:
    """Return a finding because of which something does not work."""
    return Finding(check, Level.FAIL, says, advice)
