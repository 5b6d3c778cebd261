"""One line of what the doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what was found."""

    check: str
    """Stable name, for programs."""
    level: Level
    says: str
    advice: str = ""
    """What to do about it; empty where all is well."""


def ok(check: str, says: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.OK, says)


def warn(check: str, says: str, advice: str) -> Finding:
    """It works, and should be looked at."""
    return Finding(check, Level.WARN, says, advice)


def fail(check: str, says: str, advice: str) -> Finding:
    """Something does not work because of it."""
    return Finding(check, Level.FAIL, says, advice)
