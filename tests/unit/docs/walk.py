"""The stops of the walk in CONTRIBUTING.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.unit.docs.pages import ROOT

_STOP = re.compile(r"^(\d+)\. `([\w/]+\.py):([\w.]+)` ((?:.+\n)(?:    .+\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Stop:
    """Where a byte comes by."""

    number: int
    file: str
    function: str
    """Its qualified name."""
    sentence: str


def stops() -> list[Stop]:
    """All of them, in order."""
    found = _STOP.findall((ROOT / "CONTRIBUTING.md").read_text())
    return [
        Stop(int(number), file, function, " ".join(sentence.split()))
        for number, file, function, sentence in found
    ]
