"""Sections of the changelog."""

from __future__ import annotations

import re
from typing import Final

_HEADING: Final = re.compile(r"^## (?P<version>\S+) \((?P<date>[^)]+)\)$", re.MULTILINE)
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")


class ReleaseError(Exception):
    """Reason why nothing is released, and what to do."""


def section(changelog: str, version: str) -> str:
    """Return the text below the heading of a version, ``## 0.2.0 (2026-12-01)``.

    Raises:
        ReleaseError: There is none, it has no date, or it is empty.
    """
    headings = [*_HEADING.finditer(changelog)]
    for number, heading in enumerate(headings):
        if heading["version"] != version:
            continue
        if not _DATE.fullmatch(heading["date"]):
            raise ReleaseError(
                f"CHANGELOG.md has no date for {version} but ({heading['date']}): write the day of "
                "the release there, before the tag"
            )
        end = headings[number + 1].start() if number + 1 < len(headings) else len(changelog)
        if text := changelog[heading.end() : end].strip():
            return text + "\n"
        raise ReleaseError(f"CHANGELOG.md says nothing of {version}")
    raise ReleaseError(f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'")
