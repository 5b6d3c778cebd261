"""Public Python API, rendered from the sources: ``python -m tests.unit.trainer.public_api`` writes
``public_api.txt`` anew.

Sources are parsed and not imported, since two of the integrations need frameworks of their own.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[3]
SNAPSHOT = Path(__file__).with_name("public_api.txt")
#: Modules of which everything without an underscore is public; of ``trainer_side``, ``__all__``.
_INTEGRATIONS = ("hf", "trl", "trl_async", "swift", "verl")
#: What others make and hand out.
_NOT_MADE_BY_USERS = {"RolloutStream"}
_OURS = ("weft_rl", "trainer_side")
_WIDTH = 100

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef


def render() -> str:
    """The whole API, one paragraph a name, and what its types and defaults stand for."""
    parts = ["# Written by `python -m tests.unit.trainer.public_api`; see CONTRIBUTING.md."]
    named: set[tuple[str, str]] = set()
    for title, definitions in _sections():
        parts += ["", f"## {title}"]
        for module, node in definitions:
            parts += ["", *_rendered(node)]
            named |= _values(module, node).items()
    parts += ["", "## Names in the above", ""]
    parts += [f"{name} = {value}" for name, value in sorted(named)]
    return "\n".join(parts) + "\n"


def _sections() -> Iterator[tuple[str, list[tuple[str, _Definition]]]]:
    yield "trainer_side", [(m, _definitions(m)[name]) for name, m in _exports().items()]
    for name in _INTEGRATIONS:
        module = f"trainer_side.integrations.{name}"
        found = _definitions(module).items()
        yield module, [(module, node) for name, node in found if not name.startswith("_")]


def _exports() -> dict[str, str]:
    """The modules of the names in ``trainer_side.__all__``."""
    origin = _imports("trainer_side")
    names: list[str] = ast.literal_eval(_assigned("trainer_side")["__all__"])
    return {name: origin[name] for name in names}


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def _definitions(module: str) -> dict[str, _Definition]:
    return {node.name: node for node in _tree(module).body if isinstance(node, _Definition)}


def _imports(module: str) -> dict[str, str]:
    """Names that are imported from our own modules, with these."""
    return {
        alias.name: node.module
        for node in _tree(module).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS)
        for alias in node.names
        if node.module
    }


def _assigned(module: str) -> dict[str, ast.expr]:
    """Values of a module's constants and aliases."""
    found = {}
    for node in _tree(module).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            found[ast.unparse(node.target)] = node.value
    return found


def _values(module: str, node: ast.AST) -> dict[str, str]:
    """What the names in a definition's signatures stand for, and the names in these."""
    found: dict[str, str] = {}
    for name in {each.id for part in _signatures(node) for each in _names(part)}:
        where = module
        while name not in _assigned(where) and name in _imports(where):
            where = _imports(where)[name]
        if (value := _assigned(where).get(name)) is not None:
            found |= {name: ast.unparse(value)} | _values(where, value)
    return found


def _signatures(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.AnnAssign):
                yield member
            elif isinstance(member, _Function) and _is_shown(node, member):
                yield from _signatures(member)
    elif isinstance(node, _Function):
        yield from filter(None, (node.args, node.returns))
    else:
        yield node


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def _is_shown(owner: ast.ClassDef, method: _Function) -> bool:
    if method.name == "__init__":
        return owner.name not in _NOT_MADE_BY_USERS
    return not method.name.startswith("_")


def _rendered(node: _Definition) -> Iterator[str]:
    if not isinstance(node, ast.ClassDef):
        yield from _signature(node)
        return
    bases = ", ".join(map(ast.unparse, node.bases))
    yield f"class {node.name}({bases})" if bases else f"class {node.name}"
    for member in node.body:
        if isinstance(member, ast.AnnAssign | ast.Assign):
            target = member.target if isinstance(member, ast.AnnAssign) else member.targets[0]
            if not ast.unparse(target).startswith("_"):
                yield f"    {ast.unparse(member)}"
        elif isinstance(member, _Function) and _is_shown(node, member):
            yield from (f"    {line}" for line in _signature(member))
            if member.name == "__init__":
                yield from _attributes(member)


def _attributes(init: _Function) -> Iterator[str]:
    """What a constructor sets for users to read."""
    for node in init.body:
        if isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            name = ast.unparse(target)
            if name.startswith("self.") and not name.startswith("self._"):
                kind = (
                    f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
                )
                yield f"    {name}{kind}"


def _signature(node: _Function) -> list[str]:
    marks = "".join(
        f"@{ast.unparse(each)} " for each in node.decorator_list if isinstance(each, ast.Name)
    )
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    head, arguments = f"{marks}{kind} {node.name}(", _arguments(node.args)
    tail = f") -> {ast.unparse(node.returns)}" if node.returns else ")"
    line = head + ", ".join(arguments) + tail
    if len(line) + 4 <= _WIDTH:
        return [line]
    return [head, *(f"    {each}," for each in arguments), tail]


def _arguments(given: ast.arguments) -> list[str]:
    """Each with its type and default, as in the source."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    found = [_argument(*each) for each in zip(positional, defaults, strict=True)]
    if given.vararg:
        found.append(f"*{_argument(given.vararg, None)}")
    elif given.kwonlyargs:
        found.append("*")
    found += [_argument(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        found.append(f"**{_argument(given.kwarg, None)}")
    return [each for each in found if each not in ("self", "cls")]


def _argument(node: ast.arg, default: ast.expr | None) -> str:
    text = f"{node.arg}: {ast.unparse(node.annotation)}" if node.annotation else node.arg
    return text if default is None else f"{text} = {ast.unparse(default)}"


if __name__ == "__main__":
    SNAPSHOT.write_text(render())
