"""Layers of a PEFT model that an adapter changes: what they compute with, found by looking at them.

A push sends factors and one scaling for each module, and a receiver computes ``W x + s B A x``.
Whatever else takes part in the model's own forward is found here and refused by name: layers and
variants that compute something else, tensors and factors that are not sent, other adapters that are
active, hooks. What is not known is refused, so that a newer PEFT is never served as plain LoRA.

Source: peft.tuners.tuners_utils.BaseTunerLayer, peft.tuners.lora.layer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from trainer_side.params.params import ModelWalk, own_class, wrapper_of
from weft_rl.contract.adapter_config import MERGE_A_COPY, base_changing_setting
from weft_rl.contract.errors import InvalidAdapterError, UnsupportedError, WeftError

#: What is made of an adapter: it is sent as it is, or merged into the base that is sent.
Use = Literal["adapter", "merged"]

# PEFT's layers that compute W x + s B A x, whatever the base's weights are packed in.
_LORA_LAYERS = frozenset(
    {
        *("Linear", "Embedding", "ParamWrapper", "Linear4bit", "Linear8bitLt", "TeLinear"),
        *("GPTQLoraLinear", "AwqLoraLinear", "AqlmLoraLinear", "EetqLoraLinear", "HqqLoraLinear"),
        *("TorchaoLoraLinear", "IncLoraLinear"),
    }
)
_MERGED_LAYERS = frozenset({"Linear", "Embedding", "ParamWrapper", "Linear4bit", "Linear8bitLt"})
# Variants that differ from LoRA in how factors are trained alone.
_PLAIN_VARIANTS = frozenset({"MiCALinearVariant", "MiCAEmbeddingVariant"})
_DORA = frozenset({"DoraLinearVariant"})
# Parts and settings of a LoRA layer that are sent, or are no part of its sums.
_KNOWN_PARTS = frozenset(
    {"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_dropout"}
)
_KNOWN_SETTINGS = frozenset({"r", "lora_alpha", "scaling", "use_dora", "use_rslora", "lora_bias"})
# Packages whose hooks bring parameters to where they are needed, and change no values.
_FRAMEWORKS = frozenset(
    {"torch", "deepspeed", "accelerate", "transformers", "peft", "trl", "verl", "swift"}
)
# Packages whose forward of a base layer computes with its quantised weights, as replicas do.
_QUANTISERS = frozenset({"compressed_tensors"})
_MAX_NAMED = 3


@dataclass(frozen=True)
class LoraSettings:
    """Settings of one adapter's layers, as they were when they were looked at."""

    scalings: Mapping[str, float]
    """Factor that each layer multiplies the product by, by the layer's unwrapped name."""
    experts: Mapping[str, int]
    """Number of experts that a layer's factors are for, where these are several."""


def lora_layers(model: ModelWalk, adapter: str, use: Use) -> LoraSettings:
    """Look at the layers of an adapter; not collective, reads no values but the scalings.

    Raises:
        InvalidAdapterError: They compute with what is not sent; names it.
        UnsupportedError: Layers of a kind that cannot be merged during a push.
    """
    found = _changed(model)
    state = found.state(adapter)
    if found.fine.get((adapter, use)) != state:
        _check(found, adapter, use)
        found.fine[adapter, use] = state
    own = found.of(adapter)
    return LoraSettings(
        {path: _scaling(layer, path, adapter) for path, layer in own.items()},
        {
            path: layer.num_experts
            for path, layer in own.items()
            if layer.__dict__.get("num_experts", 1) > 1
        },
    )


def layer_scalings(model: ModelWalk, adapter: str) -> dict[str, float]:
    """Return the scaling that each layer of an adapter has now, by the layer's path; unchecked."""
    return {path: layer.scaling[adapter] for path, layer in _changed(model).of(adapter).items()}


class _LayerTable:
    """Table of the layers that any adapter changes, and modules that one has trained copies of.

    To look at each of them takes longer than to send a small adapter. What was found to be fine is
    so until ``state`` changes, or the model's structure, after which these are made anew.
    """

    def __init__(self, walked: ModelWalk) -> None:
        kinds = {
            kind for kind in {*map(type, walked.modules)} if _is_tuner(kind) or _is_whole(kind)
        }
        self.all: dict[str, Any] = {
            path.removesuffix("."): module
            for path, module in walked.by_path.items()
            if type(module) in kinds
        }
        self.tuners = {p: each for p, each in self.all.items() if "scaling" in each.__dict__}
        self.fine: dict[tuple[str, Use], object] = {}
        parts = [*dict.fromkeys(p for each in self.all.values() for p in _parts(each))]
        self._parts, self._tables = parts, [part.__dict__ for part in parts]
        self._hooks = [h for p in parts for h in (p._forward_hooks, p._forward_pre_hooks)]

    def of(self, adapter: str) -> dict[str, Any]:
        """Return the layers that have factors of an adapter, by their paths."""
        return {path: each for path, each in self.tuners.items() if adapter in each.scaling}

    def state(self, adapter: str) -> object:
        """Return all that ``_check`` depends on, beside the model's structure: classes, attributes,
        hooks, variants, and which adapters are active or merged."""
        layers = self.all.values()
        return (
            [*map(type, self._parts)],
            [*map(len, self._tables)],
            [*chain.from_iterable(map(dict.values, self._hooks))],
            [type(each.__dict__.get("lora_variant", {}).get(adapter)) for each in layers],
            [each._disable_adapters or (*each._active_adapter,) for each in layers],
            [each.merged_adapters[:] for each in layers],
        )


def _parts(layer: Any) -> Iterator[torch.nn.Module]:
    """Yield a layer, and the parts of it whose forward it calls."""
    yield layer
    for part in (part for part in layer._modules.values() if part is not None):
        yield _inner(part)
        if isinstance(part, torch.nn.ModuleDict):
            yield from map(_inner, part.values())


_CHANGED: WeakKeyDictionary[ModelWalk, _LayerTable] = WeakKeyDictionary()


def _changed(model: ModelWalk) -> _LayerTable:
    if (found := _CHANGED.get(model)) is None:
        found = _CHANGED[model] = _LayerTable(model)
    return found


def _check(found: _LayerTable, adapter: str, use: Use) -> None:
    is_on: dict[bool, str] = {}
    others: dict[str, None] = {}
    for path, layer in found.all.items():
        active = () if layer._disable_adapters else layer.active_adapters
        if _holds(layer, adapter):
            if _is_whole(type(layer)):
                _check_whole_module(layer, path, use)
            else:
                _check_layer(layer, path, adapter, use)
            is_on[adapter in active] = path
        others |= dict.fromkeys(n for n in active if n != adapter and _holds(layer, n))
    if True in is_on and others:
        named = ", ".join(map(repr, sorted(others)))
        raise InvalidAdapterError(
            f"the trainer computes with {adapter!r} and {named} together: activate the one that is "
            f"pushed (model.set_adapter({adapter!r})), or make one of them (add_weighted_adapter)"
        )
    if len(is_on) == 2:
        raise InvalidAdapterError(
            f"adapter {adapter!r} is active in {is_on[True]} and not in {is_on[False]}: activate "
            f"it everywhere (model.set_adapter({adapter!r}), model.enable_adapters())"
        )


def check_base_unchanged(configs: Mapping[str, Any], adapter: str) -> None:
    """Refuse an adapter beside another one that changed the base when it was added.

    Args:
        configs: PEFT's, by the names of their adapters.
        adapter: Name of the adapter that is pushed.

    Raises:
        InvalidAdapterError: Names the other one, and its setting.
    """
    for name, config in configs.items():
        if name != adapter and (setting := base_changing_setting(config.to_dict())):
            raise InvalidAdapterError(
                f"the base was changed when the adapter {name!r} was added ({setting}), and "
                f"{adapter!r} was trained on that: push it merged (push_merged)",
                metadata={"setting": setting.partition("=")[0]},
            )


def check_all_sent(
    model: ModelWalk, adapter: str, sent: Collection[str], known: Collection[str], how: str
) -> None:
    """Refuse a model that trains tensors which a push does not send.

    Args:
        model: A PEFT model; of other adapters than ``adapter`` nothing need be sent.
        adapter: Name of the adapter that is pushed.
        sent: Unwrapped names of the parameters that are sent.
        known: Unwrapped names of all parameters that a push could read.
        how: What to do, for the message.

    Raises:
        InvalidAdapterError: Names some of them, and how many there are.
    """
    trained = [
        name
        for name, param in model.named.items()
        if param.requires_grad and name not in sent and name in known
    ]
    if not trained:
        return
    others = set(getattr(model.modules[0], "peft_config", ())) - {adapter}
    if others:
        containers = _containers(model)
        trained = [name for name in trained if not _is_of(name, others, containers)]
    if not trained:
        return
    named = ", ".join(map(repr, trained[:_MAX_NAMED]))
    more = f" and {len(trained) - _MAX_NAMED} more" if len(trained) > _MAX_NAMED else ""
    raise InvalidAdapterError(
        f"the trainer trains {named}{more} (requires_grad), which a push of the adapter "
        f"{adapter!r} does not send: {how}",
        metadata={"parameter": trained[0], "num_problems": str(len(trained))},
    )


def _is_tuner(kind: type) -> bool:
    """Return whether a class is one of PEFT's layers that hold adapters."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and issubclass(kind, tuners.BaseTunerLayer)


def _is_whole(kind: type) -> bool:
    """Return whether a class is one of PEFT's wrappers of modules that are trained themselves."""
    other = sys.modules.get("peft.utils.other")
    return other is not None and issubclass(kind, other.AuxiliaryTrainingWrapper)


def _holds(layer: Any, adapter: str) -> bool:
    if _is_whole(type(layer)):
        return adapter in layer._adapters
    return any(adapter in getattr(layer, name, ()) for name in layer.adapter_layer_names)


def _check_whole_module(layer: Any, path: str, use: Use) -> None:
    """Refuse a module that is trained whole, or in some of its rows."""
    kind = type(layer).__name__
    if kind == "ModulesToSaveWrapper":
        if use == "adapter":
            raise InvalidAdapterError(
                f"{path} is trained whole (modules_to_save), which an adapter does not hold: push "
                "the whole model merged (push_merged)",
                metadata={"setting": "modules_to_save"},
            )
        return
    what = "trainable tokens" if kind == "TrainableTokensWrapper" else kind
    raise _refusal(use, f"{path}: {what} {_CANNOT[use]}: {MERGE_A_COPY}")


_CANNOT = {"adapter": "cannot be served", "merged": "cannot be merged during a push"}


def _refusal(use: Use, message: str) -> WeftError:
    return (InvalidAdapterError if use == "adapter" else UnsupportedError)(message)


def _check_layer(layer: Any, path: str, adapter: str, use: Use) -> None:
    """Refuse a layer that computes anything but W x + s B A x."""
    kind = own_class(layer)
    if not _is_pefts(kind, _LORA_LAYERS if use == "adapter" else _MERGED_LAYERS):
        what = f"LoRA on a layer of kind {kind.__name__}"
        raise _refusal(use, f"{path}: {what} {_CANNOT[use]}: {MERGE_A_COPY}")
    variant = type(layer.lora_variant.get(adapter))
    is_dora = _is_pefts(variant, _DORA)
    if is_dora and use == "adapter":
        raise InvalidAdapterError(
            f"{path}: DoRA is not served by vLLM: push it merged (push_merged)",
            metadata={"setting": "use_dora"},
        )
    if variant is not type(None) and not is_dora and not _is_pefts(variant, _PLAIN_VARIANTS):
        raise _refusal(use, f"{path}: {variant.__name__} {_CANNOT[use]}: {MERGE_A_COPY}")
    merged = [name for name in layer.merged_adapters if use == "merged" or name != adapter]
    if merged:
        raise InvalidAdapterError(
            f"{path} has {', '.join(merged)} merged into its base already: unmerge it first "
            "(model.unmerge_adapter())"
        )
    for what in _not_sent(layer, adapter, is_dora=is_dora):
        raise InvalidAdapterError(
            f"{path} computes with {what!r}, which Weft does not know: {MERGE_A_COPY}",
            metadata={"parameter": f"{path}.{what}"},
        )
    parts = {
        name: _inner(held[adapter])
        for name in ("lora_A", "lora_B", "lora_dropout")
        if adapter in (held := getattr(layer, name))
    }
    for name, part in parts.items():
        if own_class(part) not in _PARTS[name]:
            raise InvalidAdapterError(
                f"{path}.{name} is a {own_class(part).__name__}, which Weft does not know: "
                f"{MERGE_A_COPY}",
                metadata={"parameter": f"{path}.{name}"},
            )
    if use == "adapter" and "lora_B" in parts and parts["lora_B"].bias is not None:
        raise InvalidAdapterError(
            f"{path}: lora_bias is not served by vLLM: push it merged (push_merged)",
            metadata={"setting": "lora_bias"},
        )
    for name, part in {"": layer, **parts, "base_layer": _inner(layer.base_layer)}.items():
        may_quantise = use == "adapter" and name == "base_layer"
        if (hook := _foreign(part, may_quantise=may_quantise)) is not None:
            raise InvalidAdapterError(
                f"{f'{path}.{name}'.rstrip('.')} has a {hook}, whose effect on the answers cannot "
                "be pushed: remove it before the push"
            )


_PARTS: Mapping[str, tuple[type, ...]] = {
    "lora_A": (torch.nn.Linear,),
    "lora_B": (torch.nn.Linear,),
    "lora_dropout": (torch.nn.Dropout, torch.nn.Identity),
}


def _is_pefts(kind: type, names: Collection[str]) -> bool:
    """Return whether a class is PEFT's own, and none derived from it."""
    return kind.__name__ in names and kind.__module__.startswith("peft.tuners.lora.")


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside wrappers; the module itself if it is none."""
    while (held := module._modules.get(wrapper_of(module)[1])) is not None:
        module = held
    return module


def _not_sent(layer: Any, adapter: str, *, is_dora: bool) -> Iterator[str]:
    """Yield what a layer has for an adapter besides its factors and what they are known by."""
    known = _KNOWN_PARTS | {"lora_magnitude_vector"} if is_dora else _KNOWN_PARTS
    for name, part in layer._modules.items():
        if name not in known and _has(part, adapter):
            yield name
    yield from (name for name, param in layer._parameters.items() if param is not None)
    for name, value in layer.__dict__.items():
        if type(value) is dict and name not in _KNOWN_SETTINGS and name[0] != "_":
            own = value.get(adapter)
            if isinstance(own, float | torch.Tensor) or (isinstance(own, int) and own):
                yield name


def _has(part: Any, adapter: str) -> bool:
    return hasattr(type(part), "__contains__") and adapter in part


def _foreign(module: torch.nn.Module, *, may_quantise: bool) -> str | None:
    """Return what somebody else than a framework has put around a module's forward.

    Args:
        may_quantise: Whether a quantiser may have.
    """
    own = module.__dict__
    is_known = _owner(own.get("_hf_hook")) == "accelerate" or (
        may_quantise and _definer(own.get("forward")) in _QUANTISERS
    )
    if "forward" in own and not is_known:
        return "forward of its own"
    for kind, hooks in (("forward hook", module._forward_hooks),
                        ("forward pre-hook", module._forward_pre_hooks)):  # fmt: skip
        for hook in hooks.values():
            if _owner(hook) not in _FRAMEWORKS:
                return f"{kind} ({getattr(hook, '__qualname__', type(hook).__name__)})"
    return None


def _definer(method: Any) -> str:
    """Return the package that defines a function or method; ``functools.wraps`` names another."""
    names = getattr(getattr(method, "__func__", method), "__globals__", {})
    return str(names.get("__name__", "")).partition(".")[0]


def _owner(given: Any) -> str:
    """Return the package that a function, or an object's class, comes from."""
    while isinstance(given, partial):
        given = given.func
    module = getattr(given, "__module__", None) or type(given).__module__
    return str(module).partition(".")[0]


def _scaling(layer: Any, path: str, adapter: str) -> float:
    scaling = float(layer.scaling[adapter])
    if not math.isfinite(scaling):
        raise InvalidAdapterError(
            f"{path} multiplies by {scaling} (scaling): set_scale or unscale_layer sets it anew"
        )
    return scaling


def _containers(model: ModelWalk) -> set[str]:
    """Return the names that the parts of any adapter are kept under, by adapter."""
    names = {name for each in _changed(model).all.values() for name in each.adapter_layer_names}
    return {name.rpartition(".")[2] for name in names}


def _is_of(name: str, adapters: Iterable[str], containers: Collection[str]) -> bool:
    parts = name.split(".")
    return any(a in containers and b in adapters for a, b in pairwise(parts))
