"""A sharded trainer's snapshot: each rank's own elements, read later without the framework."""

from __future__ import annotations

import torch

from trainer_side.params.sharding.elements import held_elements
from trainer_side.params.sharding.sharded import Gathered, HeldRun, Sharded, ShardedParams
from trainer_side.params.snapshot import HostMemory, snapshot
from trainer_side.ranks.ranks import OneRank


def test_a_snapshot_goes_by_the_same_plan_and_asks_nobody_when_it_is_read() -> None:
    calls: list[str] = []

    def gather() -> torch.Tensor:
        calls.append("gather")
        return torch.arange(6.0)

    shard, frozen = torch.arange(8.0), torch.ones(4)
    runs = (HeldRun(0, 0, 2, 4, 4), HeldRun(1, 2, 2, 4, 4))
    placed: dict[str, Sharded | Gathered] = {
        "a": Sharded(torch.Size((4, 4)), torch.float32, runs, shard),
        "other": Sharded(torch.Size((8,)), torch.float32, (HeldRun(1, 0, 8),), None),
        "sum": Gathered(torch.Size((6,)), torch.float32, gather, torch.zeros(6)),
        "frozen": Sharded(torch.Size((4,)), torch.float32, (HeldRun(0, 0, 4),), frozen),
    }
    params = ShardedParams(placed, "test", OneRank())
    memory = HostMemory()
    copied = snapshot(params, {"a", "other", "sum"}, memory.lend(1))
    assert calls == ["gather"]  # in the caller's step, not beside the next one
    shard.fill_(-1)  # as training goes on
    for name in ("a", "other", "frozen"):
        before, after = held_elements(params, name), held_elements(copied, name)
        assert before is not None
        assert after is not None
        assert after.runs == before.runs
    elements = held_elements(copied, "a")
    assert elements is not None
    assert elements.held(0).tolist() == list(range(8))
    whole = held_elements(copied, "sum")
    assert whole is not None
    assert whole.held(0).tolist() == list(range(6))
    kept = held_elements(copied, "frozen")
    assert kept is not None
    assert kept.held(0).data_ptr() == frozen.data_ptr()
    assert calls == ["gather"]
