"""docs/models.md shows what `make models` has found, of every architecture that it takes."""

from __future__ import annotations

from tests.architectures import table
from tests.architectures.run import STEPS, is_fine
from tests.architectures.specs import ARCHITECTURES


def test_the_page_is_made_of_the_results() -> None:
    text = table.PAGE.read_text()
    assert table.page(text, table.load()) == text, "run `make models MODELS=...`"


def test_every_architecture_has_a_row() -> None:
    assert list(table.load()) == [architecture.name for architecture in ARCHITECTURES]


def test_a_result_is_fine_within_the_bound_alone() -> None:
    assert is_fine("equal")
    assert is_fine("5e-06")
    assert not is_fine("3e-01")
    assert not is_fine("UNSUPPORTED: vLLM's reload would leave mixed weights")


def test_every_step_of_the_results_is_known() -> None:
    for found in table.load().values():
        assert found.keys() <= {*STEPS, "vllm"}
