"""Preflight of a LoRA adapter: refuse what vLLM would refuse late, ignore or misread.

Pure: from PEFT's config, the names and shapes of the tensors, the base's
reference and the replicas' capabilities. The rules are those measured against
vLLM 0.26 and 0.32 and PEFT 0.21; each has a test.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft_rl.contract import stacked_experts
from weft_rl.contract.adapter_config import (
    check_known,
    check_names,
    check_settings,
    named_value,
    parse_config,
)
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import BaseMismatchError, InvalidAdapterError, NotReadyError
from weft_rl.contract.tensors import (
    LinearModule,
    Reference,
    TensorMeta,
    is_output_layer,
    shape_text,
)

_PREFIX = "base_model.model."
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
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
    check_known(config)
    check_names(config)
    pairs = _check_tensors(metas, reference, capabilities)
    _check_rank(config, pairs, capabilities)
    _check_experts(pairs, reference, capabilities)
    _check_complete(config, pairs, reference, capabilities)


@dataclass(frozen=True)
class TrainedBase:
    """Base model that a trainer has an adapter on."""

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    """Full shapes of weights that are matrices, by the module's name in the trainer's memory;
    without those that are packed there."""

    def check(self, reference: Reference) -> None:
        """Refuse another base than the pool's.

        What is compared is the architecture, the shape of every module that both have, and whether
        the pool has every layer. Neither buffers nor how weights are stored matter to an adapter.

        Raises:
            BaseMismatchError: Names the first difference.
        """
        if self.architecture != reference.architecture:
            raise BaseMismatchError(
                f"the adapter fits a {self.architecture}, the pool serves a "
                f"{reference.architecture}"
            )
        layers = {_layer(name) for name in reference.modules_by_name}
        stacks = {stack for stack, _ in layers}
        for name, shape in self.shapes.items():
            served = [module.shape for module in reference.modules_by_name.get(name, ())]
            stack, layer = _layer(name)
            why = ""
            if served and shape not in served:
                why = (
                    f"whose {name!r} has the shape ({shape_text(shape)}), the pool serves one with "
                    f"({shape_text(served[0])})"
                )
            elif stack in stacks and (stack, layer) not in layers:
                why = f"that has {layer!r}, the pool serves one without"
            if why:
                raise BaseMismatchError(
                    f"the adapter fits a {self.architecture} {why}", metadata={"parameter": name}
                )


def _layer(module: str) -> tuple[str, str]:
    """Return the names of the layer stack and of the layer of a module; empty if none."""
    number = _NUMBER.search(module)
    return (module[: number.start()], module[: number.end()]) if number else ("", "")


@dataclass(frozen=True)
class _LoraEntry:
    """Sides of one module's LoRA."""

    given: str
    """Name that the adapter has for the module."""
    rank: int


def _check_tensors(
    metas: Sequence[TensorMeta], reference: Reference, capabilities: Capabilities
) -> dict[str, _LoraEntry]:
    """Check each pair against the base; return them by the module's checkpoint name."""
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
    pairs = _check_stacked(sides, reference)
    modules = {
        given: _module_of(given, sides[given], reference) for given in sides if given not in pairs
    }
    _check_applied(modules, capabilities)
    allowed = set(capabilities.lora_modules)
    for given, module in modules.items():
        pair = sides[given]
        first = next(iter(pair.values()))
        if len(pair) != 2:
            other = "B" if "A" in pair else "A"
            raise _refused(first, f"has no lora_{other}: both sides are needed")
        names = (given,) if module is None else module.names
        if allowed.isdisjoint(n.rpartition(".")[2] for n in names) and ".experts" not in given:
            raise _refused(
                first,
                f"is for {given!r}, which cannot carry a LoRA here; "
                f"vLLM serves {', '.join(sorted(allowed)) or 'none'}",
            )
        if module is None:
            raise _refused(first, _why_not_there(given, reference))
        if module.name in pairs:
            raise _refused(
                first,
                f"is for {given!r}, and another is for {pairs[module.name].given!r}: these are "
                "names of one module",
            )
        pairs[module.name] = _LoraEntry(given, _check_pair(pair["A"], pair["B"], module.shape))
    return pairs


def _check_stacked(
    sides: Mapping[str, Mapping[str, TensorMeta]], reference: Reference
) -> dict[str, _LoraEntry]:
    """Check pairs that are for all experts of a layer at once; return them by their names."""
    pairs: dict[str, _LoraEntry] = {}
    for experts, given in stacked_experts.stacks_of(sides, reference).items():
        shapes = stacked_experts.shapes_of(experts, reference)
        first = next(iter(sides[given[0]].values()))
        if shapes is None:
            raise _refused(first, f"is for experts, which {reference.architecture} does not have")
        if len(given) != 2 or any(len(sides[name]) != 2 for name in given):
            raise _refused(first, "is for some of the experts' matrices: give A and B of both")
        for name, (out_features, in_features) in zip(given, shapes.matrices, strict=True):
            a, b = sides[name]["A"], sides[name]["B"]
            stacked = a.shape[0] if len(a.shape) == 2 else 0
            rank, rest = divmod(stacked, shapes.num_experts)
            if rest or not rank or a.shape != (stacked, in_features):
                raise _refused(
                    a,
                    f"has shape ({shape_text(a.shape)}), {shapes.num_experts} experts need "
                    f"(rank x {shapes.num_experts},{in_features})",
                )
            if b.shape != (out_features, stacked):
                raise _refused(
                    b,
                    f"has shape ({shape_text(b.shape)}), the base needs ({out_features},{stacked})",
                )
            pairs[name] = _LoraEntry(name, rank)
    return pairs


def _module_of(
    given: str, pair: Mapping[str, TensorMeta], reference: Reference
) -> LinearModule | None:
    """Return the base's module of an adapter's name; None if there is none."""
    found = reference.modules_by_name.get(given, ())
    if len(found) > 1:
        raise _refused(
            next(iter(pair.values())),
            f"is for {given!r}, which is a name of {' and of '.join(repr(m.name) for m in found)}: "
            "give the name in the checkpoint",
        )
    return found[0] if found else None


def _check_applied(modules: Mapping[str, LinearModule | None], capabilities: Capabilities) -> None:
    """Refuse modules whose LoRA vLLM would ignore, though others of the same name have one."""
    found = [
        given
        for given, module in modules.items()
        if _is_unapplied(given if module is None else module.name, capabilities)
    ]
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


def _is_unapplied(module: str, capabilities: Capabilities) -> bool:
    return f"{module}.".startswith(tuple(f"{p}." for p in capabilities.lora_unapplied))


def _why_not_there(module: str, reference: Reference) -> str:
    """Explain why a reference lacks a module: it lists no output layer tied to the embedding."""
    if weight := reference.by_name.get(f"{module}.weight"):
        return f"is for a weight of shape ({shape_text(weight.shape)}); a 2-D weight is needed"
    if is_output_layer(module):
        return (
            f"is for {module!r}, whose weight is tied to the embedding's in the served "
            f"{reference.architecture}: it cannot carry a LoRA of its own, train without it"
        )
    return f"is for {module!r}, which {reference.architecture} does not have"


def _check_pair(a: TensorMeta, b: TensorMeta, shape: tuple[int, ...]) -> int:
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise _refused(a, f"has shape ({shape_text(a.shape)}); a LoRA of a 2-D weight is needed")
    out_features, in_features = shape
    rank = a.shape[0]
    if a.shape != (rank, in_features):
        raise _refused(a, f"has shape ({shape_text(a.shape)}), the base needs (rank,{in_features})")
    if b.shape != (out_features, rank):
        raise _refused(
            b, f"has shape ({shape_text(b.shape)}), the base needs ({out_features},{rank})"
        )
    return rank


def _check_rank(
    config: Mapping[str, Any], pairs: Mapping[str, _LoraEntry], capabilities: Capabilities
) -> None:
    patterns = config.get("rank_pattern") or {}
    for pair in pairs.values():
        declared = named_value(patterns, pair.given, config["r"])
        if pair.rank != declared:
            raise InvalidAdapterError(
                f"{pair.given!r} has rank {pair.rank}, the config says {declared}: "
                "the scaling would be wrong",
                metadata={"parameter": pair.given},
            )
    largest = max([int(config["r"]), *(pair.rank for pair in pairs.values())])
    if largest > capabilities.max_lora_rank:
        raise InvalidAdapterError(
            f"rank {largest} is above the replicas' --max-lora-rank {capabilities.max_lora_rank}",
            metadata={"max_lora_rank": str(capabilities.max_lora_rank)},
        )


def _check_experts(
    pairs: Mapping[str, _LoraEntry], reference: Reference, capabilities: Capabilities
) -> None:
    """Refuse incomplete experts: vLLM fills what is absent with zeros or fails late."""
    stacks = [m for m in pairs if stacked_experts.is_stack(m)]
    single = [m for m in pairs if ".experts." in m and m not in stacks]
    of_experts = stacks + single
    touched = {m.split(".experts.", 1)[0] for m in single}
    if of_experts and not capabilities.lora_on_experts:
        first = of_experts[0]
        raise InvalidAdapterError(
            f"{first!r}: LoRA on experts is not served by these replicas; push it merged",
            metadata={"parameter": first},
        )
    for layer in sorted(touched):
        experts = f"{layer}.experts"
        if experts in stacks:
            raise InvalidAdapterError(
                f"the adapter targets the stacked {experts!r} and the single "
                f"{next(m for m in single if m.startswith(experts))!r}: target only one form",
                metadata={"parameter": experts},
            )
        expected = [module.name for module in reference.modules_by_experts.get(experts, ())]
        lacking = [module for module in expected if module not in pairs]
        if lacking:
            raise InvalidAdapterError(
                f"{lacking[0]!r} has no LoRA though other experts of {layer!r} have: "
                "give all experts and projections, or none",
                metadata={"parameter": lacking[0]},
            )


def _check_complete(
    config: Mapping[str, Any],
    pairs: Mapping[str, _LoraEntry],
    reference: Reference,
    capabilities: Capabilities,
) -> None:
    """Refuse an adapter that lacks a module that the config targets: vLLM accepts partial sets."""
    for module in _targeted_modules(config, reference):
        if module not in pairs and not _is_unapplied(module, capabilities):
            raise InvalidAdapterError(
                f"the config targets {module!r}, but its lora_A and lora_B are not given",
                metadata={"parameter": module},
            )


def _targeted_modules(config: Mapping[str, Any], reference: Reference) -> list[str]:
    """List the modules of the base that PEFT would have wrapped for this config.

    Source: peft.tuners.tuners_utils.check_target_module_exists.
    """
    if config.get("target_parameters"):
        return []  # parameters, not modules: _check_tensors has refused or matched them
    layers = config.get("layers_to_transform")
    wanted = {layers} if isinstance(layers, int) else set(layers or ())
    targets, excluded = (
        {name: True for name in config.get(setting) or () if isinstance(name, str)}
        for setting in ("target_modules", "exclude_modules")
    )

    def is_in(names: Mapping[str, bool], module: LinearModule) -> bool:
        return any(named_value(names, name, False) for name in module.names)

    return [
        module.name
        for module in reference.modules
        if is_in(targets, module)
        and not is_in(excluded, module)
        and (not wanted or _layer_index(module.name) in wanted)
    ]


def _layer_index(module: str) -> int | None:
    return next((int(part) for part in module.split(".") if part.isdigit()), None)


def _refused(meta: TensorMeta, why: str) -> InvalidAdapterError:
    return InvalidAdapterError(f"{meta.name!r} {why}", metadata={"parameter": meta.name})
