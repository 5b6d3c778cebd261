"""Modules and parameters of a model, found once and checked at each push."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import cast

import torch

Table = dict[str, object]
_KEPT = "_weft_walk"


class Walk:
    """Modules and parameters of a model, kept in the model itself, so that they live as long. A
    copy or a pickle of the model is without them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules, self.named, self._tables = _walk(module)
        self._sizes, self._keys, self._entries = _state(self._tables)
        #: What was found out about these parameters, by whoever did.
        self.kept: object = None

    def is_true(self) -> bool:
        """Return whether every module still has the same children and parameters, by the same
        names."""
        sizes, keys, entries = _state(self._tables)
        is_shaped_alike = sizes == self._sizes and keys == self._keys
        return is_shaped_alike and all(map(is_, entries, self._entries))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def walk(module: torch.nn.Module) -> Walk:
    """Return all modules, each once, and all parameters as ``named_parameters`` names and orders
    them.

    A PEFT model has thousands of modules: to walk it takes longer than to send its adapter; to
    check that it is unchanged takes a fifth of that.
    """
    found = module.__dict__.get(_KEPT)
    if isinstance(found, Walk) and found.modules[0] is module and found.is_true():
        return found
    found = Walk(module)
    if type(module).named_parameters is torch.nn.Module.named_parameters:
        module.__dict__[_KEPT] = found
    else:
        found.named = dict(module.named_parameters())  # the user's own word counts
    return found


def _walk(
    module: torch.nn.Module,
) -> tuple[list[torch.nn.Module], dict[str, torch.nn.Parameter], list[Table]]:
    """Walk a module in one pass; torch's own generators would walk it thrice."""
    modules: list[torch.nn.Module] = []
    named: dict[str, torch.nn.Parameter] = {}
    tables: list[Table] = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        modules.append(part)
        tables += [cast(Table, part._parameters), cast(Table, part._modules)]
        for name, param in part._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                named[prefix + name] = param
        children = [(f"{prefix}{name}.", c) for name, c in part._modules.items() if c is not None]
        waiting.extend(reversed(children))
    return modules, named, tables


def _state(tables: Sequence[Table]) -> tuple[list[int], list[str], list[object]]:
    """Return sizes, keys and values of all entries, without a step of Python for each."""
    return (
        [*map(len, tables)],
        [*chain.from_iterable(tables)],
        [*chain.from_iterable(map(dict.values, tables))],
    )
