"""Preflight of a LoRA adapter: refuse what vLLM would refuse late, ignore or misread.

Pure: from PEFT's config, the names and shapes of the tensors, the base's
reference and the replicas' capabilities. The rules are those measured against
vLLM 0.26 to 0.32 and PEFT 0.21; each has a test.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from weft_rl.contract.adapter_config import check_names, check_settings, named_value, parse_config
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import InvalidAdapterError, NotReadyError
from weft_rl.contract.tensors import Reference, TensorMeta, is_output_layer, shape_text

_PREFIX = "base_model.model."
_LORA_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


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
        capabilities: Capabilities of one replica.

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
    check_names(config)
    ranks = _check_tensors(metas, reference, capabilities)
    _check_rank(config, ranks, capabilities)
    _check_experts(ranks, reference, capabilities)
    _check_complete(config, ranks, reference)


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
    _check_applied(sides, capabilities)
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


def _check_applied(
    sides: Mapping[str, Mapping[str, TensorMeta]], capabilities: Capabilities
) -> None:
    """Refuse modules whose LoRA vLLM would ignore, though others of the same name have one."""
    begins = tuple(f"{prefix}." for prefix in capabilities.lora_unapplied)
    found = [module for module in sides if f"{module}.".startswith(begins)] if begins else []
    if not found:
        return
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise InvalidAdapterError(
        f"the adapter is for {found[0]!r}{more}, to which vLLM applies no LoRA here: nothing under "
        f"{', '.join(capabilities.lora_unapplied)} has one. Train without (exclude_modules), push "
        "it merged, or start the replicas with vLLM's --enable-tower-connector-lora, if that "
        "serves this model's encoder",
        metadata={"parameter": found[0]},
    )


def _why_not_there(module: str, reference: Reference) -> str:
    """Say why a reference lacks a module; it lists no output layer whose weight is the
    embedding's."""
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


def _check_experts(
    ranks: Mapping[str, int], reference: Reference, capabilities: Capabilities
) -> None:
    """Refuse experts that are not given whole: vLLM fills what is absent with zeros or fails
    late."""
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
    """Refuse an adapter that lacks a module that the config targets: vLLM accepts partial sets."""
    for module in _targeted_modules(config, reference):
        if module not in ranks:
            raise InvalidAdapterError(
                f"the config targets {module!r}, but its lora_A and lora_B are not given",
                metadata={"parameter": module},
            )


def _targeted_modules(config: Mapping[str, Any], reference: Reference) -> list[str]:
    """List the modules of the base that PEFT would have wrapped for this config.

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
