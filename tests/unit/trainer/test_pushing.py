"""One push at one rank: what it keeps, whatever becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_side.push_plan import Planner
from trainer_side.pushing import Pushing
from trainer_side.ranks.ranks import SENDER, OneRank
from trainer_side.sources.source import CastRule, ParamsSource, tensor_source
from weft.contract.errors import CapacityError
from weft.contract.layout.manifest import plan_buckets
from weft.v1 import publish_pb2 as pb


class _Ranks(OneRank):
    """One of two."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def share(self, produce: Callable[[], bytes], *, all_wait: bool = False) -> bytes:
        if self.rank != SENDER:
            raise CapacityError("full")
        return produce()


class _Source:
    """Notes that its reading has ended."""

    description, is_collective = "test", True

    def __init__(self) -> None:
        own: ParamsSource = tensor_source({"a": torch.ones(4)}, CastRule(), "test")
        self.metas, self.told = own.metas, list[str]()

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        self.told.append("read")

    def end_reading(self) -> None:
        self.told.append("end")


def _pushing(ranks: OneRank, client: Any = None) -> Pushing:
    return Pushing(ranks, client, Planner(ranks, None), SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_reading_of_a_push_that_fails_has_ended_at_every_rank(rank: int) -> None:
    def carry_out(begun: Any, led: Any, *rest: Any) -> None:
        led.read(0, 1, [torch.empty(4)])
        raise CapacityError("full")

    ranks, source = _Ranks(rank), _Source()
    plan: Any = SimpleNamespace(
        source=source, manifest=plan_buckets(source.metas), what=None, finite=False
    )
    begun = pb.BeginTransferResponse(group=pb.GroupPlan(group_id="g"))
    with pytest.raises(CapacityError):
        _pushing(ranks, SimpleNamespace(carry_out=carry_out))._carry_out(
            begun, plan, time.monotonic() + 5
        )
    assert source.told == ["read", "end"]
