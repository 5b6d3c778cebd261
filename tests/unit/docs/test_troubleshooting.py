"""The sentences of docs/troubleshooting.md are those that the code prints."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.docs.pages import ROOT
from weft_rl.coordinator.decisions.state.values import ReplicaState

_PACKAGES = ("weft_rl", "trainer_side", "rollout_side")
_ROWS = re.compile(r"^\| (.+?) \| .+ \| .+ \|$", re.MULTILINE)
_HOLE = "\0"
_FORMAT = re.compile(r"%[-+ #0]*[\d.]*[diouxXeEfFgGrsa]")


def _templates(source: str) -> Iterator[str]:
    """Texts of a module, with holes where values are put in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else _HOLE for p in node.values]
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _FORMAT.sub(_HOLE, node.value)


@cache
def _printed() -> tuple[str, ...]:
    files = (path for package in _PACKAGES for path in (ROOT / package).rglob("*.py"))
    texts = {text for path in files for text in _templates(path.read_text())}
    texts |= {state.word for state in ReplicaState}
    return tuple(text for text in texts if " " in text or text.isalpha())


def is_printed(sentence: str, texts: tuple[str, ...]) -> bool:
    """Whether a text has the sentence, in which "…" stands for anything."""
    pieces = [re.escape(piece.strip()) for piece in sentence.split("…")]
    pattern = re.compile(r"[^.]*?".join(pieces) if len(pieces) > 1 else pieces[0])
    return any(pattern.search(text) for text in texts)


def _sentences() -> list[str]:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    seen = [cell for cell in _ROWS.findall(text) if "`" in cell]
    assert len(seen) > 40
    return [
        f"{'vllm: ' if '(vLLM)' in cell else ''}{sentence}"
        for cell in seen
        for sentence in re.findall(r"`([^`]+)`", cell)
        if not re.fullmatch(r"[A-Z_]+|remarks", sentence)
    ]


@pytest.mark.parametrize("sentence", _sentences())
def test_each_sentence_is_printed(sentence: str) -> None:
    if sentence.startswith("vllm: "):
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:
            pytest.skip("vLLM is not installed here")
        files = Path(found.origin).parent.joinpath("v1").rglob("*.py")
        texts = tuple(text for path in files for text in _templates(path.read_text()))
        assert is_printed(sentence.removeprefix("vllm: "), texts)
    else:
        assert is_printed(sentence, _printed())


def test_a_sentence_that_nobody_prints_is_found() -> None:
    assert is_printed("rank … is above the replicas' --max-lora-rank …", _printed())
    assert not is_printed("rank … is below the replicas' --max-lora-rank …", _printed())
    assert not is_printed("the replicas' --max-lora-rank is above rank …", _printed())
