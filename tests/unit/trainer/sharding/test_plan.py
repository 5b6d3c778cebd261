"""Who sends what: every element once, evenly, by no more ranks than may send."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_side.sharding.plan import Held, ShardPlan, ShardPlans, plan_shards, senders_of
from weft_rl.contract.manifest import Manifest, Run, check_coverage, check_send_plan, plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta


def _metas(*sizes: int) -> list[TensorMeta]:
    return [
        TensorMeta(f"layers.{i}.weight", DataType.FLOAT32, (size,)) for i, size in enumerate(sizes)
    ]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Manifest, list[list[Held]], int]:
    num_ranks = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    held: list[list[Held]] = []
    for index, size in enumerate(sizes):
        ends = sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=6))})
        ranks = st.integers(0, num_ranks - 1)
        held.append([(draw(ranks), Run(index, a, b - a)) for a, b in pairwise(ends)])
    manifest = plan_buckets(_metas(*sizes), draw(st.sampled_from([256, 1024, 4096])))
    return manifest, held, draw(st.integers(1, 12))


def _all(plan: ShardPlan) -> list[Run]:
    return [run for packing in plan.packings for runs in packing.runs or () for run in runs]


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_every_element_is_sent_once_and_handed_to_who_sends_it(
    case: tuple[Manifest, list[list[Held]], int],
) -> None:
    manifest, held, max_senders = case
    plan = plan_shards(manifest, held, max_senders)
    check_coverage([slot.meta for slot in manifest.tensors], _all(plan))
    check_send_plan(plan.packings[0].plan, manifest)
    holder = {run: rank for tensor in held for rank, run in tensor}
    assert len(plan.senders) <= max_senders
    assert not plan.handed.keys() & set(plan.senders)
    assert plan.handed.keys() | set(plan.senders) == set(holder.values())
    if 0 in holder.values():  # it speaks for the trainer, so it has a group to speak in
        assert plan.senders[0] == 0
    for sender, packing in zip(plan.senders, plan.packings, strict=True):
        carried = packing.runs or ()
        givers = {rank: each for rank, each in plan.handed.items() if each.to == sender}
        for runs in carried:
            assert {holder[run] for run in runs} <= {sender, *givers}
        for rank, each in givers.items():
            parts = [tuple(run for run in runs if holder[run] == rank) for runs in carried]
            assert each.runs == tuple(part for part in parts if part)


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(0, 500), st.integers(1, 10**9), min_size=1, max_size=100),
    st.integers(1, 40),
)
def test_senders_are_neighbours_of_those_they_send_for_and_have_alike_much(
    num_bytes: dict[int, int], max_senders: int
) -> None:
    found = senders_of(num_bytes, max_senders)
    assert found.keys() == num_bytes.keys()
    senders = sorted(set(found.values()))
    assert len(senders) <= max_senders
    assert all(found[sender] == sender for sender in senders)
    assert [found[rank] for rank in sorted(found)] == sorted(found.values())
    if len(num_bytes) <= max_senders:
        assert found == {rank: rank for rank in num_bytes}
        return
    share = sum(num_bytes.values()) / max_senders
    for sender in senders:
        sent = sum(size for rank, size in num_bytes.items() if found[rank] == sender)
        assert sent <= share + max(num_bytes.values())


def test_equal_shards_are_spread_evenly() -> None:
    assert senders_of(dict.fromkeys(range(8), 5), 2) == {i: i // 4 * 4 for i in range(8)}


def test_a_plan_is_kept_while_ranks_hold_the_same() -> None:
    manifest, plans = plan_buckets(_metas(16)), ShardPlans()
    halves = [[(0, Run(0, 0, 8)), (1, Run(0, 8, 8))]]
    first = plans.plan(manifest, halves)
    assert isinstance(first, ShardPlan)
    assert plans.plan(manifest, [list(tensor) for tensor in halves]) is first
    other = plans.plan(manifest, [[(0, Run(0, 0, 4)), (1, Run(0, 4, 12))]])
    assert isinstance(other, ShardPlan)
    assert other.digest != first.digest


def test_ranks_that_hold_nothing_do_not_send() -> None:
    plan = plan_shards(plan_buckets(_metas(8)), [[(3, Run(0, 0, 4)), (1, Run(0, 4, 4))]])
    assert plan.senders == (1, 3)
    assert [wire.sender for wire in plan.packings[0].plan.buckets] == [0, 1]
    assert [packing.runs for packing in plan.packings] == [((Run(0, 4, 4),),), ((Run(0, 0, 4),),)]


def test_fewer_send_where_all_would_have_more_buckets_than_may_be() -> None:
    metas = _metas(*[256] * 700)
    held = [[(rank, Run(i, rank, 1)) for rank in range(128)] for i in range(700)]
    plan = plan_shards(plan_buckets(metas, 1024), held, 128)
    assert len(plan.senders) == 93
    assert len(plan.packings[0].plan.buckets) == 93 * 700
    assert len(_all(plan)) == 128 * 700
