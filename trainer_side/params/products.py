"""Products of LoRA factors with sums in float32, whatever precision the application allows.

An application may have float32 products rounded on their way, to TF32 on a GPU or to bfloat16 on a
CPU, and may push from inside ``autocast``. To switch that off for a while would also switch it off
for its other threads, which train meanwhile, and would recompile compiled functions. So where it is
allowed sums are formed in float64, which nothing shortens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def product(b: torch.Tensor, a: torch.Tensor, *, is_exact: bool) -> torch.Tensor:
    """Return (rows, rank) times (rank, columns), in the dtype of both: float32, or wider.

    Args:
        is_exact: Result of ``are_exact`` for both factors in their own dtypes.
    """
    with _without_autocast(b.device.type):
        if b.dtype is torch.float32 and not is_exact and _is_rounded(b.device):
            return (b.double() @ a.double()).float()
        return b @ a


def are_exact(*factors: torch.Tensor) -> bool:
    """Return whether no shortcut rounds products of these factors in any wider dtype."""
    return all(factor.dtype is torch.bfloat16 for factor in factors)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _is_rounded(device: torch.device) -> bool:
    """Return whether the application lets float32 products be rounded."""
    try:
        if device.type == "cuda":
            return bool(torch.backends.cuda.matmul.allow_tf32)
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it has said so by the newer of torch's two ways
        return True
