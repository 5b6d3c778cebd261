"""Products of LoRA's factors with sums in float32, whatever the application lets its own be.

An application may have float32 products rounded on their way, to TF32 on a GPU or to bfloat16 on
a CPU, and may push from inside ``autocast``. To switch that off for a while would switch it off
for its other threads, too, which train meanwhile, and have compiled functions compiled anew. So
where it is allowed factors are cut into parts that nothing rounds: the same product, of more
summands.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

# Of float32's 24 bits bfloat16 has room for 8, TF32 for 11.
_LOW_BITS = 16


def are_exact(*factors: torch.Tensor) -> bool:
    """Whether no shortcut rounds these, in whatever wider dtype they are multiplied."""
    return all(factor.dtype is torch.bfloat16 for factor in factors)


def product(b: torch.Tensor, a: torch.Tensor, *, is_exact: bool) -> torch.Tensor:
    """(rows, rank) times (rank, columns), in the dtype of both: float32, or wider.

    Args:
        is_exact: What ``are_exact`` said of both, in their own dtypes.
    """
    with _without_autocast(b.device.type):
        if b.dtype is torch.float32 and not is_exact and _is_rounded(b.device):
            b, a = in_exact_parts(b, a)
        return b @ a


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def in_exact_parts(b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of six times the rank, whose elements bfloat16 and TF32 hold exactly and whose
    product is the same, but for less than 2^-21 of each summand."""
    (b1, b2, b3), (a1, a2, a3) = _parts(b), _parts(a)
    # b2 a3, b3 a2 and b3 a3 are what is left out.
    return torch.cat([b1, b1, b2, b1, b2, b3], 1), torch.cat([a1, a2, a1, a3, a2, a1], 0)


def _parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three of 8 bits each, which add up to float32's 24."""
    first = _without_low_bits(values)
    second = _without_low_bits(values - first)
    return first, second, values - first - second


def _without_low_bits(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.int32) >> _LOW_BITS << _LOW_BITS).view(torch.float32)


def _is_rounded(device: torch.device) -> bool:
    """Whether the application lets float32 products be rounded."""
    try:
        if device.type == "cuda":
            return bool(torch.backends.cuda.matmul.allow_tf32)
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it has said so by the newer of torch's two ways
        return True
