"""NaN and infinities found in the sent bytes: after the cast, in the packed bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weft_rl.contract.errors import NotFiniteError
from weft_rl.contract.layout.manifest import TensorSlot
from weft_rl.contract.tensors import DataType

#: The smallest magnitude bits of what is no number; E4M3FN has one NaN and no infinity.
_FP8_LIMITS = {DataType.FLOAT8_E4M3FN: 0x7F, DataType.FLOAT8_E5M2: 0x7C}


def check_finite(buffer: torch.Tensor, slots: Sequence[TensorSlot]) -> None:
    """Refuse a packed bucket that holds NaN or infinity; blocks for one read of it.

    Neighbours of one element type are looked at together, so that a bucket costs one reduction and
    not one a tensor; single tensors are checked only where that finds something.

    Args:
        buffer: uint8, the bucket's payload, on any device; the padding between the
            tensors is zero.
        slots: The bucket's tensors, in their order.

    Raises:
        NotFiniteError: Names the first tensor that has one.
    """
    for first, last in _runs(slots):
        dtype = slots[first].meta.dtype
        end = slots[last].offset_bytes + slots[last].meta.num_bytes
        if _is_finite(buffer[slots[first].offset_bytes : end], dtype):
            continue
        for slot in slots[first : last + 1]:
            content = buffer[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes]
            if not _is_finite(content, dtype):
                name = slot.meta.name
                raise NotFiniteError(
                    f"tensor {name!r} holds NaN or infinity as {dtype.torch_name}, which it is "
                    "sent as; the push was given up and nothing that is served has changed",
                    metadata={"parameter": name},
                )


def _runs(slots: Sequence[TensorSlot]) -> Iterable[tuple[int, int]]:
    """Yield first and last index of neighbouring tensors of one floating-point type."""
    first = 0
    for index in range(1, len(slots) + 1):
        dtype = slots[first].meta.dtype
        if index == len(slots) or slots[index].meta.dtype is not dtype:
            if dtype.is_float or dtype in _FP8_LIMITS:
                yield first, index - 1
            first = index


def _is_finite(content: torch.Tensor, dtype: DataType) -> bool:
    """Return whether all elements are finite numbers of their type; exact."""
    if not content.numel():
        return True
    limit = _FP8_LIMITS.get(dtype)
    if limit is not None:
        return bool((content & 0x7F).amax() < limit)
    # Both carry NaN through, which a sum would too, but finite numbers can overflow a sum.
    low, high = torch.aminmax(content.view(getattr(torch, dtype.torch_name)))
    return bool(torch.isfinite(low) & torch.isfinite(high))
