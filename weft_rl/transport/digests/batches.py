"""Digests of tensors that lie apart, as parameters do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft_rl.transport.digests import kernel
from weft_rl.transport.digests.wsum64 import tensor_digest


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Digest each tensor where it lies, as ``tensor_digest`` of its bytes. On a GPU with the kernel
    for it this is one launch, which reads each word once. Blocks until all digests are known.

    Args:
        tensors: Contiguous, all on one device; of any dtype and shape.
    """
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    found: dict[int, int] = {}
    even = [i for i, t in enumerate(flat) if not (t.data_ptr() | t.numel()) % 8]
    if even and _has_kernel(flat[0].device):
        # From the first one's first word on: a GPU's memory has one address space.
        words = flat[even[0]].view(torch.int64)
        base = words.data_ptr()
        places = [
            kernel.Words((flat[i].data_ptr() - base) // 8, flat[i].numel() // 8, 0) for i in even
        ]
        sums = kernel.sums(words, tuple(places)).tolist()
        found = {i: value % 2**64 for i, value in zip(even, sums, strict=True)}
    for i, own in enumerate(flat):
        if i not in found:
            found[i] = tensor_digest(own.clone() if own.data_ptr() % 8 else own)
    return [found[i] for i in range(len(flat))]


def _has_kernel(device: torch.device) -> bool:
    return device.type != "cpu" and kernel.works(device)
