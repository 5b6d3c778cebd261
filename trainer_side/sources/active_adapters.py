"""What a PEFT model computes with, beside what is pushed of it."""

from __future__ import annotations

from typing import Any

import torch


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
