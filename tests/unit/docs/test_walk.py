"""The walk in CONTRIBUTING.md: few stops, each a function that is there."""

import ast

import pytest

from tests.unit.docs.pages import ROOT
from tests.unit.docs.walk import stops

MAX_STOPS = 10


def test_the_walk_has_at_most_ten_stops_of_one_sentence():
    assert 0 < len(stops()) <= MAX_STOPS
    assert [stop.number for stop in stops()] == list(range(1, len(stops()) + 1))
    for stop in stops():
        assert stop.sentence.endswith((".", ")."))
        assert ". " not in stop.sentence, stop.sentence


@pytest.mark.parametrize("stop", stops(), ids=lambda stop: stop.function)
def test_each_stop_is_a_function_of_its_file(stop):
    nodes = ast.parse((ROOT / stop.file).read_text()).body
    *classes, function = stop.function.split(".")
    for name in classes:
        (found,) = (n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name)
        nodes = found.body
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    assert [n.name for n in nodes if isinstance(n, kinds) and n.name == function]
