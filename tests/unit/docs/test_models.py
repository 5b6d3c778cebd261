"""docs/models.md shows what `make models` has found, of every architecture that it takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from tests.architectures import table
from tests.architectures.run import STEPS, is_fine
from tests.architectures.specs import ARCHITECTURES

E2E = Path(__file__).parents[2] / "e2e"


def test_the_page_is_made_of_the_results() -> None:
    text = table.PAGE.read_text()
    assert table.page(text, table.load()) == text, "run `make models MODELS=...`"


def test_every_architecture_has_a_row() -> None:
    assert list(table.load()) == [architecture.name for architecture in ARCHITECTURES]


def test_a_result_is_fine_within_the_bound_alone() -> None:
    assert is_fine("equal", 1e-4)
    assert is_fine("5e-06", 1e-4)
    assert is_fine("2e-02", 0.1)
    assert not is_fine("2e-02", 1e-4)
    assert not is_fine("UNSUPPORTED: vLLM's reload would leave mixed weights", 1e-4)


def test_every_step_of_the_results_is_known() -> None:
    for found in table.load().values():
        assert found.keys() <= {*STEPS, "vllm"}


def test_five_of_them_are_pushed_by_tests_that_ci_runs() -> None:
    tested = [architecture for architecture in ARCHITECTURES if architecture.test]
    assert len(tested) >= 5
    for architecture in tested:
        file, kind = architecture.test or ("", "")
        assert kind in _in_ci((E2E / file).read_text()), architecture.name
        found = table.load()[architecture.name]
        assert all(is_fine(found[step], architecture.bound) for step in ("base", "back", "merged"))


def _in_ci(text: str) -> Sequence[str]:
    """Return the kinds that a file's tests run without a mark: those that it lists, or, where it
    marks no test as one of the matrix by its module, the fixtures of tiny models."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "IN_CI":
            found: Sequence[str] = ast.literal_eval(node.value)
            return found
    assert "pytestmark = pytest.mark.matrix" not in text
    return re.findall(r"\b(\w+): TinyModels", text)
