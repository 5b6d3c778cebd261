"""Who sends what: every rank what it holds, every element once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_side.sharding.plan import ShardPlan, ShardPlans, plan_shards
from trainer_side.sources.source import Held
from weft_rl.contract.manifest import Manifest, Run, check_coverage, check_send_plan, plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta


def _metas(*sizes: int) -> list[TensorMeta]:
    return [
        TensorMeta(f"layers.{i}.weight", DataType.FLOAT32, (size,)) for i, size in enumerate(sizes)
    ]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Manifest, list[list[Held]]]:
    num_ranks = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    held: list[list[Held]] = []
    for index, size in enumerate(sizes):
        ends = sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=6))})
        ranks = st.integers(0, num_ranks - 1)
        held.append([(draw(ranks), Run(index, a, b - a)) for a, b in pairwise(ends)])
    manifest = plan_buckets(_metas(*sizes), draw(st.sampled_from([256, 1024, 4096])))
    return manifest, held


def _all(plan: ShardPlan) -> list[Run]:
    return [run for packing in plan.packings for runs in packing.runs or () for run in runs]


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_every_element_is_sent_once_by_who_holds_it(
    case: tuple[Manifest, list[list[Held]]],
) -> None:
    manifest, held = case
    plan = plan_shards(manifest, held)
    check_coverage([slot.meta for slot in manifest.tensors], _all(plan))
    check_send_plan(plan.packings[0].plan, manifest)
    holder = {run: rank for tensor in held for rank, run in tensor}
    assert plan.senders == tuple(sorted(set(holder.values())))
    for sender, packing in zip(plan.senders, plan.packings, strict=True):
        assert all(holder[run] == sender for runs in packing.runs or () for run in runs)


def test_a_plan_is_kept_while_ranks_hold_the_same() -> None:
    manifest, plans = plan_buckets(_metas(16)), ShardPlans()
    halves = [[(0, Run(0, 0, 8)), (1, Run(0, 8, 8))]]
    first = plans.plan(manifest, halves)
    assert plans.plan(manifest, [list(tensor) for tensor in halves]) is first
    other = plans.plan(manifest, [[(0, Run(0, 0, 4)), (1, Run(0, 4, 12))]])
    assert other.digest != first.digest


def test_ranks_that_hold_nothing_do_not_send() -> None:
    plan = plan_shards(plan_buckets(_metas(8)), [[(3, Run(0, 0, 4)), (1, Run(0, 4, 4))]])
    assert plan.senders == (1, 3)
    assert [wire.sender for wire in plan.packings[0].plan.buckets] == [0, 1]
    assert [packing.runs for packing in plan.packings] == [((Run(0, 4, 4),),), ((Run(0, 0, 4),),)]
