"""Results of all architectures, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.architectures.run import STEPS, is_fine
from tests.architectures.specs import ARCHITECTURES

_RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_BEGIN, _END = "<!-- made by make models -->", "<!-- end -->"

Results = dict[str, dict[str, str]]


def load() -> Results:
    """Return the stored results, by architecture."""
    return json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}


def save(results: Results) -> None:
    """Store the results."""
    order = [a.name for a in ARCHITECTURES if a.name in results]
    _RESULTS.write_text(json.dumps({name: results[name] for name in order}, indent=1) + "\n")


def render(results: Results) -> str:
    """Return the page's table: a row for the architectures of one bound that took the same steps.

    A step is shown by its largest difference; a result that is not fine has a row of its own.
    """
    release = ", ".join(sorted({found["vllm"] for found in results.values()}))
    rows: dict[tuple[object, ...], tuple[list[str], list[list[str]]]] = {}
    for architecture in ARCHITECTURES:
        found = results.get(architecture.name)
        if found is not None:
            cells = [_cell(found.get(step, ""), architecture.bound) for step in STEPS]
            test = f"[¹](../tests/e2e/{architecture.test[0]})" if architecture.test else ""
            group = (architecture.bound, *(cell if cell[0] in "-*" else "" for cell in cells))
            names, taken = rows.setdefault(group, ([], []))
            names.append(f"{architecture.name}{test}")
            taken.append(cells)
    heads = ("architectures", *STEPS)
    lines = [f"vLLM {release}.", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for names, taken in rows.values():
        worst = [max(step, key=_size) for step in zip(*taken, strict=True)]
        lines.append(f"| {' | '.join((', '.join(names), *worst))} |")
    return "\n".join(lines)


def _size(cell: str) -> float:
    return float(cell) if cell[0].isdigit() else 0.0


def _cell(result: str, bound: float) -> str:
    if not result:
        return "-"
    if is_fine(result, bound):
        return result
    return f"**{result.splitlines()[0][:300]}**".replace("|", "/")


def page(text: str, results: Results) -> str:
    """Return the page with its table made anew."""
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    return f"{before}{_BEGIN}\n\n{render(results)}\n\n{_END}{after}"


def write_page(results: Results) -> None:
    """Make the table of the page anew."""
    PAGE.write_text(page(PAGE.read_text(), results))
