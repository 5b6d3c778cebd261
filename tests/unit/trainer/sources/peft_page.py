"""Tables of ``docs/peft.md``; ``python -m tests.unit.trainer.sources.peft_page`` writes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import peft

from tests.unit.trainer.sources.peft_cases import Case, Verdict, methods, settings, states, verdict

PAGE = Path(__file__).parents[4] / "docs" / "peft.md"
_MARK = "<!-- written by `python -m tests.unit.trainer.sources.peft_page` -->"


def page(text: str, found: Mapping[str, Mapping[str, Verdict]]) -> str:
    """The page with the tables of these verdicts, by section."""
    head = text.partition(_MARK)[0]
    parts = [f"{head}{_MARK}\n\nPEFT {peft.__version__}."]
    parts += ["## Methods", _table("method", found["methods"])]
    for title, section in (
        ("Settings of LoraConfig", "settings"),
        ("What a live model holds", "states"),
    ):
        parts += [f"## {title}", _table("on", found[section])]
    return "\n\n".join(parts) + "\n"


def version(text: str) -> str:
    """The version of PEFT that a page is of."""
    match = re.search(r"^PEFT ([\w.]+)\.$", text, re.MULTILINE)
    assert match is not None
    return match[1]


def _table(head: str, found: Mapping[str, Verdict]) -> str:
    """Return a table with one row for all names of one kind of verdict."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, each in found.items():
        shown = name.replace("|", "\\|")
        shown = f"`{shown}`" if "=" in name else shown
        groups.setdefault((_kind(each.adapter), _kind(each.merged)), []).append(shown)
    rows = [f"| {'; '.join(names)} | {' | '.join(said)} |" for said, names in groups.items()]
    return "\n".join([f"| {head} | `push_adapter` | `push_merged` |", "|---|---|---|", *rows])


def _kind(said: str) -> str:
    return "refused" if said.startswith(("INVALID_ADAPTER", "UNSUPPORTED")) else said


def verdicts(cases: Iterable[Case]) -> dict[str, Verdict]:
    """What three pushes make of each case."""
    return {case.name: verdict(case) for case in cases}


if __name__ == "__main__":
    found = {"methods": methods(), "settings": settings(), "states": states()}
    text = page(PAGE.read_text(), {name: verdicts(cases) for name, cases in found.items()})
    PAGE.write_text(text)
    sys.stdout.write(text)
