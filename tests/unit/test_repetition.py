"""How often a fact is said: bounds that only fall."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from weft_rl.v1 import admin_pb2, publish_pb2, registry_pb2, replica_pb2

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("weft_rl", "trainer_side", "rollout_side")
#: Lines of the packages that name a call, its request or its response, in the mean; wanted are 10.
MAX_LINES = 11.3
#: Messages that are built by hand from a value whose fields bear the same names; wanted are 0.
MAX_COPIES = 0
#: Calls of ``time.sleep`` in tests: what is waited for has a condition, see ``tests.waits``.
MAX_SLEEPS = 49
#: Lines of tests that name a private attribute of another object or module; wanted are 158.
MAX_REACHES = 202
#: Fields of one value from which on a message repeats it.
_FIELDS_OF_A_COPY = 3
_SERVICES = {
    "AdminService": admin_pb2,
    "PublishService": publish_pb2,
    "RegistryService": registry_pb2,
    "ReplicaService": replica_pb2,
}


def _sources() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            if path.parent.name != "v1":  # generated
                yield str(path.relative_to(_ROOT)), path.read_text()


def test_a_call_is_named_on_few_lines() -> None:
    calls = {
        method.name
        for name, file in _SERVICES.items()
        for method in file.DESCRIPTOR.services_by_name[name].methods
    }
    counts = Counter[str]()
    for _, text in _sources():
        for line in text.splitlines():
            words = {re.sub("(Request|Response)$", "", w) for w in re.findall(r"\w+", line)}
            counts.update(words & calls)
    mean = round(counts.total() / len(calls), 1)
    assert mean <= MAX_LINES, f"{mean} lines: {counts.most_common(5)}"


def test_few_messages_repeat_a_value() -> None:
    found = list[str]()
    for path, text in _sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"\w+_pb2?\.\w+", ast.unparse(node.func)
            ):
                found += [f"{path}:{node.lineno}"] * _is_copy(node)
    assert len(found) <= MAX_COPIES, f"{len(found)}: {found}"


def _is_copy(call: ast.Call) -> bool:
    of = Counter(
        ast.unparse(keyword.value.value)
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Attribute) and keyword.value.attr == keyword.arg
    )
    return max(of.values(), default=0) >= _FIELDS_OF_A_COPY


def test_each_private_constant_is_used() -> None:
    unused = list[str]()
    for path, text in _sources():
        module = ast.parse(text)
        read = {n.id for n in ast.walk(module) if isinstance(n, ast.Name) and _is_read(n)}
        for node in module.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets += [node.target] if isinstance(node, ast.AnnAssign) else []
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            unused += [f"{path}: {n}" for n in names - read if re.match("_[^_]", n)]
    assert not unused


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def test_tests_wait_for_what_happens() -> None:
    found = [
        f"{path.relative_to(_ROOT)}:{number}"
        for path in sorted((_ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\btime\.sleep\(", line)
    ]
    assert len(found) <= MAX_SLEEPS, f"{len(found)}: {found}"


def test_tests_use_what_is_public() -> None:
    found = set[str]()
    for path in sorted((_ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and re.match("_[a-z]", node.attr, re.IGNORECASE)
                and node.attr not in ("_replace", "_asdict", "_concrete_class")
                and ast.unparse(node.value) not in ("self", "cls", "super()")
            ):
                found.add(f"{path.relative_to(_ROOT)}:{node.lineno}")
    assert len(found) <= MAX_REACHES, f"{len(found)}: {sorted(found)}"
