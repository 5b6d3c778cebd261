"""What a rank finds that it is to push, and what it keeps for the next push."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doubles.shards import sharded
from trainer_side.push_request import PushOptions, PushPlan, PushSettings, checks_finite, plan_push
from trainer_side.pushes import rank_push
from trainer_side.pushes.content import PushContent
from trainer_side.pushes.rank_push import GatheredPush, HeldPush, RankPushFactory
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.source import CastRule, ParamsSource
from weft_rl.contract.tensors import Reference
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2

_TARGET = pb.DescribeTargetResponse(backends=["gloo"])


def _no_reference() -> Reference:
    raise AssertionError("only named tensors are laid out by the pool's own list")


def _request(weights: Mapping[str, torch.Tensor]) -> Any:
    module = torch.nn.Module()
    for name, weight in weights.items():
        module.register_parameter(name, torch.nn.Parameter(weight))
    settings = PushSettings(
        ranks=OneRank(),
        require="all",
        timeout_seconds=5.0,
        options=PushOptions(cast=False),
    )
    return settings.base(module)


def test_a_layout_is_made_once_and_cut_as_told() -> None:
    packings = RankPushFactory(OneRank(), bucket_bytes=1024)
    target = pb.DescribeTargetResponse(backends=["gloo"], base_dtype=types_pb2.DATA_TYPE_FLOAT32)
    request = _request({"a": torch.ones(256), "b": torch.ones(256)})
    plan = plan_push(request, target, packings, _no_reference)
    packing = plan.push.packing
    assert [bucket.payload_bytes for bucket in packing.manifest.buckets] == [1024, 1024]
    assert isinstance(plan.push, HeldPush)
    assert (plan.adapter, plan.finite, plan.backend) == (None, False, "gloo")
    assert plan_push(request, target, packings, _no_reference).push.packing is packing


class _Content(PushContent):
    """Weights of 8 rows that some ranks hold columns of."""

    remarks = ()

    def __init__(self, columns: int, num_ranks: int = 2, num_tensors: int = 1) -> None:
        names = "abcdefghi"[:num_tensors]
        weights = {name: torch.zeros(8, columns) for name in names}
        params = sharded(weights, 1, 0, num_ranks)
        self.ranks = params.ranks
        own = {name: name for name in names}
        self._source = ParamsSource(params, own, CastRule(enabled=False), "test")

    def source(self, target: pb.DescribeTargetResponse) -> tuple[ParamsSource, None]:
        return self._source, None


def _plan(content: _Content, max_senders: int = 64) -> PushPlan:
    request: Any = SimpleNamespace(content=lambda: content, check_finite=False)
    packings = RankPushFactory(content.ranks, None, max_senders)
    return plan_push(request, _TARGET, packings, _no_reference)


def test_a_plan_says_why_rank_0_gathers_all_unless_it_was_asked_to() -> None:
    assert isinstance(_plan(_Content(8)).push, HeldPush)
    assert _plan(_Content(8)).push.remarks == ()
    gathered = _plan(_Content(6)).push
    assert isinstance(gathered, GatheredPush)
    assert "rank 0 gathered all: 1 of 1 tensors" in gathered.remarks[0]
    assert _plan(_Content(6), max_senders=1).push.remarks == ()


def test_rank_0_gathers_where_more_ranks_hold_shards_than_may_send() -> None:
    crowded = _plan(_Content(12, num_ranks=3), max_senders=2).push
    assert isinstance(crowded, GatheredPush)
    assert crowded.remarks == (
        "rank 0 gathered all: 3 ranks hold parts of it, and at most 2 may send",
    )


def test_buckets_are_larger_where_their_parts_would_be_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_push, "MAX_WIRE_BUCKETS", 12)
    content = _Content(8, num_tensors=9)
    packings = RankPushFactory(content.ranks, 256)
    push, _ = content.rank_push(_TARGET, packings, _no_reference)
    manifest = push.packing.manifest
    assert [bucket.payload_bytes for bucket in manifest.buckets] == [512] * 4 + [256]
    assert len(push.packing.plan.buckets) == 10
    alone = RankPushFactory(content.ranks, 256, max_senders=1)
    gathered, _ = content.rank_push(_TARGET, alone, _no_reference)
    assert len(gathered.packing.manifest.buckets) == 9


@pytest.mark.parametrize(
    ("wanted", "backend", "is_adapter", "checked"),
    [
        (False, "nccl", True, True),
        (False, "gloo", True, False),
        (False, "nccl", False, False),
        (True, "gloo", False, True),
        (True, "nccl", True, True),
    ],
)
def test_adapters_are_checked_where_it_is_cheap_whatever_is_said(
    wanted: bool,
    backend: str,
    is_adapter: bool,
    checked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert checks_finite(wanted, backend, is_adapter=is_adapter) is checked
