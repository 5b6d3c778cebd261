"""Operations that vLLM's build for this machine has."""

from __future__ import annotations

import functools
import importlib
import warnings

import pytest
import torch


@functools.cache
def has_operation(name: str) -> bool:
    """Return whether the library that vLLM chose for this machine has an operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
        importlib.import_module("vllm._custom_ops")
    return hasattr(torch.ops._C, name)


def skip_unless_computed(name: str) -> None:
    """Skip a test, or those of a fixture, where vLLM's build lacks an operation that it needs."""
    if not has_operation(name):
        pytest.skip(f"vLLM's build for this machine has no operation {name}")
