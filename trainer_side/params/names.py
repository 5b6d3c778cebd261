"""Checkpoint names: names on disk of wrapped, fused or converted parameters.

vLLM loads checkpoint names. transformers keeps some parameters in other names and
shapes in memory (Mixtral's experts as one tensor) and knows how to go back; asking
it tensor by tensor keeps memory bounded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from weft_rl.contract.manifest import layer_of

_log = logging.getLogger(__name__)

# A model's names are asked for at each push; of the largest, this holds several sets.
_MAX_CACHED = 2**17
# Components that wrappers insert (DDP, FSDP1, activation checkpointing, compile).
_WRAPPERS = frozenset({"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_INSERTED = _WRAPPERS - {"module"}
#: Beginning of the names in PEFT's own models, and in the files that it saves.
IN_PEFT = "base_model.model."

#: Modules that PEFT keeps a LoRA pair in, by adapter.
LORA = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})

Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class TensorBlock(NamedTuple):
    """Elements of a parameter, end to end, that are a tensor of the checkpoint."""

    source: str
    begin: int
    end: int


@dataclass(frozen=True)
class Conversion:
    """A group of parameters and the checkpoint tensors they become.

    ``sources`` are the model's own parameter names, ``targets`` the checkpoint
    names in order. Most groups have one of each.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    is_identity: bool
    """True if one parameter keeps shape and content, perhaps under another name."""
    blocks: tuple[TensorBlock | None, ...] = ()
    """Block of each target, unless it is an identity; None for a target that is not contiguous."""


@lru_cache(_MAX_CACHED)
def unwrapped_name(name: str) -> str:
    """Return a parameter's name without wrapper components, compared as whole components.

    A leading ``module`` is DDP's; a ``module`` further in belongs to the model.
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _INSERTED)


def saved_names(names: Collection[str]) -> dict[str, str]:
    """Map names in the files of a checkpoint to those without the components of the wrappers that
    the model was saved in: compile, DDP, FSDP1. A ``module`` that only some begin with is the
    model's own.
    """
    found = {name: ".".join(p for p in name.split(".") if p not in _INSERTED) for name in names}
    for head in (IN_PEFT, ""):
        of_ddp = f"{head}module."
        if found and all(new.startswith(of_ddp) for new in found.values()):
            return {name: head + new.removeprefix(of_ddp) for name, new in found.items()}
    return found


@lru_cache(_MAX_CACHED)
def base_name_in_peft(name: str, adapter: str = "") -> str | None:
    """Return the base model's name of a parameter inside a PEFT model; None for LoRA's own.

    ``base_model.model.model.layers.0.q_proj.base_layer.weight`` gives
    ``model.layers.0.q_proj.weight``. With ``adapter``, its trained copy of a whole
    module (``modules_to_save``) stands in place of the original; without, the original.
    """
    parts = unwrapped_name(name).split(".")
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    if any(p.startswith("lora_") or p == "token_adapter" for p in parts):
        return None
    if "modules_to_save" in parts:
        i = parts.index("modules_to_save")
        return ".".join((*parts[:i], *parts[i + 2 :])) if parts[i + 1] == adapter else None
    if "original_module" in parts:
        if adapter:
            return None
        parts.remove("original_module")
    return ".".join(part for part in parts if part != "base_layer")


@lru_cache(_MAX_CACHED)
def adapter_tensor_name(name: str, adapter: str) -> str | None:
    """Return the name that PEFT's save_pretrained gives a parameter of ``adapter``; None for
    others.

    ``model.layers.0.q_proj.lora_A.math.weight`` gives ``model.layers.0.q_proj.lora_A.weight``
    for the adapter ``math``.
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part in LORA and parts[i + 1] == adapter:
            return ".".join((*parts[: i + 1], *parts[i + 2 :]))
    return None


def reverter(model: torch.nn.Module) -> Revert | None:
    """Return transformers' own conversion back to checkpoint names, or None for another model."""
    if not hasattr(model, "config"):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # no transformers, or one that keeps checkpoint names in memory
        return None
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    outline = cache(partial(_outline, model, {}))  # a push of a plan that is kept needs none
    return lambda tensors: revert_weight_conversion(outline(), tensors)


def _outline(
    module: torch.nn.Module,
    made: dict[int, torch.nn.Module],
    configs: dict[int, object] | None = None,
) -> torch.nn.Module:
    """Return a model as transformers is to look its conversions up. It knows models, and those in
    them, by their classes, and FSDP2 replaces each by one of its own: a copy has the class from
    before. Parameters, and all that needs no other class, are the same.

    Args:
        module: The model, or what is in it.
        made: Outlines by the ids of modules; added to.
        configs: Memo of ``deepcopy``, to copy configurations, too; None leaves them as they are.
    """
    from transformers import PreTrainedModel

    if id(module) in made:
        return made[id(module)]
    children = {
        name: None if child is None else _outline(child, made, configs)
        for name, child in module._modules.items()
    }
    kind, is_model = type(module), isinstance(module, PreTrainedModel)
    if is_model:
        kind = next(each for each in kind.__mro__ if not each.__module__.startswith("torch."))
    own = module
    is_kept = all(child is module._modules[name] for name, child in children.items())
    if kind is not type(module) or not is_kept or (is_model and configs is not None):
        own = object.__new__(kind)  # ``copy.copy`` would have FSDP2's classes begin it anew
        vars(own).update(vars(module), _modules=children)
        if is_model and configs is not None:
            vars(own)["config"] = copy.deepcopy(module.config, configs)
    made[id(module)] = own
    return own


def plan_conversions(
    params: Mapping[str, torch.Tensor], revert: Revert | None
) -> tuple[list[Conversion], dict[str, torch.Tensor]]:
    """Group parameters so that each group converts on its own.

    Args:
        params: Parameter names, in order, with tensors of which only shape and
            dtype are used.
        revert: The model's way back to checkpoint names, as ``reverter`` gives it.

    Returns:
        The groups in order, and a meta tensor (shape, dtype) for each target.
        Converting group by group gives exactly what converting all at once would.
    """
    meta = {name: torch.empty_like(t, device="meta") for name, t in params.items()}
    if revert is None:
        return [Conversion((name,), (name,), True) for name in meta], meta
    whole = _reverted(meta, revert)
    kept = _kept_names(meta, whole)
    groups: list[Conversion] = []
    for _, layer in groupby(meta, key=layer_of):
        groups += _plan_layer(list(layer), meta, whole, kept, revert)
    if {target for group in groups for target in group.targets} != set(whole):
        # A conversion across layers: rare, and right only when done at once.
        _log.warning(
            "the checkpoint names of this model need all its tensors at once: the push takes "
            "the memory of a whole copy"
        )
        groups = [Conversion(tuple(meta), tuple(whole), False)]
    storages = {_storage(tensor): name for name, tensor in meta.items()}

    def block(target: torch.Tensor) -> TensorBlock | None:
        name = storages.get(_storage(target))
        if name is None or meta[name]._version or target.dtype != meta[name].dtype:
            return None  # computed, perhaps in the source's own place
        if not (meta[name].is_contiguous() and target.is_contiguous()):
            return None
        begin = int(target.storage_offset())
        return TensorBlock(name, begin, begin + target.numel())

    return [
        replace(group, blocks=tuple(block(whole[target]) for target in group.targets))
        for group in groups
    ], whole


class _WithoutCopies(TorchFunctionMode):
    """Mode in which a tensor that would be copied stands for its copy. A target made by views alone
    is then seen to be elements of its parameter, and which."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _reverted(meta: Mapping[str, torch.Tensor], revert: Revert) -> dict[str, torch.Tensor]:
    try:
        with _WithoutCopies():
            return revert(dict(meta))
    except Exception:  # noqa: BLE001 (a converter that needs its copies as they are)
        return revert(dict(meta))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _kept_names(
    meta: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Map parameters that came out unchanged, and were used for nothing else, to checkpoint names.
    To convert each by itself would take milliseconds a layer."""
    of_storage: dict[int, list[str]] = {}
    for target, tensor in whole.items():
        of_storage.setdefault(_storage(tensor), []).append(target)
    return {
        name: targets[0]
        for name, tensor in meta.items()
        if len(targets := of_storage.get(_storage(tensor), [])) == 1
        and whole[targets[0]] is tensor
        and not tensor._version  # or it was computed in its own place
    }


def _plan_layer(
    names: Sequence[str],
    meta: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    kept: Mapping[str, str],
    revert: Revert,
) -> list[Conversion]:
    """Plan one group for each parameter where that agrees with the whole; group the rest together.

    Args:
        kept: See ``_kept_names``.

    A parameter that only converts with others (many-to-one) comes out under a name
    or shape that the whole does not have, or not at all.
    """
    groups: list[Conversion] = []
    rest: list[str] = []
    for name in names:
        if name in kept:
            groups.append(Conversion((name,), (kept[name],), True))
            continue
        out = _try(revert, {name: meta[name]})
        if out and all(k in whole and whole[k].shape == t.shape for k, t in out.items()):
            groups.append(Conversion((name,), tuple(out), False))
        else:
            rest.append(name)
    if rest:
        out = revert({name: meta[name] for name in rest})
        groups.append(Conversion(tuple(rest), tuple(out), False))
    return groups


def _try(revert: Revert, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    try:
        return revert(tensors)
    except Exception:  # noqa: BLE001 (a converter that needs more than one tensor)
        return {}


_Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]
_Planned = tuple[list[Conversion], dict[str, torch.Tensor]]
_PLANNED: WeakKeyDictionary[torch.nn.Module, tuple[_Signature, _Planned]] = WeakKeyDictionary()


def cached_conversions(
    model: torch.nn.Module, params: Mapping[str, torch.Tensor], revert: Revert | None
) -> _Planned:
    """Return ``plan_conversions`` of a model, made once since it costs milliseconds a layer."""
    signature = tuple((name, param.shape, param.dtype) for name, param in params.items())
    kept = _PLANNED.get(model)
    if kept is None or kept[0] != signature:
        kept = _PLANNED[model] = (signature, plan_conversions(params, revert))
    return kept[1]


@dataclass(frozen=True)
class CheckpointMapping:
    """Mapping of a model\'s parameters to the tensors of its checkpoint."""

    kind: str
    """Name of the model's class."""
    revert: Revert | None
    """See ``reverter``."""
    model: torch.nn.Module
    """Model that plans are kept for."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> CheckpointMapping:
        """Return the mapping of a model, whose configuration is looked at when it is used."""
        return cls(type(model).__name__, reverter(model), model)

    @classmethod
    def frozen(cls, model: Any) -> CheckpointMapping:
        """Return the mapping of a model as it is now, whatever becomes of its configuration."""
        own: Any = model
        if reverter(model) is not None:
            own = _outline(model, {}, {})
            kept = getattr(model, "_weight_conversions", None)
            own._weight_conversions = None if kept is None else list(kept)
        return cls(type(model).__name__, reverter(own), model)

    def conversions(self, params: Mapping[str, torch.Tensor]) -> _Planned:
        """Return ``plan_conversions`` of some of the model's parameters; kept for the next push."""
        return cached_conversions(self.model, params, self.revert)
