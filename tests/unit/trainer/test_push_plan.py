"""What a rank finds that it is to push, and what it keeps for the next push."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doubles.shards import sharded
from trainer_side.push_request import PushOptions, PushPlan, PushSettings, checks_finite, plan_push
from trainer_side.pushes.content import PushContent
from trainer_side.pushes.rank_push import GatheredPush, RankPushFactory, ShardedPush
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.source import CastRule, ParamsSource
from weft_rl.contract import manifest as contract_manifest
from weft_rl.contract.tensors import Reference
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2


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
    assert isinstance(plan.push, GatheredPush)
    assert (plan.adapter, plan.finite, plan.backend) == (None, False, "gloo")
    assert plan_push(request, target, packings, _no_reference).push.packing is packing


class _Content(PushContent):
    """Weights that two ranks hold columns of, cut so that they cannot travel."""

    remarks = ()

    def __init__(self, columns: int) -> None:
        params = sharded({"a": torch.zeros(8, columns)}, 1, 0, 2)
        self.ranks = params.ranks
        self._source = ParamsSource(params, {"a": "a"}, CastRule(enabled=False), "test")

    def source(self, target: pb.DescribeTargetResponse) -> tuple[ParamsSource, None]:
        return self._source, None


def _plan(content: _Content, max_senders: int = 64) -> PushPlan:
    request: Any = SimpleNamespace(content=lambda: content, check_finite=False)
    target = pb.DescribeTargetResponse(backends=["gloo"])
    packings = RankPushFactory(content.ranks, None, max_senders)
    return plan_push(request, target, packings, _no_reference)


def test_a_plan_says_why_rank_0_gathers_all_unless_it_was_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(_plan(_Content(8)).push, ShardedPush)
    assert _plan(_Content(8)).push.remarks == ()
    gathered = _plan(_Content(6)).push
    assert isinstance(gathered, GatheredPush)
    assert "rank 0 gathered all: 1 of 1 tensors" in gathered.remarks[0]
    assert _plan(_Content(6), max_senders=1).push.remarks == ()
    monkeypatch.setattr(contract_manifest, "MAX_WIRE_BUCKETS", 0)
    crowded = _plan(_Content(8)).push
    assert isinstance(crowded, GatheredPush)
    (remark,) = crowded.remarks
    assert remark.startswith("rank 0 gathered all: a send plan of ")


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
    wanted: bool, backend: str, is_adapter: bool, checked: bool
) -> None:
    assert checks_finite(wanted, backend, is_adapter=is_adapter) is checked
