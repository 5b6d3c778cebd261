"""A PEFT model's LoRA adapter, in the names PEFT saves it by."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from trainer_side.params.choose import Opened
from trainer_side.params.params import Params
from trainer_side.sources.adapter_config import config_in_names
from trainer_side.sources.module_source import reference_metas
from trainer_side.sources.names import adapter_tensor_name, base_name_in_peft
from trainer_side.sources.source import CastRule, ParamsSource
from weft.contract.adapter_config import check_settings, parse_config
from weft.contract.errors import InvalidAdapterError
from weft.contract.tensors import base_fingerprint


@dataclass(frozen=True)
class Adapter:
    """An adapter ready to push."""

    source: ParamsSource
    config_json: str
    base_fingerprint: str
    """Fingerprint of the base it was trained on; empty when that is not known."""


def adapter_of_model(
    opened: Opened, adapter_name: str, cast: CastRule, *, check_base: bool
) -> Adapter:
    """The adapter ``adapter_name`` of a PEFT model; its tensors by reference. The base
    is not read.

    Raises:
        InvalidAdapterError: Not a PEFT model, no such adapter, no tensors, or a variant
            that cannot be served.
    """
    model, params = opened.module, opened.params
    configs: dict[str, Any] | None = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        raise InvalidAdapterError(
            f"{type(model).__name__} is not a PEFT model; give get_peft_model's result, or the "
            "directory that save_pretrained wrote"
        )
    if adapter_name not in configs:
        raise InvalidAdapterError(
            f"the model has no adapter {adapter_name!r}; it has {', '.join(sorted(configs))}"
        )
    config_json = config_to_json(configs[adapter_name])
    check_settings(parse_config(config_json))
    names = adapter_parameters(params, adapter_name)
    if not names:
        raise InvalidAdapterError(f"adapter {adapter_name!r} has no tensors")
    source = ParamsSource(params, names, cast, f"{params.kind} PEFT adapter {adapter_name!r}")
    config_json = config_in_names(config_json, names.values(), lambda: _matrices(params))
    fingerprint = _fingerprint(model, params) if check_base else ""
    return Adapter(source, config_json, fingerprint)


def adapter_parameters(params: Params, adapter_name: str) -> dict[str, str]:
    """Names of an adapter's parameters to those PEFT saves them by."""
    return {
        own: name
        for own in params.metas
        if (name := adapter_tensor_name(own, adapter_name)) is not None
    }


def active_remarks(model: torch.nn.Module, adapter_name: str) -> tuple[str, ...]:
    """How the trainer's own forward differs from what the pushed adapter will answer.

    Args:
        model: A PEFT model, unwrapped; its first adapted layer stands for all, since PEFT
            switches them together.
        adapter_name: The adapter that is pushed.
    """
    layer: Any = next(
        (module for module in model.modules() if hasattr(module, "_disable_adapters")), None
    )
    if layer is None:
        return ()
    if layer._disable_adapters:
        return (
            f"adapter {adapter_name!r} was pushed, but adapters are disabled in the trainer: its "
            "own answers are those of the base alone",
        )
    active = list(layer.active_adapters)
    if active == [adapter_name]:
        return ()
    named = ", ".join(map(repr, active)) or "none"
    return (
        f"adapter {adapter_name!r} was pushed, but the trainer computes with {named}: say "
        "adapter_name= if that is what should be served",
    )


def config_to_json(config: Any) -> str:
    """A PEFT config as its save_pretrained would write it. Of several patterns the first
    that matches counts: their order is kept."""
    settings = config.to_dict()
    return json.dumps({key: settings[key] for key in sorted(settings)}, default=_plain)


def _matrices(params: Params) -> list[str]:
    """Modules of a PEFT model's base whose weight is a matrix."""
    suffix = ".weight"
    return [
        name.removesuffix(suffix)
        for raw, meta in params.metas.items()
        if meta.dim() == 2
        and (name := base_name_in_peft(raw)) is not None
        and name.endswith(suffix)
    ]


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    return str(value)


def _fingerprint(model: Any, params: Params) -> str:
    """Fingerprint of the base inside a PEFT model; empty if it is quantised.

    A quantised base holds packed bytes whose shapes say nothing; the shapes of the
    LoRA pairs are checked against the served base all the same.
    """
    base = model.get_base_model()
    metas = {
        name: meta
        for raw, meta in params.metas.items()
        if (name := base_name_in_peft(raw)) is not None
    }
    if any(not meta.is_floating_point() for meta in metas.values()):
        return ""
    architectures = getattr(getattr(base, "config", None), "architectures", None)
    architecture = architectures[0] if architectures else type(base).__name__
    return base_fingerprint(architecture, reference_metas(base, metas))
