"""A PEFT model's LoRA adapter, in the names PEFT saves it by."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from trainer_side.module_source import reference_metas
from trainer_side.names import base_name_in_peft
from trainer_side.source import CastRule, TensorSource
from weft.contract.adapter import check_settings, parse_config
from weft.contract.errors import InvalidAdapterError
from weft.contract.reference import base_fingerprint


@dataclass(frozen=True)
class Adapter:
    """An adapter ready to push."""

    source: TensorSource
    config_json: str
    base_fingerprint: str
    """Of the base it was trained on; empty when that is not known."""


def adapter_of_model(
    model: torch.nn.Module, adapter_name: str, cast: CastRule, *, check_base: bool
) -> Adapter:
    """The adapter ``adapter_name`` of a PEFT model; its tensors by reference.

    Raises:
        InvalidAdapterError: Not a PEFT model, no such adapter, no tensors, or a variant
            that cannot be served.
    """
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
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(
        model, adapter_name=adapter_name, save_embedding_layers=False
    )
    if not tensors:
        raise InvalidAdapterError(f"adapter {adapter_name!r} has no tensors")
    source = TensorSource(tensors, cast, f"PEFT adapter {adapter_name!r}")
    fingerprint = _fingerprint(model) if check_base else ""
    return Adapter(source, config_json, fingerprint)


def config_to_json(config: Any) -> str:
    """A PEFT config as its save_pretrained would write it."""
    return json.dumps(config.to_dict(), default=_plain, sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    return str(value)


def _fingerprint(model: Any) -> str:
    """Fingerprint of the base inside a PEFT model; empty if it is quantised.

    A quantised base holds packed bytes whose shapes say nothing; the shapes of the
    LoRA pairs are checked against the served base all the same.
    """
    base = model.get_base_model()
    params = {
        name: param.detach()
        for raw, param in model.named_parameters()
        if (name := base_name_in_peft(raw)) is not None
    }
    if any(not p.is_floating_point() for p in params.values()):
        return ""
    architectures = getattr(getattr(base, "config", None), "architectures", None)
    architecture = architectures[0] if architectures else type(base).__name__
    return base_fingerprint(architecture, reference_metas(base, params))
