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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading import reload
from rollout_side.vllm_engine.loading.drafted_model import DraftedModel
from rollout_side.vllm_engine.loading.layerwise import (
    LAYERWISE,
    DirectWriteRecord,
    ReloadFacts,
    facts_of,
    followed,
    is_attention,
    note,
)
from rollout_side.vllm_engine.loading.processed_modules import storage_of
from weft_rl.contract.tensors import Reference, TensorMeta

_log = logging.getLogger(__name__)

#: Of tensors whose values no loader looks at, as it may at those of scales.
_LARGE_BYTES = 2**16
#: Method of a whole model, of few architectures.
_AT_END = "process_weights_after_loading"
_OF_HELPERS = ("vllm.model_executor.", "vllm.v1.attention.")


def why_not_reloaded(worker: Any, reference: Reference) -> str:
    """Return why no base can be loaded into a worker's running model; empty if one can.

    The reason is a sentence without its full stop. Never raises; nothing that the model computes
    with changes. Notes how the model loads, for its reloads. Blocks for one pass over the model's
    tensors, on the thread of the engine.
    """
    model = worker.model_runner.get_model()
    loads = _LoadRecord(frozenset(meta.name for meta in reference.tensors))
    why = _why_not_reloaded(worker, model, reference.tensors, loads)
    if not why:
        return ""
    return f"vLLM's reload of {type(model).__name__} would leave mixed weights: {why}"


def drafted_model(
    worker: Any, reference: Reference, files: Sequence[TensorMeta]
) -> DraftedModel | None:
    """Return a worker's model with the one that drafts for it, if both can be loaded together; log
    why not.

    Costs and effects are those of ``why_not_reloaded``, two or three times where the draft has no
    use for some of its files' tensors.

    Args:
        reference: Tensors of the served model.
        files: Tensors of the draft's files, by their names in a base.
    """
    if not files:
        return None
    draft = bridges.draft_model(worker.model_runner)
    if draft is None:
        _log.info("the model that drafts tokens stays as it is: it is not found in this worker")
        return None
    model, why = _drafted(worker, draft, reference, files)
    if model is None:
        _log.info("the %s that drafts tokens stays as it is: %s", type(draft).__name__, why)
    return model


def _drafted(
    worker: Any, draft: torch.nn.Module, reference: Reference, files: Sequence[TensorMeta]
) -> tuple[DraftedModel | None, str]:
    """Return the model of what the draft itself loads of its files; or why there is none."""
    target = worker.model_runner.get_model()
    whole = DraftedModel(target, draft, reference, files)
    watched = frozenset(meta.name for meta in files)
    loads = _LoadRecord(watched)
    why = bridges.why_draft_stays(worker.model_runner) or _why_not_reloaded(
        worker, whole, (*reference.tensors, *files), loads
    )
    if not why and (kept := [x for x in facts_of(whole).computed if x.startswith("draft.")]):
        why = f"{kept[0]!r} is computed from its weights while they are loaded"
    if why:
        return None, why
    # Copies of the served model's embedding, say, and tables for training: neither is sent. Nothing
    # is known of a tensor that something is computed from before it is loaded.
    shared = whole.shared_layers
    own = [meta for meta in files if loads.layers.get(meta.name, set()) - shared]
    not_shared = [meta for meta in files if not loads.layers.get(meta.name, set()) & shared]
    for tensors in (own, not_shared):
        if len(tensors) == len(files):
            return whole, ""
        model = DraftedModel(target, draft, reference, tensors)
        loads = _LoadRecord(watched)
        why = _why_not_reloaded(worker, model, (*reference.tensors, *tensors), loads)
        if not why:
            return model, ""
    return None, why


def _why_not_reloaded(
    worker: Any,
    model: torch.nn.Module,
    tensors: Sequence[TensorMeta],
    loads: _LoadRecord,
) -> str:
    """Rehearse a reload, note how it loads, and return what would get no value."""
    begin = time.perf_counter()
    quantised = worker.model_config.quantization is not None
    rehearsal = partial(_rehearse, model, tensors, loads=loads, quantised=quantised)
    try:
        with bridges.vllm_config_context(worker.vllm_config), torch.no_grad():
            derived = _derived(model, worker.model_config)
            if why := _why_not_restored(model):
                return why
            try:
                loaded, facts, why = rehearsal(device="meta")
            except Exception:  # noqa: BLE001 - a loader may look at values, of large tensors, too
                loaded, facts, why = rehearsal(device="cpu")
        held = frozenset(
            meta.name
            for meta in tensors
            if meta.dtype.is_float
            and meta.dtype.itemsize_bytes < torch.float32.itemsize
            and loads.dtypes.get(meta.name) == {torch.float32}
        )
        facts = replace(facts, derived=derived, held_as_float32=held)
        # Of the parameters that it computes with.
        why = why or reload.why_incomplete(model, loaded, facts, quantised=quantised)
        note(model, facts)
    except Exception as error:  # noqa: BLE001 - of any kind, from the model's own code
        why = f"{type(error).__name__}: {error}"
    _log.debug("rehearsed a reload in %.3f s", time.perf_counter() - begin)
    return why


def _why_not_restored(model: torch.nn.Module) -> str:
    """Return why vLLM cannot give layers back the parameters that they were loaded as; empty if it
    can."""
    layerwise = importlib.import_module(LAYERWISE)
    for name, layer in model.named_modules():
        parameters, _ = layerwise.get_layerwise_info(layer).restore_metadata
        for key in parameters:
            if key in vars(layer):
                kind = type(vars(layer)[key]).__name__
                return (
                    f"{name}.{key} is made a {kind} once it is loaded, which vLLM does not load "
                    "again (experts in MXFP4: --moe-backend marlin keeps parameters)"
                )
    return ""


def _derived(model: torch.nn.Module, config: Any) -> frozenset[str]:
    """Return the parameters that attention layers compute once all weights are loaded. MLA's, say,
    from those of another layer. A reload ends with that, too."""
    found: set[str] = set()
    blocker = WriteBlocker(tensors_of(model))
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
    model: torch.nn.Module,
    tensors: Sequence[TensorMeta],
    *,
    device: str,
    loads: _LoadRecord,
    quantised: bool,
) -> tuple[object, ReloadFacts, str]:
    """Run ``load_weights`` without effect.

    Args:
        device: Where large tensors are that it is given. On "meta" it takes no time to compute with
            them: gpt-oss transposes its experts.
        loads: See ``_why_not_reloaded``.

    Returns:
        What it reports as loaded; how it loads; and what got nothing, as a sentence for error
        messages: empty if every layer got weights.
    """
    layerwise = importlib.import_module(LAYERWISE)
    overwritten: set[str] = set()

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for meta in tensors:
            zeros = loads.of(meta.name, _zeros(meta, device))
            version = zeros._version
            yield meta.name, zeros
            if zeros._version != version:
                overwritten.add(meta.name)

    with unchanged(model), bridges.without_lora(model):
        try:
            layerwise.initialize_layerwise_reload(model)
            before = _plain_tensors(model)
            blocker = WriteBlocker(tensors_of(model), on_copy=loads.note_copy)
            ending = _note_end(model)
            with blocker, followed(model) as writes, _unprocessed(layerwise, writes, loads):
                loaded = model.load_weights(given())  # type: ignore[operator]
            computed = _computed(model, before, blocker.blocked)
            for layer in model.modules():
                loads.note(layer, layerwise.get_layerwise_info(layer))
            idle, _ = reload.layers_without_weights(model)
            if not idle and not quantised:
                idle = _filled_in_part(model, layerwise, writes)
        finally:
            for layer in model.modules():
                layerwise.get_layerwise_info(layer).reset()
            layerwise.LOADING_LAYERS.clear()
    facts = ReloadFacts(
        overwritten=frozenset(overwritten),
        computed=computed,
        writes_directly=bool(writes.by_layer),
    )
    why = f"{idle[0]!r} and {len(idle) - 1} more get no weights" if idle else ""
    if not why and ending == [False]:
        why = f"it does not call the model's own {_AT_END}, which a start ends with"
    return loaded, facts, why


def _plain_tensors(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that modules keep as plain attributes, one by one or in a list, by the
    attribute."""
    found = {}
    for name, layer in model.named_modules():
        for key, value in vars(layer).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            items = value.values() if isinstance(value, dict) else value
            parts = items if isinstance(value, dict | list | tuple) else (value,)
            if tensors := [part for part in parts if isinstance(part, torch.Tensor)]:
                found[f"{name}.{key}".lstrip(".")] = tensors
    return found


def _computed(
    model: torch.nn.Module, before: Mapping[str, Sequence[torch.Tensor]], written: Collection[int]
) -> tuple[str, ...]:
    """Return the plain attributes that loading has set to other tensors, or has written to."""
    registered: set[int] = set()
    for layer in model.modules():
        info = importlib.import_module(LAYERWISE).get_layerwise_info(layer)
        kept = [layer._parameters, layer._buffers, *(info.kernel_tensors or ())]
        registered |= {storage_of(x) for tensors in kept for x in tensors.values() if x is not None}
    own = set(written) - registered
    return tuple(
        name
        for name, tensors in _plain_tensors(model).items()
        if list(map(id, tensors)) != list(map(id, before.get(name, ())))
        or any(not x.is_meta and storage_of(x) in own for x in tensors)
    )


def _note_end(model: Any) -> list[bool]:
    """Note in the list whether a model's loader calls what else only a start calls; empty if there
    is no such thing."""
    called = [False] if hasattr(model, _AT_END) else []

    def end() -> None:
        called[:] = [True]

    if called:
        setattr(model, _AT_END, end)
    return called


def _filled_in_part(model: torch.nn.Module, layerwise: Any, writes: DirectWriteRecord) -> list[str]:
    """Return the parameters that got no value, of layers that got some weights. vLLM would make
    memory for them, and leave it as it is."""
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


class _LoadRecord:
    """Record of what a rehearsal loads some tensors into, as they are or as views."""

    def __init__(self, watched: Collection[str] = ()) -> None:
        self._watched = watched
        self._names: dict[int, str] = {}
        self._tensors: list[torch.Tensor] = []  # which keeps what names their storages
        self.layers: dict[str, set[torch.nn.Module]] = {}
        self.dtypes: dict[str, set[torch.dtype]] = {}
        """Dtypes of the parameters that a tensor goes to, by its name."""

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is about to be given under a name."""
        if name in self._watched:
            self._names[storage_of(tensor)] = name
            self._tensors.append(tensor)
        return tensor

    def note(self, layer: torch.nn.Module, info: Any) -> None:
        """Note what a layer has got since the last call."""
        for parameter, arguments in info.loaded_weights:
            for value in () if arguments is None else arguments.arguments.values():
                if isinstance(value, torch.Tensor) and storage_of(value) in self._names:
                    name = self._names[storage_of(value)]
                    self.layers.setdefault(name, set()).add(layer)
                    self.dtypes.setdefault(name, set()).add(getattr(layer, parameter).dtype)

    def note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy to a parameter that a reload leaves in its place: vLLM's SKIP_TENSORS."""
        if name := self._names.get(storage_of(source)):
            self.dtypes.setdefault(name, set()).add(target.dtype)


@contextlib.contextmanager
def _unprocessed(layerwise: Any, writes: DirectWriteRecord, loads: _LoadRecord) -> Iterator[None]:
    """Leave out what vLLM does with a layer once it is complete. What vLLM has kept of the layer's
    weights until then is dropped."""

    def drop_weights(layer: torch.nn.Module, info: Any) -> None:
        loads.note(layer, info)
        info.loaded_weights[:] = [(name, None) for name, _ in info.loaded_weights]
        writes.drop(layer)

    process = layerwise._layerwise_process
    layerwise._layerwise_process = drop_weights
    try:
        yield
    finally:
        layerwise._layerwise_process = process


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a model has, whatever it keeps them as. Those on meta are left out:
    they have no values."""
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
    """Dispatch mode in which no operation writes to these tensors, or to views of them.

    Args:
        tensors: Those tensors.
        on_copy: Called with target and source of each copy that is held back.
        on_other_write: Called with the target of each other write that is held back, and with a
            function that makes it to another tensor.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        on_copy: Callable[[torch.Tensor, torch.Tensor], object] = lambda target, source: None,
        on_other_write: Callable[
            [torch.Tensor, Callable[[torch.Tensor], object]], object
        ] = lambda target, write: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = list(tensors)  # which keeps what names their storages
        self._on_copy, self._on_other_write = on_copy, on_other_write
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
                    if func.overloadpacket.__name__ == "copy_":
                        self._on_copy(value, args[1])
                    else:
                        self._on_other_write(value, partial(_write, func, args, kwargs, value))
                    return value
        return func(*args, **kwargs)


def _write(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: torch.Tensor,
    other: torch.Tensor,
) -> None:
    named = {name: other if value is target else value for name, value in kwargs.items()}
    func(*(other if value is target else value for value in args), **named)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put every module of a model, and every tensor of a module, back as it was.

    That is which tensors it has, what these refer to, the attributes of either, and those of
    vLLM's objects that compute for a module, with what these keep in dicts and lists.
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
    helpers = [(helper, dict(vars(helper))) for helper in _helpers_of(model)]
    kept = [
        (value, value.copy())
        for _, attributes in helpers
        for value in attributes.values()
        if isinstance(value, dict | list)
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
        for helper, attributes in helpers:
            vars(helper).clear()
            vars(helper).update(attributes)
        for value, content in kept:
            value.clear()
            (value.update if isinstance(value, dict) else value.extend)(content)


def _helpers_of(model: torch.nn.Module) -> list[Any]:
    """Return the objects of vLLM's that modules refer to, and these to others: methods, kernels."""
    found: dict[int, Any] = {}
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        value = waiting.pop()
        is_other = isinstance(value, torch.nn.Module | torch.Tensor | type)
        if is_other or id(value) in found or not hasattr(value, "__dict__"):
            continue
        if any(kind.__module__.startswith(_OF_HELPERS) for kind in type(value).__mro__):
            found[id(value)] = value
            waiting += vars(value).values()
    return list(found.values())
