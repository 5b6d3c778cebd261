"""The expressions of the Grafana dashboard, as Grafana would send them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).parents[2] / "helm/weft/dashboards/weft.json"
#: What Grafana puts in the place of each variable when all jobs are chosen. The interval spans
#: two pushes of the demo's base, of which there is one every half minute.
_VARIABLES: Final = {"$__rate_interval": "90s", "$job": ".*", "$namespace": ".*", "$release": ".*"}


@dataclass(frozen=True)
class Panel:
    """One expression of a panel."""

    title: str
    expression: str
    shown: frozenset[str]
    """The labels that its legend names."""


def panels() -> Iterator[Panel]:
    """Every expression of every panel."""
    for panel in json.loads(_FILE.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in _VARIABLES.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, f"{panel['title']}: {expression}"
            labels = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
            yield Panel(panel["title"], expression, frozenset(labels))
