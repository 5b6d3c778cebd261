"""What a rank finds that it is to push, and what it keeps for the next push."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from trainer_side.push_plan import Planner, checks_finite
from trainer_side.push_request import PushSettings
from trainer_side.ranks.ranks import OneRank
from weft.contract.layout.tensors import Reference
from weft.contract.push_defaults import DEFAULT_ON_BASE_CHANGE
from weft.v1 import publish_pb2 as pb
from weft.v1 import types_pb2


def _no_reference() -> Reference:
    raise AssertionError("only named tensors are laid out by the pool's own list")


def _request(weights: Mapping[str, torch.Tensor]) -> Any:
    module = torch.nn.Module()
    for name, weight in weights.items():
        module.register_parameter(name, torch.nn.Parameter(weight))
    settings = PushSettings(
        ranks=OneRank(),
        kind="auto",
        require="all",
        timeout_seconds=5.0,
        check_finite=None,
        on_base_change=DEFAULT_ON_BASE_CHANGE,
    )
    return settings.base(module, cast=False)


def test_a_layout_is_made_once_and_cut_as_told() -> None:
    planner = Planner(OneRank(), bucket_bytes=1024)
    target = pb.DescribeTargetResponse(backends=["gloo"], base_dtype=types_pb2.DATA_TYPE_FLOAT32)
    request = _request({"a": torch.ones(256), "b": torch.ones(256)})
    plan = planner.plan(request, target, _no_reference)
    assert plan.manifest is not None
    assert [bucket.payload_bytes for bucket in plan.manifest.buckets] == [1024, 1024]
    assert (plan.adapter, plan.shards, plan.finite, plan.backend) == (None, None, False, "gloo")
    assert planner.plan(request, target, _no_reference).manifest is plan.manifest


@pytest.mark.parametrize(
    ("wanted", "backend", "is_adapter", "checked"),
    [
        (None, "nccl", True, True),
        (None, "gloo", True, False),
        (None, "nccl", False, False),
        (True, "gloo", False, True),
        (False, "nccl", True, False),
    ],
)
def test_unless_it_is_said_adapters_are_checked_where_it_is_cheap(
    wanted: bool | None, backend: str, is_adapter: bool, checked: bool
) -> None:
    assert checks_finite(wanted, backend, is_adapter=is_adapter) is checked
