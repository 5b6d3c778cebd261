"""Blocks of Python in the manual compile, and import what is there."""

import ast
import importlib
import importlib.util

import pytest

from tests.unit.docs.pages import pages

#: Packages that an environment may lack for a good reason: there is no GPU, or no engine, or they
#: have an environment of their own (`make migrations`).
MAY_LACK = {"swift", "vllm"}
OURS = {"rollout_side", "trainer_side", "weft_rl"}
CASES = [
    pytest.param(block.text, id=f"{page.name}-{number}")
    for page in pages()
    for number, block in enumerate(block for block in page.blocks if block.language == "python")
]


def imports(tree: ast.AST):
    """Each module that is imported, and what is taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("text", CASES)
def test_a_block_of_python_compiles_and_imports_what_is_there(text):
    tree = ast.parse(text)
    for module, name in imports(tree):
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None and package in MAY_LACK:
            pytest.skip(f"{package} is not installed here")
        assert importlib.util.find_spec(module) is not None, module
        if package in OURS and name is not None:  # importing others would take seconds
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_there_are_such_blocks():
    assert CASES
