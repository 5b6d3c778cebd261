"""Have every Python process take this machine's CPU for one without AVX-512: ``make older-cpu``.

vLLM asks torch what the CPU has, and chooses its library by that. Python imports this module at its
start if its folder is in ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_MODULE = "torch.cpu"
_LACKED = ("_is_avx512", "_is_amx", "_is_vnni", "_init_amx")


class _Loader(importlib.abc.Loader):
    """Loader of ``torch.cpu`` that replaces what is lacked."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: Any) -> Any:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        for name in vars(module).copy():
            if name.startswith(_LACKED):
                setattr(module, name, lambda: False)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of ``torch.cpu`` alone."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
