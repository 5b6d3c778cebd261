"""LoRA of all experts of a layer at once, as PEFT saves it where a model stacks its experts.

transformers keeps a layer's experts as two tensors, ``gate_up_proj`` and ``down_proj``, of three
dims. PEFT's LoRA of the first is ``<layer>.experts.base_layer``, that of the second
``<layer>.experts``: A is (experts x rank, in), B is (out, rank x experts), the experts' ranks one
behind the other in A, and side by side in B's columns.

Source: peft.tuners.lora.layer.ParamWrapper; vllm.lora.model_manager._convert_3d_to_2d_moe_lora.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from weft_rl.contract.tensors import Reference

_STACK = re.compile(r"(?P<experts>.+\.experts)(?P<inner>\.base_layer)?")
#: Parameters that the two are of, in the order of ``StackLayout.matrices``.
PARAMETERS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class StackLayout:
    """Shapes of a layer's experts, which one LoRA is for."""

    num_experts: int
    matrices: tuple[tuple[int, int], tuple[int, int]]
    """(out, in) of one expert's gate and up projections together, and of its down projection."""


def is_stack(module: str) -> bool:
    """Return whether a LoRA's module is one of a layer's experts together."""
    return _STACK.fullmatch(module) is not None


def parameter_of(module: str) -> str:
    """Return the name that PEFT's patterns are matched against: that of the parameter, for
    experts together; else the module's own."""
    match = _STACK.fullmatch(module)
    if match is None:
        return module
    return f"{match['experts']}.{PARAMETERS[0 if match['inner'] else 1]}"


def stacks_of(modules: Collection[str], reference: Reference) -> dict[str, list[str]]:
    """Map the experts of each layer to the names of their LoRAs, that of gate and up first."""
    found: dict[str, list[str]] = {}
    for module in modules:
        match = _STACK.fullmatch(module)
        if match is not None and module not in reference.modules_by_name:
            found.setdefault(match["experts"], []).append(module)
    return {experts: sorted(names, key=len, reverse=True) for experts, names in found.items()}


def shapes_of(experts: str, reference: Reference) -> StackLayout | None:
    """Return the shapes of the experts of a layer; None if the base has no gated ones there."""
    stacked = [reference.by_name.get(f"{experts}.{name}") for name in PARAMETERS]
    if stacked[0] is not None and stacked[1] is not None:
        (count, *up), (_, *down) = stacked[0].shape, stacked[1].shape
        if len(up) != 2 or len(down) != 2:
            return None
        # (experts, out, in), or transposed, as gpt-oss has them.
        up, down = (up, down) if up[1] == down[0] else (up[::-1], down[::-1])
        return StackLayout(count, ((up[0], up[1]), (down[0], down[1])))
    own = reference.modules_by_experts.get(experts, ())
    numbers = {module.name.removeprefix(f"{experts}.").partition(".")[0] for module in own}
    shapes = Counter(module.shape for module in own).most_common()
    if not own or len(own) != 3 * len(numbers) or len(shapes) > 2:
        return None
    inner, hidden = shapes[0][0]  # two of three: gate and up
    if shapes[-1][0] != (hidden, inner):
        return None
    return StackLayout(len(numbers), ((2 * inner, hidden), (hidden, inner)))
