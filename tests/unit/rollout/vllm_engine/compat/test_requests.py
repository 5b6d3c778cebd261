"""What vLLM's server is to answer as something that can be asked again."""

from __future__ import annotations

import sys
from http import HTTPStatus
from types import ModuleType
from typing import Any

import pytest

from rollout_side.vllm_engine.compat import requests


class GenerationError(Exception):
    """As vLLM names it."""

    status_code = HTTPStatus.INTERNAL_SERVER_ERROR


@pytest.mark.parametrize("index", range(len(requests._FAILURES)))
def test_the_newest_kind_that_there_is(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    for module, _ in requests._FAILURES:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for module, name in requests._FAILURES[index:]:
        setattr(sys.modules[module], name, type(name, (GenerationError,), {}))
    error: Any = requests.failure("again", 503)
    assert (str(error), error.status_code) == ("again", 503)
    assert type(error).__name__ == requests._FAILURES[index][1]


def test_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, _ in requests._FAILURES:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, requests._FAILURES[-1][0], None)  # as if it were not there
    assert isinstance(requests.failure("again", 503), RuntimeError)
