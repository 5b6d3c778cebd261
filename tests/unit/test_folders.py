"""Folders of the packages import each other one way; the ends of an import are read, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("weft_rl", "trainer_side", "rollout_side")
#: ``python -m weft_rl`` has to lie beside what the commands read: the version, and the logs.
_KNOWN = {("weft_rl", "weft_rl/cli")}


def _modules(root: Path) -> dict[str, Path]:
    found = {}
    for package in _PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that a file imports anywhere, for types only, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if (found := name if name in modules else node.module) in modules:
                    yield found


def _pairs(root: Path) -> set[tuple[str, str]]:
    """Folders that import each other, a folder and the one that it lies in included."""
    modules = _modules(root)
    edges = set()
    for path in modules.values():
        for name in _imported(path, modules):
            ends = (path.parent, modules[name].parent)
            edges.add(tuple(str(end.relative_to(root)) for end in ends))
    return {(a, b) for a, b in edges if a < b and (b, a) in edges}


def test_no_two_folders_import_each_other() -> None:
    assert _pairs(_ROOT) == _KNOWN


def test_a_pair_is_found_through_an_import_for_types(tmp_path: Path) -> None:
    one, two = tmp_path / "weft_rl" / "one", tmp_path / "weft_rl" / "two"
    for folder in (one, two):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (one / "a.py").write_text("from weft_rl.two import b\n")
    (two / "b.py").write_text("X = 1\n")
    (two / "c.py").write_text("if TYPE_CHECKING:\n    from weft_rl.one.a import A\n")
    assert _pairs(tmp_path) == {("weft_rl/one", "weft_rl/two")}
