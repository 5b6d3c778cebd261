"""What is kept of a model's memory when all of it is discarded."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from rollout_side.vllm_engine.loading.kept_tensors import keep


class _Attention(torch.nn.Module):
    """Has a scale that no checkpoint need hold."""

    kv_cache: tuple[torch.Tensor, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = torch.nn.Parameter(torch.tensor([1.5]))


class _Adapted(torch.nn.Module):
    """A layer with the slots of adapters, and what is nested elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(4, 4)
        self.attention = _Attention()
        self.register_buffer("cos", torch.arange(4.0))
        self.lora_a_stacked = (torch.arange(6.0).view(2, 3), torch.ones(2))
        self.wrapper = _Wrapper()


class _Wrapper:
    """No module, and reached from one."""

    def __init__(self) -> None:
        self.mapping = {"of": torch.tensor([3, 1, 2])}
        self.view = self.mapping["of"][1:]


def _memory(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def _all(model: _Adapted) -> list[torch.Tensor]:
    own = [*model.lora_a_stacked, model.wrapper.mapping["of"]]
    return [*model.parameters(), *model.buffers(), *own]


@pytest.mark.parametrize("frozen", [False, True])
def test_all_but_what_a_base_brings_is_as_it_was(frozen: bool) -> None:
    model = _Adapted()
    before = [tensor.detach().clone() for tensor in _all(model)]
    if frozen:  # as vLLM does once it has started
        gc.freeze()
    try:
        kept = keep(model, _memory(*_all(model)))
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.unfreeze()
    with torch.no_grad():
        for tensor in _all(model):
            tensor.fill_(7)
        kept.restore()
    for now, was in zip(_all(model), before, strict=True):
        is_brought = now is model.base_layer.weight or now is model.base_layer.bias
        assert torch.equal(now, was) is not is_brought
    assert model.wrapper.view.tolist() == [1, 2]


def test_what_lies_elsewhere_is_left_alone() -> None:
    model, elsewhere = _Adapted(), torch.ones(3)
    kept = keep(model, _memory(*model.lora_a_stacked))
    assert len(kept.pairs) == 2
    elsewhere.fill_(2)
    kept.restore()
    assert elsewhere.tolist() == [2, 2, 2]
    assert keep(model, []).pairs == []


def test_a_storage_in_the_midst_of_an_allocation_is_found() -> None:
    """Allocators cut one allocation into the memory of many tensors."""
    model, allocation = _Adapted(), bytearray(256)  # of which nothing else is a part
    slot = torch.frombuffer(allocation, dtype=torch.float32, offset=64, count=6)
    slot.copy_(torch.arange(6.0))
    model.lora_a_stacked = (slot.view(2, 3), torch.ones(2))
    (address, size), *_ = _memory(slot)
    (kept,) = keep(model, [(address - 64, size + 64)]).pairs
    assert kept[1].view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_objects_that_pretend_are_not_asked(recwarn: Any) -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("it was asked what it is")

    proxies = [Proxy()]
    keep(_Adapted(), [])
    assert proxies
    assert not recwarn.list
