"""What ranks can send as they hold it, what is brought together first, and what is said of that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from tests.doubles.shards import OneOfSeveral, held_push, sharded
from trainer_side.params.elements import Elements, HeldElements, HeldRun
from trainer_side.params.params import WholeElements
from trainer_side.pushes.rank_push import HeldPush, RankPushFactory
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources import source as module
from trainer_side.sources.source import (
    CastRule,
    HeldTensors,
    ParamsSource,
    Source,
    held_tensors,
    tensor_source,
)
from weft_rl.contract.backends import GLOO
from weft_rl.contract.manifest import Run, plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta

_NUMEL = 8


class _Half(OneRank):
    """The first of two ranks."""

    rank, size = 0, 2


class _Source(Source):
    """Tensors that two ranks hold half of each, but for those that only their framework can put
    together."""

    description, is_collective = "test", True

    def __init__(self, names: Sequence[str], unknown: Collection[str] = ()) -> None:
        self.metas = tuple(TensorMeta(name, DataType.FLOAT32, (_NUMEL,)) for name in names)
        self.unknown, self.told = unknown, list[str]()

    def read(self, first: int, count: int, outs: Sequence[torch.Tensor] | None) -> None:
        assert count == 1
        assert outs is not None
        outs[0].fill_(first)
        self.told.append(self.metas[first].name)

    def why_gathered(self, index: int) -> str:
        return f"nobody knows {self.metas[index].name}"

    def elements(self, index: int) -> Elements | None:
        if self.metas[index].name in self.unknown:
            return None
        runs = [HeldRun(0, 0, 4), HeldRun(1, 4, 4)]
        return HeldElements(runs, 0, torch.arange(4.0), [(0, 4)])

    def prepare(self) -> None:
        self.told.append("prepare")

    def release(self) -> None:
        self.told.append("release")


def _tensors(source: Source) -> HeldTensors:
    found = held_tensors(source, _Half(), 256)
    assert isinstance(found, HeldTensors)
    return found


def _push(source: Source) -> HeldPush:
    return held_push(source, _tensors(source).elements, _Half(), plan_buckets(source.metas))


def test_what_is_held_is_sent_and_nothing_is_remarked_on() -> None:
    source = _Source(["a", "b"])
    tensors = _tensors(source)
    assert tensors.held == [[(0, Run(i, 0, 4)), (1, Run(i, 4, 4))] for i in range(2)]
    assert (tensors.remarks, tensors.num_holders, tensors.gathered) == ((), 2, [])
    out = torch.empty(4)
    _push(source).fill([Run(1, 0, 4)], [out])
    assert out.tolist() == [0, 1, 2, 3]


def test_what_only_its_framework_can_put_together_comes_first_and_is_named() -> None:
    source = _Source([*"abcdefgh"], unknown="bdfh")
    push = _push(source)
    assert push.remarks == (
        "b, d, f and 1 more could not be sent as the ranks hold them, and were brought together "
        "at rank 0 first",
    )
    push.prepare()
    assert source.told == ["prepare", *"bdfh"]
    assert _tensors(source).held[1] == [(0, Run(1, 0, _NUMEL))]
    out = torch.empty(_NUMEL)
    push.fill([Run(3, 0, _NUMEL)], [out])
    assert out.tolist() == [3] * _NUMEL
    push.release()
    assert source.told[-1] == "release"


class _Whole(_Source):
    """Tensors that one rank has; what is unknown it computes."""

    is_collective = False

    def elements(self, index: int) -> Elements | None:
        is_known = self.metas[index].name not in self.unknown
        return WholeElements(torch.full((_NUMEL,), -1.0)) if is_known else None

    def read(self, first: int, count: int, outs: Sequence[torch.Tensor] | None) -> None:
        self.told.append(f"{first} {count}")
        for index, out in enumerate(outs or ()):
            out.fill_(first + index)


def test_what_one_rank_computes_is_read_in_its_turn() -> None:
    source = _Whole([*"abcdef"], unknown="acdf")
    push = RankPushFactory(OneRank(), None).weights_push(source, GLOO)
    outs = [torch.empty(_NUMEL) for _ in range(6)]
    push.fill(push.packing.runs[0] if push.packing.runs else (), outs)
    assert [out.unique().tolist() for out in outs] == [[0], [-1], [2], [3], [-1], [5]]
    assert source.told == ["0 1", "2 2", "5 1"]


def test_what_is_whole_at_one_rank_is_held_by_it() -> None:
    source = tensor_source({"a": torch.ones(_NUMEL)}, CastRule(), "test")
    for rank, num_known in ((0, 1), (1, 0)):
        source.held = None
        found = held_tensors(source, OneOfSeveral(rank, 2), 1)
        assert isinstance(found, HeldTensors)
        assert (len(found.elements), found.held, found.num_holders) == (num_known, (), 1)


@pytest.mark.parametrize("max_senders", [1, 256])
def test_a_sharded_model_of_one_rank_is_whole(max_senders: int) -> None:
    params = sharded({"a": torch.ones(_NUMEL)}, 0, 0, 1)
    source = ParamsSource(params, {"a": "a"}, CastRule(), "test")
    found = held_tensors(source, params.ranks, max_senders)
    assert isinstance(found, HeldTensors)
    assert found.held == ()


def test_where_most_must_be_brought_together_rank_0_reads_all_and_it_is_said_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = held_tensors(_Source("abc", unknown="bc"), _Half(), 256)
    assert found == (
        "2 of 3 tensors could not be sent by the ranks that hold them, 'b' first: nobody knows b"
    )
    monkeypatch.setattr(module, "MAX_GATHERED_BYTES", _NUMEL)
    found = held_tensors(_Source("abc", unknown="a"), _Half(), 256)
    assert isinstance(found, str)
    assert "1 of 3 tensors" in found


def test_columns_that_are_no_multiples_of_8_bytes_are_gathered() -> None:
    weights = {"o": torch.zeros(16, 18, dtype=torch.bfloat16)}
    params = sharded(weights, 1, 0, 3)
    source = ParamsSource(params, {"o": "o"}, CastRule(enabled=False), "test")
    found = held_tensors(source, params.ranks, 256)
    assert isinstance(found, str)
    assert found.endswith("in multiples of 8 bytes")


def test_a_source_that_is_kept_is_looked_at_once() -> None:
    source, ranks = _Source("ab"), _Half()
    assert held_tensors(source, ranks, 4) is held_tensors(source, ranks, 4)
    assert held_tensors(source, _Half(), 4) is not held_tensors(source, ranks, 4)
