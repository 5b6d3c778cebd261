"""Sections of a README that a run writes itself, between marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def section(readme: Path, name: str) -> str:
    """What lies between a section's marks; empty if it has none yet."""
    found = re.search(_pattern(name), readme.read_text(), re.DOTALL)
    return found.group(1).strip() if found else ""


def replace_section(readme: Path, name: str, body: str) -> None:
    """Put ``body`` between the marks of ``name``, which are added at the end if they lack."""
    text = readme.read_text()
    made = f"<!-- {name} -->\n\n{body.strip()}\n\n<!-- end of {name} -->"
    if re.search(_pattern(name), text, re.DOTALL):
        text = re.sub(_pattern(name), lambda _: made, text, count=1, flags=re.DOTALL)
    else:
        text = f"{text.rstrip()}\n\n{made}\n"
    readme.write_text(text)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def replace_rows(
    readme: Path,
    name: str,
    head: Sequence[str],
    keys: Sequence[tuple[str, ...]],
    rows: Mapping[tuple[str, ...], Sequence[str]],
    *,
    facts: str,
) -> None:
    """Write a section's table anew, with the old rows where ``rows`` has none.

    Args:
        keys: First cells of every row that there may be, in order.
        rows: The other cells, by those.
        facts: Of the machine, shown above; of this run, which may have been of some
            rows only.
    """
    known = {}
    for line in section(readme, name).splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        known[cells[: len(keys[0])]] = cells[len(keys[0]) :]
    known |= {key: tuple(cells) for key, cells in rows.items()}
    lines = [(*key, *known[key]) for key in keys if key in known]
    shown = "  \n".join(facts.splitlines())
    replace_section(readme, name, f"{shown}\n\n{table(head, lines)}")


def _pattern(name: str) -> str:
    return rf"<!-- {re.escape(name)} -->(.*?)<!-- end of {re.escape(name)} -->"
