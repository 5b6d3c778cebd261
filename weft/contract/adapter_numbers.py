"""The numbers of an adapter's config: ranks and alphas, and the scalings made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.contract.adapter_types import shown
from weft.contract.errors import InvalidAdapterError

#: What scalings are multiplied in at best; a larger one is infinite there.
_LARGEST = 3.4028234663852886e38


def check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse ranks, alphas and scalings that are no finite numbers.

    JSON has no NaN, but Python's reader takes it, and ``1e999`` as infinity. Such a
    scaling makes every answer NaN, with tensors that are all in order.

    Args:
        config: PEFT's; ``r`` and ``lora_alpha`` are there. Patterns that are no objects are
            for others to refuse.

    Raises:
        InvalidAdapterError: Names the setting.
    """
    rank = _rank("r", config["r"])
    alpha = _alpha("lora_alpha", config["lora_alpha"])
    ranks = [rank, *(_rank(f"rank_pattern[{k!r}]", v) for k, v in _pattern(config, "rank"))]
    alphas = [alpha, *(_alpha(f"alpha_pattern[{k!r}]", v) for k, v in _pattern(config, "alpha"))]
    largest = max(abs(alpha) for alpha in alphas)
    smallest = min(ranks)
    scaling = largest / (math.sqrt(smallest) if config.get("use_rslora") else smallest)
    if scaling > _LARGEST:
        raise InvalidAdapterError(
            f"the scaling of alpha {largest:g} and rank {smallest} is {scaling:g}, which is "
            "infinite in the element types that adapters are served in",
            metadata={"setting": "lora_alpha"},
        )


def _pattern(config: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    found = config.get(f"{what}_pattern")
    return list(found.items()) if isinstance(found, Mapping) else []


def _rank(setting: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise _refused(setting, value, "a positive integer")
    return value


def _alpha(setting: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN compares as false; an integer of a thousand digits compares, and cannot be a float.
    if not is_number or not abs(value) <= _LARGEST:  # type: ignore[arg-type]
        raise _refused(setting, value, "a finite number")
    return float(value)  # type: ignore[arg-type]


def _refused(setting: str, value: object, wanted: str) -> InvalidAdapterError:
    text = "an integer of many digits" if _is_huge(value) else shown(value)
    return InvalidAdapterError(
        f"{setting} is {text}; it must be {wanted}", metadata={"setting": setting[:200]}
    )


def _is_huge(value: object) -> bool:
    """Whether it is an integer that Python would not even print."""
    return isinstance(value, int) and value.bit_length() > 1024
