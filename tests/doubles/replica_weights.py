"""What a replica process (``tests.doubles.replica_process``) serves, and what is pushed to it."""

from __future__ import annotations

import torch
from torch import nn


def base_weights(
    num_tensors: int, elements: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The double's base; expanded, so that it costs no memory."""
    zero = torch.zeros(1, dtype=dtype)
    return {
        f"layers.{i // 8}.t{i % 8}.weight": zero.expand(elements) for i in range(num_tensors)
    } | {"layers.0.q_proj.weight": zero.expand(64, 64)}


NUM_TENSORS, ELEMENTS = 24, 2**18  # 1 MiB each, one a bucket
BUCKET_BYTES = 2**20


#: Where a model differs from another by a delta: at every so many-th element.
STRIDE = 64


def model(
    value: float, stride: int = 1, num_tensors: int = NUM_TENSORS, elements: int = ELEMENTS
) -> nn.Module:
    """Make a model with the names and shapes of such a base: every ``stride``-th element of a
    tensor, the first included, is ``value``, and every other 1."""
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Module() for _ in range(num_tensors // 8))
    for i in range(num_tensors):
        part = nn.Module()
        part.weight = _filled((elements,), value, stride)
        root.layers[i // 8].add_module(f"t{i % 8}", part)
    q_proj = nn.Module()
    q_proj.weight = _filled((64, 64), value, stride)
    root.layers[0].add_module("q_proj", q_proj)
    return root


def _filled(shape: tuple[int, ...], value: float, stride: int) -> nn.Parameter:
    tensor = torch.ones(shape)
    tensor.view(-1)[::stride] = value
    return nn.Parameter(tensor, requires_grad=False)
