"""Linear modules of the served model, by every name that an adapter may have for them.

Files, a trainer's memory and the engine name one module in three ways:
``model.layers.0.mlp.up_proj``, ``model.language_model.layers.0.mlp.up_proj`` and
``language_model.model.layers.0.mlp.up_proj`` in Qwen2.5-VL. Files of quantised models
hold a module's weight packed, in tensors of other names and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rollout_side.vllm_engine.compat import bridges
from weft_rl.contract.tensors import DataType, LinearModule, Reference

_SUFFIX = ".lora_A.weight"
_FLOATS = (DataType.FLOAT8_E4M3FN, DataType.FLOAT8_E5M2)


@dataclass(frozen=True)
class MemoryModule:
    """Linear module as a trainer has it in memory."""

    name: str
    """Its name in memory; the one in files where it is a part of a larger tensor there."""
    saved_name: str
    """Name that transformers saves it by."""
    shape: tuple[int, ...]
    """Full shape of its weight, not quantised."""


def vllm_namer(model: Any) -> Callable[[str], str]:
    """Return a function that gives a module of the checkpoint the name that vLLM's model has.

    Source: vllm.lora.utils.parse_fine_tuned_lora_name.
    """
    mapper = bridges.rename_mapper(model)

    def name(module: str) -> str:
        mapped = mapper._map_name(module + _SUFFIX) if mapper is not None else None
        return mapped.removesuffix(_SUFFIX) if mapped else module

    return name


class ModuleTable:
    """Names of the linear modules of a reference, and their full shapes."""

    def __init__(
        self,
        reference: Reference,
        in_memory: Iterable[MemoryModule],
        vllm_name: Callable[[str], str],
    ) -> None:
        self._stored = _stored_shapes(reference)
        self._vllm_name = vllm_name
        self._homes = {vllm_name(module): module for module in self._stored}
        self._names: dict[str, list[str]] = {module: [] for module in self._stored}
        shapes: dict[str, tuple[int, ...]] = {}
        for module in in_memory:
            home = self._home(module.name, module.saved_name)
            if home is not None:
                shapes[home] = module.shape
                self._add(home, module.name)
                self._add(home, module.saved_name)
        for home in self._stored:
            self._add(home, vllm_name(home))
        self.untold = tuple(
            LinearModule(module, stored or shapes[module], tuple(self._names[module]))
            for module, stored in self._stored.items()
            if (stored or module in shapes) and (self._names[module] or not stored)
        )

    def _home(self, name: str, saved: str) -> str | None:
        """Return the module in files that is ``name`` in memory; None if there is none."""
        if saved in self._stored:
            return saved
        if name in self._stored:
            return name
        return self._homes.get(self._vllm_name(name)) or self._homes.get(self._vllm_name(saved))

    def _add(self, home: str, name: str) -> None:
        """Add a name of a module; where vLLM takes it for another's, it is a name of both."""
        for module in {home, self._homes.get(self._vllm_name(name), home)}:
            if name != module and name not in self._names[module]:
                self._names[module].append(name)

    def renames(self) -> dict[str, str]:
        """Map the names that vLLM's own mapper would not map to the module's in its model."""
        return {
            name: target
            for module in self.untold
            for name in module.other_names
            if (target := self._vllm_name(module.name)) != self._vllm_name(name)
        }


def _stored_shapes(reference: Reference) -> dict[str, tuple[int, ...]]:
    """Map modules of a reference to the full shapes of their weights; () where the weight is packed
    or no matrix. Experts with plain weights have one name and are left out."""
    stored: dict[str, tuple[int, ...]] = {}
    for meta in reference.tensors:
        module, _, last = meta.name.rpartition(".")
        is_plain = meta.dtype.is_float or meta.dtype in _FLOATS
        if last == "weight" and len(meta.shape) == 2 and is_plain:
            stored[module] = meta.shape
        else:
            stored.setdefault(module, ())
    return {m: shape for m, shape in stored.items() if not shape or ".experts." not in m}
