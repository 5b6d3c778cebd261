"""Rehearsal of vLLM's reload on a model that stays as it is: would every parameter get a value?

A reload that leaves a parameter without is found after the commit, when the weights are mixed.
So each worker goes through one at its start: the model's own ``load_weights``, over vLLM's own
bookkeeping of what each layer has got. It is given zeros of the right names, shapes and dtypes.
Whatever would change a tensor of the model is held back, and what would process a layer is left
out. Each module is put back as it was.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading import reload
from rollout_side.vllm_engine.loading.layerwise import (
    LAYERWISE,
    DirectWriteRecord,
    ReloadFacts,
    followed,
    is_attention,
    note,
)
from rollout_side.vllm_engine.loading.processed_modules import storage_of
from weft_rl.contract.tensors import Reference, TensorMeta

_log = logging.getLogger(__name__)

#: Of what a replica declares, at most: ``Capabilities.base_refusal``.
_MAX_CHARS = 480
#: Of tensors whose values no loader looks at, as it may at those of scales.
_LARGE_BYTES = 2**16


def why_not_reloaded(worker: Any, reference: Reference) -> str:
    """Return why no base can be loaded into a worker's running model; empty if one can.

    The reason is a sentence without its full stop. Never raises; nothing that the model computes
    with changes. Notes how the model loads, for its reloads. Blocks for one pass over the model's
    tensors, on the thread of the engine.
    """
    begin = time.perf_counter()
    model = worker.model_runner.get_model()
    quantised = worker.model_config.quantization is not None
    try:
        with bridges.vllm_config_context(worker.vllm_config), torch.no_grad():
            derived = _derived(model, worker.model_config)
            try:
                loaded, facts, why = _rehearse(model, reference, "meta", quantised=quantised)
            except Exception:  # noqa: BLE001 - a loader may look at values, of large tensors, too
                loaded, facts, why = _rehearse(model, reference, "cpu", quantised=quantised)
        facts = replace(facts, derived=derived)
        # Of the parameters that it computes with.
        why = why or reload.why_incomplete(model, loaded, facts, quantised=quantised)
        note(model, facts)
    except Exception as error:  # noqa: BLE001 - of any kind, from the model's own code
        why = f"{type(error).__name__}: {error}"
    _log.debug("rehearsed a reload in %.3f s", time.perf_counter() - begin)
    if not why:
        return ""
    named = f"vLLM's reload of {type(model).__name__} would leave mixed weights: {why}"
    _log.info("this replica takes no base: %s", named)
    return named[:_MAX_CHARS]


def _derived(model: torch.nn.Module, config: Any) -> frozenset[str]:
    """Return the parameters that attention layers compute once all weights are loaded.

    MLA's, say, from those of another layer. A reload ends with that, too.
    """
    found: set[str] = set()
    blocker = WriteBlocker(_tensors_of(model))
    for name, layer in model.named_modules():
        own = {key: value for key, value in layer._parameters.items() if value is not None}
        process = getattr(layer, "process_weights_after_loading", None)
        if not own or process is None or not is_attention(layer):
            continue
        with unchanged(layer), blocker:
            process(config.dtype)
            found |= {
                f"{name}.{key}"
                for key, value in own.items()
                if storage_of(value) in blocker.blocked or layer._parameters.get(key) is not value
            }
    return frozenset(found)


def _rehearse(
    model: torch.nn.Module, reference: Reference, device: str, *, quantised: bool
) -> tuple[object, ReloadFacts, str]:
    """Run ``load_weights`` without effect.

    Args:
        device: Where large tensors are that it is given. On "meta" it takes no time to compute with
            them: gpt-oss transposes its experts.

    Returns:
        What it reports as loaded; how it loads; and what got nothing, as a sentence for error
        messages: empty if every layer got weights.
    """
    layerwise = importlib.import_module(LAYERWISE)
    overwritten: set[str] = set()

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for meta in reference.tensors:
            zeros = _zeros(meta, device)
            version = zeros._version
            yield meta.name, zeros
            if zeros._version != version:
                overwritten.add(meta.name)

    with unchanged(model), bridges.without_lora(model):
        try:
            layerwise.initialize_layerwise_reload(model)
            blocker = WriteBlocker(_tensors_of(model))
            with blocker, followed(model) as writes, _unprocessed(layerwise, writes):
                loaded = model.load_weights(given())  # type: ignore[operator]
            idle, _ = reload.layers_without_weights(model)
            if not idle and not quantised:
                idle = _filled_in_part(model, layerwise, writes)
        finally:
            for layer in model.modules():
                layerwise.get_layerwise_info(layer).reset()
            layerwise.LOADING_LAYERS.clear()
    facts = ReloadFacts(overwritten=frozenset(overwritten), writes_directly=bool(writes.by_layer))
    return loaded, facts, f"{idle[0]!r} and {len(idle) - 1} more get no weights" if idle else ""


def _filled_in_part(model: torch.nn.Module, layerwise: Any, writes: DirectWriteRecord) -> list[str]:
    """Return the parameters that got no value, of layers that got some weights.

    vLLM would make memory for them, and leave it as it is.
    """
    skipped = importlib.import_module("vllm.model_executor.model_loader.reload.meta").SKIP_TENSORS
    found = []
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        given = {parameter for parameter, _ in info.loaded_weights} | writes.names(layer)
        if given and not is_attention(layer):
            own = {key for key, value in layer._parameters.items() if value is not None}
            found += [f"{name}.{key}" for key in sorted(own - given - skipped)]
    return found


def _zeros(meta: TensorMeta, device: str) -> torch.Tensor:
    """Return zeros that take no memory until they are read; no values at all if large on "meta"."""
    if device == "meta" and meta.num_bytes >= _LARGE_BYTES:
        return torch.empty(meta.shape, dtype=getattr(torch, meta.dtype.torch_name), device="meta")
    data = torch.from_numpy(np.zeros(meta.num_bytes, np.uint8))
    return data.view(getattr(torch, meta.dtype.torch_name)).reshape(meta.shape)


@contextlib.contextmanager
def _unprocessed(layerwise: Any, writes: DirectWriteRecord) -> Iterator[None]:
    """Leave out what vLLM does with a layer once it is complete.

    What vLLM has kept of the layer's weights until then is dropped.
    """

    def drop_weights(layer: torch.nn.Module, info: Any) -> None:
        info.loaded_weights[:] = [(name, None) for name, _ in info.loaded_weights]
        writes.drop(layer)

    process = layerwise._layerwise_process
    layerwise._layerwise_process = drop_weights
    try:
        yield
    finally:
        layerwise._layerwise_process = process


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a model has, whatever it keeps them as.

    Those on meta are left out: they have no values.
    """
    found: list[torch.Tensor] = []
    for layer in model.modules():
        info = importlib.import_module(LAYERWISE).get_layerwise_info(layer)
        kept: list[Any] = [*layer._parameters.values(), *layer._buffers.values()]
        for tensors in info.kernel_tensors or ():
            kept += tensors.values()
        kept += vars(layer).values()
        found += [x for x in kept if isinstance(x, torch.Tensor) and not x.is_meta]
    return found


class WriteBlocker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which no operation writes to these tensors, or to views of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = list(tensors)  # which keeps what names their storages
        self._held = {storage_of(tensor) for tensor in self._tensors}
        self.blocked: set[int] = set()
        """Storages that something would have been written to."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return a held tensor as it is in place of writing to it; let all else happen."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                info = argument.alias_info
                if info is None or not info.is_write or not isinstance(value, torch.Tensor):
                    continue
                storage = storage_of(value)
                if storage in self._held:
                    self.blocked.add(storage)
                    return value
        return func(*args, **kwargs)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put every module of a model, and every tensor of a module, back as it was.

    That is which tensors it has, what these refer to, and the attributes of either.
    """
    modules = [
        (
            module,
            dict(vars(module)),
            [
                (vars(module)[part], type(vars(module)[part])(vars(module)[part]))
                for part in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
            ],
        )
        for module in model.modules()
    ]
    tensors = [
        (tensor, tensor.data, dict(vars(tensor)))
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    try:
        yield
    finally:
        for module, attributes, parts in modules:
            vars(module).clear()
            vars(module).update(attributes)
            for part, content in parts:
                part.clear()
                part.update(content)
        for tensor, data, noted in tensors:
            if storage_of(tensor) != storage_of(data):
                tensor.data = data
            vars(tensor).clear()
            vars(tensor).update(noted)
