"""Preflight of a LoRA adapter: refuse what vLLM would refuse late, ignore or misread.

Pure: from PEFT's config, the names and shapes of the tensors, the base's
reference and the replicas' capabilities. The rules are those measured against
vLLM 0.26 to 0.32 and PEFT 0.21; each has a test.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from weft.contract.adapter_numbers import check_numbers
from weft.contract.adapter_types import check_types, shown
from weft.contract.capabilities import Capabilities
from weft.contract.errors import InvalidAdapterError, NotReadyError
from weft.contract.reference import Reference, is_output_layer
from weft.contract.tensors import TensorMeta, shape_text

#: Longest adapter_config.json, in bytes.
MAX_CONFIG_BYTES = 2**20

_PREFIX = "base_model.model."
# Of a module: what means nothing else as a regular expression ("." aside).
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LORA_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Starts that leave an ordinary LoRA behind; any other (PiSSA, OLoRA, CorDA,
# LoftQ...) changes the base weights at initialisation.
_PLAIN_STARTS = {"gaussian", "eva", "orthogonal"}
# Settings whose mere presence changes what the adapter means, with what to do.
_REFUSED = {
    "use_dora": "DoRA is not served by vLLM: push it merged (it has no plain delta)",
    "lora_bias": "lora_bias is not served by vLLM: train without it or push it merged",
    "modules_to_save": "modules_to_save is not served by vLLM: push the whole model merged",
    "trainable_token_indices": "vLLM silently ignores trainable_token_indices: push it merged",
    "alora_invocation_tokens": "activated LoRA is not served by vLLM",
    "layer_replication": "layer_replication is not served by vLLM",
    "use_qalora": "QA-LoRA is not served by vLLM",
    "use_bdlora": "block-diagonal LoRA is not served by vLLM",
}


def check_adapter(
    config_json: str,
    metas: Sequence[TensorMeta],
    reference: Reference,
    capabilities: Capabilities,
) -> None:
    """Refuse an adapter that a replica could not serve exactly.

    Args:
        config_json: PEFT's adapter_config.json.
        metas: Tensors by PEFT's saved names
            (``base_model.model.<module>.lora_A.weight``); A is (rank, in),
            B is (out, rank).
        reference: The served base.
        capabilities: Of one replica.

    Raises:
        InvalidAdapterError: Names the setting or parameter, and what to do.
        NotReadyError: ``LORA_DISABLED``.
    """
    if not capabilities.lora_enabled:
        raise NotReadyError(
            "the replicas were started without --enable-lora; restart them with it",
            reason="LORA_DISABLED",
        )
    config = parse_config(config_json)
    check_settings(config)
    _check_names(config)
    ranks = _check_tensors(metas, reference, capabilities)
    _check_rank(config, ranks, capabilities)
    _check_experts(ranks, reference, capabilities)
    _check_complete(config, ranks, reference)


def parse_config(config_json: str) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises:
        InvalidAdapterError: Not a JSON object of a LoRA config, or too long.
    """
    if len(config_json.encode()) > MAX_CONFIG_BYTES:
        raise InvalidAdapterError(f"the adapter config is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(config_json)
    except ValueError as error:
        raise InvalidAdapterError(f"the adapter config is not JSON: {error}") from None
    except RecursionError:
        raise InvalidAdapterError("the adapter config is nested too deeply") from None
    if not isinstance(config, dict):
        raise InvalidAdapterError("the adapter config is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise InvalidAdapterError(
            f"peft_type is {shown(config.get('peft_type'))}; only LORA can be served"
        )
    if not _is_positive_int(config.get("r")):
        raise InvalidAdapterError(f"r is {shown(config.get('r'))}; it must be a positive integer")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise InvalidAdapterError(
            f"lora_alpha is {shown(config.get('lora_alpha'))}; it must be a number"
        )
    check_types(config)
    check_numbers(config)
    return config


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse variants by the config alone; a trainer asks before it gathers a tensor.

    Raises:
        InvalidAdapterError: Names the setting, and what to do.
    """
    for key, advice in _REFUSED.items():
        if config.get(key):
            raise InvalidAdapterError(
                f"{key}={shown(config[key])}: {advice}", metadata={"setting": key}
            )
    if config.get("bias", "none") != "none":
        raise InvalidAdapterError(
            f"bias={shown(config['bias'])}: trained biases are not served by vLLM; use bias='none'",
            metadata={"setting": "bias"},
        )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise InvalidAdapterError(
            f"init_lora_weights={shown(start)} changes the base weights; convert it to a plain "
            "LoRA with PEFT's path_initial_model_for_weight_conversion, or push it merged",
            metadata={"setting": "init_lora_weights"},
        )


def _check_names(config: Mapping[str, Any]) -> None:
    """Refuse regular expressions: matching one can take for ever, and PEFT's own rule for
    them needs the trainer's model. Publishers send names in place of them."""
    for setting in ("target_modules", "exclude_modules"):
        if config.get(setting) and isinstance(config[setting], str):
            raise _pattern(setting, config[setting], "a list of modules")
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(setting) or {}
        if not isinstance(patterns, Mapping):
            raise _pattern(setting, str(patterns), "a map of modules to numbers")
        for name in patterns:
            if not _PLAIN_NAME.fullmatch(name):
                raise _pattern(setting, name, "the name of a module, or the end of one")


def _pattern(setting: str, given: str, wanted: str) -> InvalidAdapterError:
    return InvalidAdapterError(
        f"{setting} has {given[:80]!r}; it must be {wanted}, without patterns (a Publisher puts "
        "the names that they match in their place)",
        metadata={"setting": setting},
    )


def _check_tensors(
    metas: Sequence[TensorMeta], reference: Reference, capabilities: Capabilities
) -> dict[str, int]:
    """Check each pair against the base; return the rank by module."""
    sides: dict[str, dict[str, TensorMeta]] = defaultdict(dict)
    for meta in metas:
        match = _LORA_NAME.fullmatch(meta.name.removeprefix(_PREFIX))
        if match is None or not meta.name.startswith(_PREFIX):
            raise _refused(
                meta,
                "is not a LoRA weight that vLLM can serve "
                f"(expected {_PREFIX}<module>.lora_A.weight or .lora_B.weight); push it merged",
            )
        if not meta.dtype.is_float:
            raise _refused(meta, f"is {meta.dtype.torch_name}; adapters are floating point")
        sides[match["module"]][match["side"]] = meta
    allowed = set(capabilities.lora_modules)
    ranks: dict[str, int] = {}
    for module, pair in sides.items():
        first = next(iter(pair.values()))
        if len(pair) != 2:
            other = "B" if "A" in pair else "A"
            raise _refused(first, f"has no lora_{other}: both sides are needed")
        if module.rsplit(".", 1)[-1] not in allowed and ".experts" not in module:
            raise _refused(
                first,
                f"is for {module!r}, which cannot carry a LoRA here; "
                f"vLLM serves {', '.join(sorted(allowed)) or 'none'}",
            )
        weight = reference.by_name.get(module + ".weight")
        if weight is None:
            raise _refused(first, _why_not_there(module, reference))
        ranks[module] = _check_pair(pair["A"], pair["B"], weight)
    return ranks


def _why_not_there(module: str, reference: Reference) -> str:
    """A reference lists no output layer whose weight is the embedding's."""
    if is_output_layer(module):
        return (
            f"is for {module!r}, whose weight is tied to the embedding's in the served "
            f"{reference.architecture}: it cannot carry a LoRA of its own, train without it"
        )
    return f"is for {module!r}, which {reference.architecture} does not have"


def _check_pair(a: TensorMeta, b: TensorMeta, weight: TensorMeta) -> int:
    if len(weight.shape) != 2 or len(a.shape) != 2 or len(b.shape) != 2:
        raise _refused(a, f"has shape ({shape_text(a.shape)}); a LoRA of a 2-D weight is needed")
    out_features, in_features = weight.shape
    rank = a.shape[0]
    if a.shape != (rank, in_features):
        raise _refused(a, f"has shape ({shape_text(a.shape)}), the base needs (rank,{in_features})")
    if b.shape != (out_features, rank):
        raise _refused(
            b, f"has shape ({shape_text(b.shape)}), the base needs ({out_features},{rank})"
        )
    return rank


def _check_rank(
    config: Mapping[str, Any], ranks: Mapping[str, int], capabilities: Capabilities
) -> None:
    patterns = config.get("rank_pattern") or {}
    for module, rank in ranks.items():
        declared = named_value(patterns, module, config["r"])
        if rank != declared:
            raise InvalidAdapterError(
                f"{module!r} has rank {rank}, the config says {declared}: "
                "the scaling would be wrong",
                metadata={"parameter": module},
            )
    largest = max([int(config["r"]), *ranks.values()])
    if largest > capabilities.max_lora_rank:
        raise InvalidAdapterError(
            f"rank {largest} is above the replicas' --max-lora-rank {capabilities.max_lora_rank}",
            metadata={"max_lora_rank": str(capabilities.max_lora_rank)},
        )


def named_value(values: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value for a module: of the first name that is the module's, or that it ends with
    from a "." on. PEFT's rule, for names; O(components of the name).

    Source: peft.utils.other.get_pattern_key.
    """
    parts = module.split(".")
    ends = {end for i in range(len(parts)) if (end := ".".join(parts[i:])) in values}
    if len(ends) > 1:
        return next(value for name, value in values.items() if name in ends)
    return values[ends.pop()] if ends else default


def _check_experts(
    ranks: Mapping[str, int], reference: Reference, capabilities: Capabilities
) -> None:
    """Experts must be given whole: vLLM fills what is absent with zeros or fails late."""
    touched = {m.split(".experts.", 1)[0] for m in ranks if ".experts." in m}
    if touched and not capabilities.lora_on_experts:
        first = next(m for m in ranks if ".experts." in m)
        raise InvalidAdapterError(
            f"{first!r}: LoRA on experts is not served by these replicas; push it merged",
            metadata={"parameter": first},
        )
    for layer in sorted(touched):
        expected = [
            name.removesuffix(".weight")
            for name in reference.by_name
            if name.startswith(layer + ".experts.") and name.endswith(".weight")
        ]
        lacking = [module for module in expected if module not in ranks]
        if lacking:
            raise InvalidAdapterError(
                f"{lacking[0]!r} has no LoRA though other experts of {layer!r} have: "
                "give all experts and projections, or none",
                metadata={"parameter": lacking[0]},
            )


def _check_complete(
    config: Mapping[str, Any], ranks: Mapping[str, int], reference: Reference
) -> None:
    """Every module that the config targets must be there: vLLM accepts partial sets."""
    for module in _targeted_modules(config, reference):
        if module not in ranks:
            raise InvalidAdapterError(
                f"the config targets {module!r}, but its lora_A and lora_B are not given",
                metadata={"parameter": module},
            )


def _targeted_modules(config: Mapping[str, Any], reference: Reference) -> list[str]:
    """Modules of the base that PEFT would have wrapped for this config.

    Source: peft.tuners.tuners_utils.check_target_module_exists.
    """
    modules = [
        meta.name.removesuffix(".weight")
        for meta in reference.tensors
        if meta.name.endswith(".weight") and len(meta.shape) == 2
    ]
    if config.get("target_parameters"):
        return []  # parameters, not modules: _check_tensors has refused or matched them
    layers = config.get("layers_to_transform")
    wanted = {layers} if isinstance(layers, int) else set(layers or ())
    targets, excluded = (
        {name: True for name in config.get(setting) or () if isinstance(name, str)}
        for setting in ("target_modules", "exclude_modules")
    )
    return [
        module
        for module in modules
        if named_value(targets, module, False)
        and not named_value(excluded, module, False)
        and (not wanted or _layer_index(module) in wanted)
    ]


def _layer_index(module: str) -> int | None:
    return next((int(part) for part in module.split(".") if part.isdigit()), None)


def _refused(meta: TensorMeta, why: str) -> InvalidAdapterError:
    return InvalidAdapterError(f"{meta.name!r} {why}", metadata={"parameter": meta.name})
