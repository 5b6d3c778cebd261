"""vLLM's layerwise reload, and what a model's ``load_weights`` writes past the loaders it watches.

The reload puts the tensors on the meta device, wraps their weight loaders, and builds a layer once
these have brought all of it. What ``load_weights`` copies to a parameter itself (gpt-oss does so
with its experts and sinks) is lost there. Such a write is repeated here once the layer has memory,
and counts as loaded. No architecture is known by its name: what a model does, its rehearsal shows.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_side.vllm_engine.loading.processed_modules import storage_of

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"

_Write = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class ReloadFacts:
    """Facts of how one model loads weights, as its rehearsal has shown."""

    derived: frozenset[str] = frozenset()
    """Parameters that post-processing computes from what was loaded; no checkpoint has them."""
    overwritten: frozenset[str] = frozenset()
    """Checkpoint tensors that loading writes to, so that it must be given copies."""
    computed: tuple[str, ...] = ()
    """Attributes of modules with tensors that loading computes: no parameters, so that copies to
    parameters leave them as they were."""
    writes_directly: bool = True
    """False if every write to a parameter is made by its weight loader."""
    held_as_float32: frozenset[str] = frozenset()
    """Checkpoint tensors in narrower floats that go to parameters in float32 alone."""


#: What is known of each model; of one that was not rehearsed, the safe thing is assumed.
_FACTS: WeakKeyDictionary[torch.nn.Module, ReloadFacts] = WeakKeyDictionary()


def facts_of(model: torch.nn.Module) -> ReloadFacts:
    """Return what was noted of a model."""
    return _FACTS.get(model, ReloadFacts())


def note(model: torch.nn.Module, facts: ReloadFacts) -> None:
    """Note what the rehearsal of a model has shown."""
    _FACTS[model] = facts


def is_attention(layer: torch.nn.Module) -> bool:
    """Return whether a layer's parameters are derived, or scales that a checkpoint may lack."""
    return hasattr(layer, "kv_cache") or hasattr(layer, "kv_cache_dtype")


@dataclass
class DirectWriteRecord:
    """Record of what one reload has written past the weight loaders."""

    by_layer: dict[torch.nn.Module, list[tuple[str, _Write]]] = field(default_factory=dict)
    """Parameter and write, in order, by layer; until the layer is built."""

    def names(self, layer: torch.nn.Module) -> set[str]:
        """Return the parameters of a layer that were written to and wait for its memory."""
        return {name for name, _ in self.by_layer.get(layer, ())}

    def drop(self, layer: torch.nn.Module) -> None:
        """Forget the values that were written to a layer."""
        if layer in self.by_layer:
            self.by_layer[layer] = [(name, _no_write) for name in sorted(self.names(layer))]

    def repeat(self, layer: torch.nn.Module) -> None:
        """Write to the parameters of a layer, which now has memory."""
        for name, write in self.by_layer.pop(layer, ()):
            write(getattr(layer, name))


def _no_write(tensor: torch.Tensor) -> None:
    """Leave a tensor as it is."""


@contextlib.contextmanager
def followed(model: torch.nn.Module) -> Iterator[DirectWriteRecord]:
    """Let vLLM's layerwise reload count and repeat what the calling thread writes directly. Call it
    after ``initialize_layerwise_reload``, around both loading and finalising."""
    layerwise: Any = importlib.import_module(LAYERWISE)
    writes = DirectWriteRecord()
    watcher = _Watcher(model, layerwise, writes)
    count, materialise = layerwise.get_numel_loaded, layerwise.materialize_layer

    def counted(*args: Any) -> Any:
        with watcher.paused():
            return count(*args)

    def materialised(layer: torch.nn.Module, *args: Any) -> None:
        materialise(layer, *args)
        writes.repeat(layer)

    layerwise.get_numel_loaded, layerwise.materialize_layer = counted, materialised
    try:
        with watcher:
            yield writes
    finally:
        layerwise.get_numel_loaded, layerwise.materialize_layer = count, materialise


@contextlib.contextmanager
def padded_with_zeros() -> Iterator[None]:
    """Let vLLM's layerwise reload build layers that are not filled whole on zeros, not on garbage.
    Weights that are padded for a kernel (MXFP4 experts, say) are made of zeros at a start."""
    layerwise: Any = importlib.import_module(LAYERWISE)
    materialise = layerwise.materialize_layer

    def materialised(layer: torch.nn.Module, info: Any, *args: Any) -> None:
        made = [name for name, x in layerwise.get_layer_tensors(layer).items() if x.is_meta]
        materialise(layer, info, *args)
        if info.load_numel < info.load_numel_total:
            for name in made:
                getattr(layer, name).data.zero_()

    layerwise.materialize_layer = materialised
    try:
        yield
    finally:
        layerwise.materialize_layer = materialise


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that holds back direct writes to tensors of layers on the meta device."""

    def __init__(self, model: torch.nn.Module, layerwise: Any, writes: DirectWriteRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layerwise, self._writes = layerwise, writes
        self._is_paused = False
        self._owners = {
            storage_of(tensor): (layer, name, tensor)
            for layer in model.modules()
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items())
            if tensor is not None and tensor.is_meta
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let writes through: a weight loader makes them."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a write to such a tensor, and return its target; let all else happen."""
        kwargs = kwargs or {}
        if func._schema.is_mutable and not self._is_paused and args:
            target = args[0]
            if isinstance(target, torch.Tensor) and target.is_meta:
                owner = self._owners.get(storage_of(target))
                if owner is not None:
                    self._note(*owner, func, target, args[1:], kwargs)
                    return target
        return func(*args, **kwargs)

    def _note(
        self,
        layer: torch.nn.Module,
        name: str,
        tensor: torch.Tensor,
        func: Any,
        target: torch.Tensor,
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        info = self._layerwise.get_layerwise_info(layer)
        of_layer = f"{name!r} of a {type(layer).__name__}"
        if is_attention(layer):
            raise ValueError(f"{of_layer} is loaded past its weight loader")
        if not info.can_load() or info.load_numel >= info.load_numel_total:
            raise ValueError(f"{of_layer} is written to once its layer has all its weights")
        shape, stride, offset = target.shape, target.stride(), target.storage_offset()

        def write(real: torch.Tensor) -> None:
            if real.stride() != tensor.stride():
                raise ValueError(f"{of_layer} is laid out otherwise than when it was written to")
            func(real.data.as_strided(shape, stride, offset), *rest, **kwargs)

        self._writes.by_layer.setdefault(layer, []).append((name, write))
        if func.overloadpacket.__name__ == "copy_":
            info.load_numel += target.numel()
        if info.load_numel >= info.load_numel_total:
            self._layerwise._layerwise_process(layer, info)
