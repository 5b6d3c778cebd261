"""An output layer that is a copy of the embedding, as whole or sharded trainers hold it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tests.doubles.shards import sharded
from trainer_side.params.params import Params, WholeParams
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule
from trainer_side.sources.tied_heads import are_equal, copied_heads
from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.tensors import DataType, TensorMeta

_NUM_RANKS = 2
NAMES = ("embed.weight", "up.weight")


def _is_base(metas: Sequence[TensorMeta]) -> bool:
    return tuple(meta.name for meta in metas) == NAMES


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    embedding = torch.randn(12, 8)
    return {NAMES[0]: embedding, NAMES[1]: torch.randn(12, 8), "lm_head.weight": embedding.clone()}


def _source(params: Params) -> ModuleSource:
    return ModuleSource(nn.Module(), params, CastRule(), is_base=_is_base)


@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_compares_what_it_holds(dim: int) -> None:
    """And the one that holds what differs refuses, by name."""
    tensors = _tensors()
    for rank in range(_NUM_RANKS):
        source = _source(sharded(tensors, dim, rank, _NUM_RANKS))
        assert [meta.name for meta in source.metas] == [*NAMES]
        source.check_heads()
    tensors["lm_head.weight"][-1, -1] += 1
    _source(sharded(tensors, dim, 0, _NUM_RANKS)).check_heads()
    with pytest.raises(InvalidManifestError, match=r"'lm_head\.weight' .* does not equal 'embed"):
        _source(sharded(tensors, dim, 1, _NUM_RANKS)).check_heads()


def test_it_is_compared_at_each_push() -> None:
    tensors = _tensors()
    source = _source(WholeParams(tensors, "test"))
    source.check_heads()
    tensors[NAMES[0]][0, 0] += 1
    with pytest.raises(InvalidManifestError, match="tie the weights again"):
        source.check_heads()


def test_it_is_sent_where_nobody_knows_or_the_pool_has_it() -> None:
    metas = [TensorMeta(name, DataType.FLOAT32, (2, 2)) for name in (*NAMES, "lm_head.weight")]
    assert copied_heads(metas, None) == frozenset()
    assert copied_heads(metas, lambda metas: len(metas) == 3) == frozenset()
    assert copied_heads(metas, _is_base) == {"lm_head.weight"}
    assert copied_heads(metas, lambda metas: False) == frozenset()
    assert copied_heads(metas, lambda metas: False, is_said=True) == {"lm_head.weight"}


def test_copies_in_two_dtypes_are_compared_by_value() -> None:
    tensor = torch.randn(5, 3).bfloat16()
    assert are_equal(tensor, tensor.float())
    assert not are_equal(tensor, tensor.float() + 0.01)
