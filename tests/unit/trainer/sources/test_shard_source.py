"""What ranks can send as they hold it, what is brought together first, and what is said of that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from tests.doubles.shards import sharded
from trainer_side.params.elements import HeldElements
from trainer_side.params.sharded import HeldRun
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources import shard_source as module
from trainer_side.sources.shard_source import GatheredTensors, ShardSource, shard_source
from trainer_side.sources.source import CastRule, ParamsSource
from weft_rl.contract.manifest import Run
from weft_rl.contract.tensors import DataType, TensorMeta

_NUMEL = 8


class _Half(OneRank):
    """The first of two ranks."""

    rank, size = 0, 2


class _Source:
    """Tensors that two ranks hold half of each, but for those that only their framework can put
    together."""

    description, is_collective = "test", True

    def __init__(self, names: Sequence[str], unknown: Collection[str] = ()) -> None:
        self.metas = tuple(TensorMeta(name, DataType.FLOAT32, (_NUMEL,)) for name in names)
        self.shards = None
        self.unknown, self.told = unknown, list[str]()

    def by_reference(self, first: int, count: int) -> list[torch.Tensor | None]:
        raise AssertionError

    def read(self, first: int, count: int, outs: Sequence[torch.Tensor] | None) -> None:
        assert count == 1
        assert outs is not None
        outs[0].fill_(first)
        self.told.append(self.metas[first].name)

    def why_gathered(self, index: int) -> str:
        return f"nobody knows {self.metas[index].name}"

    def elements(self, index: int) -> HeldElements | None:
        if self.metas[index].name in self.unknown:
            return None
        runs = [HeldRun(0, 0, 4), HeldRun(1, 4, 4)]
        return HeldElements(runs, 0, torch.arange(4.0), [(0, 4)])

    def prepare(self) -> None:
        self.told.append("prepare")

    def release(self) -> None:
        self.told.append("release")

    def end_reading(self) -> None:
        pass


def _shards(source: _Source) -> ShardSource:
    found = shard_source(source, _Half())
    assert isinstance(found, ShardSource)
    return found


def test_what_is_held_is_sent_and_nothing_is_remarked_on() -> None:
    shards = _shards(_Source(["a", "b"]))
    assert shards.held == [[(0, Run(i, 0, 4)), (1, Run(i, 4, 4))] for i in range(2)]
    assert shards.remarks == ()
    out = torch.empty(4)
    shards.fill([Run(1, 0, 4)], [out])
    assert out.tolist() == [0, 1, 2, 3]


def test_what_only_its_framework_can_put_together_comes_first_and_is_named() -> None:
    source = _Source([*"abcdefgh"], unknown="bdfh")
    shards = _shards(source)
    assert shards.remarks == (
        "b, d, f and 1 more could not be sent as the ranks hold them, and were brought together "
        "at rank 0 first",
    )
    shards.gather()
    assert source.told == ["prepare", *"bdfh"]
    assert shards.held[1] == [(0, Run(1, 0, _NUMEL))]
    out = torch.empty(_NUMEL)
    shards.fill([Run(3, 0, _NUMEL)], [out])
    assert out.tolist() == [3] * _NUMEL
    shards.release()
    assert source.told[-1] == "release"


def test_where_most_must_be_brought_together_rank_0_reads_all_and_it_is_said_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shard_source(_Source("abc", unknown="bc"), _Half())
    assert isinstance(found, GatheredTensors)
    assert found.remarks == (
        "rank 0 gathered all: 2 of 3 tensors could not be sent by the ranks that hold them, 'b' "
        "first: nobody knows b",
    )
    monkeypatch.setattr(module, "MAX_GATHERED_BYTES", _NUMEL)
    found = shard_source(_Source("abc", unknown="a"), _Half())
    assert isinstance(found, GatheredTensors)
    assert "1 of 3 tensors" in found.remarks[0]


def test_columns_that_are_no_multiples_of_8_bytes_are_gathered() -> None:
    weights = {"o": torch.zeros(16, 18, dtype=torch.bfloat16)}
    params = sharded(weights, 1, 0, 3)
    source = ParamsSource(params, {"o": "o"}, CastRule(enabled=False), "test")
    found = shard_source(source, params.ranks)
    assert isinstance(found, GatheredTensors)
    assert found.remarks[0].endswith("in multiples of 8 bytes")


def test_a_source_that_is_kept_is_looked_at_once() -> None:
    source, ranks = _Source("ab"), _Half()
    assert shard_source(source, ranks) is shard_source(source, ranks)
    assert shard_source(source, _Half()) is not shard_source(source, ranks)
