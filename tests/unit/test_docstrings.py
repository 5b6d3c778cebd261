"""Docstrings of the packages begin with a word that needs nothing before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("weft_rl", "trainer_side", "rollout_side")
_GENERATED = _ROOT / "weft_rl" / "v1"
_FORBIDDEN = {
    *("Of", "As", "What", "Whether", "Those", "Whose", "To"),
    *("Who", "Why", "How", "Where", "Which", "When"),
}


def _begun_badly(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings of a module, of its classes, functions and fields, by line."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    first = re.split(r"\W", text.strip(), maxsplit=1)[0]
                    if first in _FORBIDDEN:
                        yield statement.lineno, text.strip().splitlines()[0]


def test_no_docstring_begins_with_a_word_that_needs_another_before_it() -> None:
    found = [
        f"{path.relative_to(_ROOT)}:{line}: {text}"
        for package in _PACKAGES
        for path in sorted((_ROOT / package).rglob("*.py"))
        if _GENERATED not in path.parents
        for line, text in _begun_badly(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_what_is_begun_badly_is_found_in_each_place() -> None:
    source = '''"""{0} a module has."""
class A:
    """{0} a class has."""
    x: int
    """{0} a field is."""
    def f(self):
        """Return {0}."""
'''.format("What")  # fmt: skip
    assert [line for line, _ in _begun_badly(source)] == [1, 3, 5]
