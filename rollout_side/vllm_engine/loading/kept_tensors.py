"""Tensors among a model's weights that no base brings, kept while the weights are discarded.

vLLM's sleep level 2 keeps buffers. The slots of adapters, what maps requests to them, constants
that layers hold as plain attributes, scales of attention that a checkpoint may lack: these are
garbage afterwards, though vLLM goes on to use them. So every tensor there is kept whose memory
is not that of a parameter that loading a base always sets.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from rollout_side.vllm_engine.loading.layerwise import is_attention

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptTensors:
    """Tensors on an accelerator, each over all of a storage, and copies of them on the host."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    def restore(self) -> None:
        """Give the tensors their values again, in memory of the same addresses."""
        for tensor, copy in self.pairs:
            tensor.copy_(copy)


def keep(model: torch.nn.Module, memory: Iterable[tuple[int, int]]) -> KeptTensors:
    """Copy to the host what no base brings; blocks for the copies.

    Args:
        memory: Address and bytes of each allocation that is to be discarded.
    """
    loaded = {_address(parameter) for parameter in _loaded_parameters(model)}
    found: dict[int, torch.Tensor] = {}
    ranges = sorted(memory)
    for tensor in _live_tensors():
        address = _address(tensor)
        if address not in loaded and address not in found and _is_within(address, ranges):
            found[address] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                tensor.untyped_storage()
            )
    pairs = [(tensor, tensor.to("cpu", copy=True)) for tensor in found.values()]
    num_bytes = sum(copy.numel() for _, copy in pairs)
    _log.info("kept %d tensors of %.1f MB that no base brings", len(pairs), num_bytes / 1e6)
    return KeptTensors(pairs)


def _loaded_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        if not is_attention(module):
            yield from module.parameters(recurse=False)


def _live_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor that Python knows of, but for those without memory of their own."""
    is_frozen = gc.get_freeze_count() > 0  # by vLLM, once it has started: those are not listed
    if is_frozen:
        gc.unfreeze()
    objects = gc.get_objects()
    if is_frozen:
        gc.freeze()
    for each in objects:
        # Not isinstance: a proxy would make up, or import, what it stands for.
        kind = type(each)
        if issubclass(kind, torch.Tensor) and kind.__torch_dispatch__ is _NO_DISPATCH:
            yield each


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or not made yet, say
        return 0


def _is_within(address: int, ranges: list[tuple[int, int]]) -> bool:
    index = bisect_right(ranges, (address, 2**63)) - 1
    return index >= 0 and address < ranges[index][0] + ranges[index][1]
