"""Tensors that are computed for a checkpoint are kept while a push reads them, and never for the
next push, which may find other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.doubles.linked_ranks import linked_ranks
from tests.doubles.shards import sharded
from trainer_side.params import names
from trainer_side.params.names import cached_conversions
from trainer_side.params.params import WholeParams
from trainer_side.params.sharded import Sharded, ShardedParams
from trainer_side.pushes.rank_push import HeldPush, RankPushFactory
from trainer_side.ranks.torch_ranks import TorchRanks
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule
from weft_rl.contract.backends import GLOO
from weft_rl.contract.manifest import Run

_SHAPES = {"a": (8, 8), "t": (4, 6), "b": (8, 8), "u": (4, 6), "c": (8, 8)}


def _revert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers transposes what it holds otherwise than its checkpoints do."""
    return {
        f"{name}.saved" if name in "tu" else name: tensor.t().contiguous()
        if name in "tu"
        else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture(autouse=True)
def _transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "reverter", lambda model: _revert)


@pytest.fixture
def ranks() -> Iterator[list[TorchRanks]]:
    with linked_ranks(2) as ranks:
        yield ranks


def _whole(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in _SHAPES.items()}


class _Trainer:
    """Two ranks that hold rows of a model, and keep their sources from push to push."""

    def __init__(self, ranks: list[TorchRanks]) -> None:
        self.ranks = ranks
        self.params = []
        for each in ranks:
            placed = sharded(_whole(0.0), 0, each.rank, len(ranks)).placed
            self.params.append(ShardedParams(placed, "test", each))
        self.sources = [ModuleSource(torch.nn.Module(), p, CastRule()) for p in self.params]

    def train(self, value: float) -> None:
        for params in self.params:
            for param in params.placed.values():
                assert isinstance(param, Sharded)
                assert param.local is not None
                param.local.fill_(value)

    def all(self, call: Callable[[int], torch.Tensor | None]) -> torch.Tensor:
        """What the sender's call returns."""
        with ThreadPoolExecutor(2) as pool:
            found, _ = pool.map(call, range(2))
        assert found is not None
        return found

    def push(self, rank: int) -> HeldPush:
        found = RankPushFactory(self.ranks[rank], None).weights_push(self.sources[rank], GLOO)
        assert isinstance(found, HeldPush)
        return found


def test_what_is_brought_together_is_that_of_each_push(ranks: list[TorchRanks]) -> None:
    trainer = _Trainer(ranks)

    def push(rank: int) -> torch.Tensor | None:
        own, source = trainer.push(rank), trainer.sources[rank]
        assert own.remarks[0].startswith("t.saved, u.saved could not be sent")
        own.prepare()
        assert source._converted is None  # or it would be there twice
        whole = Run(1, 0, source.metas[1].num_elements)
        (found,) = own.by_reference([whole]) if rank == 0 else (None,)
        own.release()
        return found

    for value in (1.0, 2.0):
        trainer.train(value)
        assert trainer.all(push).unique().tolist() == [value]


def test_a_reading_that_ended_in_the_middle_leaves_nothing(ranks: list[TorchRanks]) -> None:
    """Of a push that is read whole, and whose next one begins to read elsewhere."""
    trainer = _Trainer(ranks)

    def read(rank: int) -> torch.Tensor | None:
        source = trainer.sources[rank]
        out = torch.empty(source.metas[1].shape)
        source.read(1, 1, [out] if rank == 0 else None)
        source.end_reading()
        assert source._converted is None
        return out

    for value in (1.0, 2.0):
        trainer.train(value)
        assert trainer.all(read).unique().tolist() == [value]


def test_a_group_is_computed_once_and_is_gone_after_the_last_tensor() -> None:
    calls: list[list[str]] = []

    def halves(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append(list(tensors))
        return {"x": tensors["w"].t().contiguous()[:2], "y": tensors["w"].t().contiguous()[2:]}

    params = WholeParams({"w": torch.arange(12.0).view(3, 4)}, "test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "reverter", lambda model: halves)
        source = ModuleSource(torch.nn.Module(), params, CastRule())
    calls.clear()
    outs = [torch.empty(meta.shape) for meta in source.metas]
    for index, out in enumerate(outs):
        source.read(index, 1, [out])
    assert calls == [["w"]]
    assert torch.equal(torch.cat(outs), params.whole("w").t())
    assert source._converted is None


def test_names_in_a_checkpoint_are_kept_for_tensors_of_the_same_dtype() -> None:
    model = torch.nn.Module()
    for dtype in (torch.float32, torch.bfloat16):
        _, outputs = cached_conversions(model, {"t": torch.empty(4, 6, dtype=dtype)}, _revert)
        assert outputs["t.saved"].dtype == dtype
