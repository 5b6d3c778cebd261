"""Writes the tables of values into the chart's README, from the comments of values.yaml.

    python helm/values_table.py

A comment that begins with ``# --`` describes the key below it; its further lines follow on. A
key without one is a heading of others.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "weft"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_KEY = re.compile(r"^( *)([A-Za-z][\w/.-]*):")


@dataclass(frozen=True)
class Value:
    """One key of values.yaml that has a meaning of its own."""

    path: str
    default: Any
    meaning: str

    @property
    def group(self) -> str:
        """The key at the top that has it; empty for one that is there itself."""
        return self.path.partition(".")[0] if "." in self.path else ""


def described(text: str) -> Iterator[Value]:
    """The values of a values.yaml that have a comment, in its order."""
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            comment = [stripped.removeprefix("# --").strip()]
        elif stripped.startswith("#"):
            if comment:
                comment.append(stripped.removeprefix("#").strip())
        elif match := _KEY.match(line):
            indent = len(match[1])
            path = [(i, key) for i, key in path if i < indent] + [(indent, match[2])]
            if comment:
                keys = [key for _, key in path]
                yield Value(".".join(keys), _at(values, keys), " ".join(comment))
            comment = []
        else:
            comment = []


def _at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def table(text: str) -> str:
    """The tables in Markdown: one of the values at the top, and one of each group."""
    lines: list[str] = []
    for group, values in itertools.groupby(described(text), lambda value: value.group):
        lines += ["", f"## {group}", ""] if group else []
        lines += ["| value | default | what it is |", "|---|---|---|"]
        for value in values:
            cells = (f"`{value.path}`", f"`{json.dumps(value.default)}`", value.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def with_table(readme: str, text: str) -> str:
    """The README with the table of today's values between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(text)}\n{END}{after}"


def main() -> None:
    readme = CHART / "README.md"
    readme.write_text(with_table(readme.read_text(), (CHART / "values.yaml").read_text()))


if __name__ == "__main__":
    main()
