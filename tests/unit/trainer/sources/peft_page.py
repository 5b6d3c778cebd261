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
_PATH = re.compile(r"^(base_model\.model\.[\w.]+:? |[\w.]+\.\w+: )")
_SETTING = re.compile(r"^\w+=(\{.*\}|\[.*\]|'[^']*'|\w+): ")
_LONGEST = 90


def page(text: str, found: Mapping[str, Mapping[str, Verdict]]) -> str:
    """The page with the tables of these verdicts, by section."""
    head = text.partition(_MARK)[0]
    parts = [f"{head}{_MARK}\n\nPEFT {peft.__version__}."]
    parts += ["## Methods", *_methods(found["methods"])]
    for title, section in (
        ("Settings of LoraConfig", "settings"),
        ("What a live model holds", "states"),
    ):
        parts += [f"## {title}", _table(found[section])]
    return "\n\n".join(parts) + "\n"


def version(text: str) -> str:
    """The version of PEFT that a page is of."""
    match = re.search(r"^PEFT ([\w.]+)\.$", text, re.MULTILINE)
    assert match is not None
    return match[1]


def _methods(found: Mapping[str, Verdict]) -> list[str]:
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name, each in found.items():
        key = each.adapter == "equal", each.merged == "equal"
        groups.setdefault(key, []).append(name)
    rows = [
        f"| {', '.join(names)} | {_cell(adapter)} | {_cell(merged)} |"
        for (adapter, merged), names in groups.items()
    ]
    return ["\n".join(["| method | `push_adapter` | `push_merged` |", "|---|---|---|", *rows])]


def _cell(is_equal: bool) -> str:
    return "equal" if is_equal else "refused, by its name"


def _table(found: Mapping[str, Verdict]) -> str:
    lines = ["| on | `push_adapter` | `push_merged` |", "|---|---|---|"]
    for name, each in found.items():
        shown = name.replace("|", "\\|")
        shown = f"`{shown}`" if "=" in name else shown
        lines.append(f"| {shown} | {short(each.adapter)} | {short(each.merged)} |")
    return "\n".join(lines)


def short(said: str) -> str:
    """A verdict in a few words."""
    reason, _, why = said.partition(": ")
    if reason not in ("INVALID_ADAPTER", "UNSUPPORTED"):
        return said
    why = _PATH.sub("", _SETTING.sub("", why))
    why = re.split(r"[:;] ", why)[0].replace("|", "\\|")
    return f"refused: {why if len(why) <= _LONGEST else why[:_LONGEST].rpartition(' ')[0] + ' ...'}"


def verdicts(cases: Iterable[Case]) -> dict[str, Verdict]:
    """What three pushes make of each case."""
    return {case.name: verdict(case) for case in cases}


if __name__ == "__main__":
    found = {"methods": methods(), "settings": settings(), "states": states()}
    text = page(PAGE.read_text(), {name: verdicts(cases) for name, cases in found.items()})
    PAGE.write_text(text)
    sys.stdout.write(text)
