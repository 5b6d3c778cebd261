"""A sharded trainer's snapshot: each rank's own elements, read later without the framework."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import Linear, Sequential

from trainer_side.params.choose import OpenedModel
from trainer_side.params.elements import HeldRun
from trainer_side.params.names import unwrapped_name
from trainer_side.params.sharded import GatheredParam, Sharded, ShardedParams
from trainer_side.params.snapshot import HostMemory, snapshot
from trainer_side.pushes.content import ModelAdapter, ModelBase
from trainer_side.ranks.ranks import OneRank
from weft_rl.contract.errors import UnsupportedError
from weft_rl.v1 import publish_pb2 as pb


def test_a_snapshot_goes_by_the_same_plan_and_asks_nobody_when_it_is_read() -> None:
    calls: list[str] = []

    def gather() -> torch.Tensor:
        calls.append("gather")
        return torch.arange(6.0)

    shard, frozen = torch.arange(8.0), torch.ones(4)
    runs = (HeldRun(0, 0, 2, 4, 4), HeldRun(1, 2, 2, 4, 4))
    placed: dict[str, Sharded | GatheredParam] = {
        "a": Sharded(torch.Size((4, 4)), torch.float32, runs, shard),
        "other": Sharded(torch.Size((8,)), torch.float32, (HeldRun(1, 0, 8),), None),
        "sum": GatheredParam(torch.Size((6,)), torch.float32, gather, torch.zeros(6)),
        "frozen": Sharded(torch.Size((4,)), torch.float32, (HeldRun(0, 0, 4),), frozen),
    }
    params = ShardedParams(placed, "test", OneRank())
    memory = HostMemory(OneRank())
    copied = snapshot(params, {"a", "other", "sum"}, memory.lend(1))
    assert isinstance(copied, ShardedParams)
    assert calls == ["gather"]  # in the caller's step, not beside the next one
    shard.fill_(-1)  # as training goes on
    for name in ("a", "other", "frozen"):
        before, after = params.elements(name), copied.elements(name)
        assert before is not None
        assert after is not None
        assert after.runs == before.runs
    elements = copied.elements("a")
    assert elements is not None
    assert elements.held(0).tolist() == list(range(8))
    whole = copied.elements("sum")
    assert whole is not None
    assert whole.held(0).tolist() == list(range(6))
    kept = copied.elements("frozen")
    assert kept is not None
    assert kept.held(0).data_ptr() == frozen.data_ptr()
    assert calls == ["gather"]


def test_what_a_snapshot_leaves_to_its_framework_cannot_be_read_beside_the_training() -> None:
    gathered = GatheredParam(torch.Size((6,)), torch.float32, _never, torch.zeros(6))
    params = ShardedParams({"base": gathered}, "test", OneRank())
    copied = snapshot(params, {"adapter"}, HostMemory(OneRank()).lend(1))
    with pytest.raises(UnsupportedError, match="'base'"):
        copied.fetch(["base"], [torch.float32], [torch.empty(6)])


def _never() -> torch.Tensor:
    raise AssertionError("a collective beside the training")


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_only_the_calling_thread_has_a_framework_gather(kind: str) -> None:
    """A frozen base that lies in sums, or in memory of the framework's own."""
    peft = get_peft_model(Sequential(Linear(6, 4), Linear(4, 2)), LoraConfig(target_modules=["0"]))
    with torch.no_grad():
        for param in peft.parameters():
            param.normal_()
    whole = {unwrapped_name(name): param.detach() for name, param in peft.named_parameters()}
    threads: list[str] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    placed: dict[str, Sharded | GatheredParam] = {}
    for name, tensor in whole.items():
        numel = tensor.numel()
        if "lora_" in name:
            runs = (HeldRun(0, 0, numel),)
            placed[name] = Sharded(tensor.shape, tensor.dtype, runs, tensor)
        else:
            placed[name] = GatheredParam(
                tensor.shape, tensor.dtype, partial(gather, tensor), tensor
            )
    opened = OpenedModel(peft, ShardedParams(placed, "test", OneRank()))
    content: ModelBase | ModelAdapter = ModelBase(opened, cast=False, merged="default")
    if kind == "adapter":
        content = ModelAdapter(opened, "default", cast=False, check_base=True)
    kept = content.kept(HostMemory(OneRank()).lend(1))
    own = threading.current_thread().name
    assert threads == ([own] * 4 if kind == "merged" else [])  # an adapter's base is not read
    source, _ = kept.source(pb.DescribeTargetResponse(base_dtype=1, adapter_dtype=1))
    outs = [torch.empty(meta.shape) for meta in source.metas]
    with ThreadPoolExecutor(1) as beside:
        beside.submit(source.read, 0, len(outs), outs).result()
    assert set(threads) <= {own}
    if kind == "merged":
        want = peft.merge_and_unload().state_dict()
        for meta, out in zip(source.metas, outs, strict=True):
            assert torch.allclose(out, want[meta.name], atol=1e-5), meta.name
