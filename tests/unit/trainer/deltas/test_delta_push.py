"""Comparisons, deltas and copies of a rank: its copy follows what the pool has committed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles.shards import held_push
from trainer_side.deltas import committed_copy
from trainer_side.deltas.committed_copy import CommittedCopy
from trainer_side.deltas.delta_push import DeltaPush, compare, delta_packing
from trainer_side.packing.packer import (
    MixedBuckets,
    PackedBuckets,
    Packer,
    PackerCache,
    whole_packing,
)
from trainer_side.params.elements import HeldElements, HeldRun
from trainer_side.pushes.rank_push import HeldPush
from trainer_side.ranks.ranks import OneRank
from trainer_side.sharding.plan import ShardPlan
from trainer_side.sources.source import CastRule, HeldTensors, tensor_source
from weft_rl.contract.errors import DigestMismatchError, NotFiniteError
from weft_rl.contract.manifest import mixed_plan, plan_buckets
from weft_rl.contract.tensors import DataType
from weft_rl.interrupts import Flag, OwnThread
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest
from weft_rl.transport.group import CPU

BASE = b"12345678"


def made(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "a.0.weight": torch.randn(40, 50),
        "a.1.weight": torch.randn(300),
        "b.weight": torch.randn(7, 9).bfloat16(),
        "c.count": torch.arange(13),
    }


def push_of(tensors: dict[str, torch.Tensor], served: DataType | None = None) -> HeldPush:
    source: Any = tensor_source(tensors, CastRule(served=served), "test")
    packing = whole_packing(plan_buckets(source.metas, 1024))
    held = HeldTensors([source.elements(i) for i in range(len(source.metas))])
    return HeldPush(source, held, packing.manifest, ShardPlan((0,), (packing,), b""), OneRank())


def send(push: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Pack all buckets, as a sender does; return their payloads and the tensors' digests."""
    packer = Packer(push.packing)
    buckets = PackedBuckets(packer, push, 7, False, PackerCache(CPU))
    payloads = []
    for nth in range(len(push.packing.plan.sent_by(push.packing.sender))):
        sealed = buckets.make(nth, lambda: None)
        payloads.append(buckets.wire(nth)[: sealed.payload_bytes].clone())
    assert buckets.are_summed()
    return payloads, buckets.digests([])


def copied(tensors: dict[str, torch.Tensor], served: DataType | None = None) -> CommittedCopy:
    """Return the copy that a dense push leaves."""
    push = push_of(tensors, served)
    copy = push.copy = CommittedCopy(push.packing, CPU)
    assert copy.key == b""
    send(push)
    assert copy.key == b""  # it is of no version before the commit
    copy.committed(BASE)
    assert copy.key == push.packing.manifest.layout_digest + BASE
    return copy


def delta_of(tensors: dict[str, torch.Tensor], copy: CommittedCopy, **more: Any) -> DeltaPush:
    push = push_of(tensors, **more)
    changes = compare(push, copy, CPU, finite=False)
    return DeltaPush(push, delta_packing(push.packing, BASE, changes.sizes), changes, copy, 0.1)


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["a.0.weight"][3, 5:9] *= 1.5
    new["a.0.weight"][39, 49] = -0.0
    new["b.weight"].view(torch.int16)[2, 2] += 1
    new["c.count"][12] = -1
    return new


@pytest.mark.parametrize("served", [None, DataType.BFLOAT16])
def test_a_delta_has_the_digests_of_all_elements_and_the_copy_follows_it(
    served: DataType | None,
) -> None:
    old = made(1)
    new = changed(old)
    copy = copied(old, served)
    for tensors in (new, old, changed(new)):
        whole, digests = send(push_of(tensors, served))
        delta = delta_of(tensors, copy, served=served)
        payloads, found = send(delta)
        assert found == digests
        assert [len(p) for p in payloads] == [w.payload_bytes for w in delta.packing.plan.buckets]
        assert sum(map(len, payloads)) < sum(map(len, whole))
        assert copy.content_digest == BASE  # sending alone changes nothing
        delta.committed(BASE)
        assert all(torch.equal(copy.payload(nth), each) for nth, each in enumerate(whole))
        assert copy.totals == digests


def mixed_of(tensors: dict[str, torch.Tensor], copy: CommittedCopy) -> DeltaPush:
    push = push_of(tensors)
    changes = compare(push, copy, CPU, finite=False)
    packing = delta_packing(push.packing, BASE, changes.sizes)
    plan = mixed_plan(packing.plan, push.packing.plan)
    return DeltaPush(push, packing, changes, copy, 0.1, plan)


def buckets_of(push: DeltaPush) -> MixedBuckets:
    """Return the buckets of a mixed push, as ``PushSender`` makes them."""
    assert push.behind is not None
    changes, whole = (
        PackedBuckets(Packer(part.packing), part, 7, False, PackerCache(CPU))
        for part in (push, push.behind)
    )
    return MixedBuckets(push, changes, whole)


def test_a_mixed_push_is_the_delta_and_then_all_elements_with_the_digests_of_both() -> None:
    old = made(1)
    copy, new = copied(old), changed(old)
    whole, digests = send(push_of(new))
    changes, _ = send(delta_of(new, copy))
    push = mixed_of(new, copy)
    buckets, sent = buckets_of(push), list[torch.Tensor]()
    num_buckets = len(push.plan.buckets)
    assert num_buckets == len(changes) + len(whole) == len(push.plan.sent_by(0))
    for index in range(num_buckets):
        sealed = buckets.make(index, lambda: None)
        sent.append(buckets.wire(index)[: sealed.payload_bytes].clone())
        # What is held goes along when it is sent on in another group, of whichever part it is.
        held = range(max(0, index + 1 - buckets.num_buffers), index + 1)
        before = [buckets.wire(nth).clone() for nth in held]
        buckets.move(held)
        for nth, wire in zip(held, before, strict=True):
            size = push.plan.buckets[nth].payload_bytes
            assert torch.equal(buckets.wire(nth)[:size], wire[:size])
    assert all(map(torch.equal, sent, [*changes, *whole]))
    assert buckets.are_summed()
    assert buckets.digests([]) == digests
    assert (buckets.manifest, buckets.plan) == (push.packing.manifest, push.plan)
    assert not buckets.spoiled
    push.committed(BASE)
    assert all(torch.equal(copy.payload(nth), each) for nth, each in enumerate(whole))


def test_a_copy_of_which_the_delta_makes_other_elements_than_were_sent_is_given_up() -> None:
    copy, new = copied(made(1)), changed(made(1))
    copy.payload(0).view(torch.int32)[77] ^= 1 << 12
    push = mixed_of(new, copy)
    buckets = buckets_of(push)
    for index in range(len(push.plan.buckets)):
        buckets.make(index, lambda: None)
    assert buckets.digests([]) == send(push_of(new))[1]  # of what is true
    with pytest.raises(DigestMismatchError, match="damaged"):
        push.committed(BASE)


def test_a_copy_that_cannot_follow_is_of_no_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copied(made(1))
    delta = delta_of(changed(made(1)), copy)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(committed_copy, "start_applying", full)
    delta.committed(BASE)
    assert not copy.is_valid
    assert "the next push sends all elements, for a new copy of them: CUDA" in caplog.text
    assert copy.key == b""


def test_who_reads_the_copy_waits_for_it_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copied(made(1))
    delta, begin, start = delta_of(changed(made(1)), copy), Flag(), committed_copy.start_applying

    def late(*args: Any) -> Any:
        assert begin.wait(10)
        return start(*args)

    monkeypatch.setattr(committed_copy, "start_applying", late)
    delta.committed(b"another!")  # does not wait
    OwnThread(begin.set).start()
    assert copy.content_digest == b"another!"
    assert torch.equal(copy.payload(0), send(push_of(changed(made(1))))[0][0])


_EXITING = """
import sys, threading
from pathlib import Path
from tests.unit.trainer.deltas import test_delta_push as t
from trainer_side.deltas import committed_copy
start = committed_copy.start_applying

def late(*args):
    threading.main_thread().join()  # the process is ending
    threading.Event().wait(0.3)  # by its work, a moment later
    Path(sys.argv[1]).touch()
    return start(*args)

copy = t.copied(t.made(1))
delta = t.delta_of(t.changed(t.made(1)), copy)
committed_copy.start_applying = late
delta.committed(t.BASE)
"""


def test_a_process_ends_after_its_copy_has_followed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _EXITING, str(tmp_path / "written")]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "written").exists()


def test_nothing_that_changed_is_a_delta_of_nothing() -> None:
    copy = copied(made(1))
    delta = delta_of(made(1), copy)
    assert delta.compared.num_changes == 0
    assert send(delta)[1] == [tensor_digest(t.view(-1).view(torch.uint8)) for t in made(1).values()]


def test_a_delta_that_is_sent_again_is_the_same() -> None:
    """A push that resumes in another group makes buckets again; one that fails leaves the copy."""
    copy = copied(made(1))
    first, again = (send(delta_of(changed(made(1)), copy)) for _ in range(2))
    assert first[1] == again[1]
    assert all(map(torch.equal, first[0], again[0]))
    assert content_digest(copy.totals) == content_digest(send(push_of(made(1)))[1])


def test_a_copy_that_was_filled_in_part_is_of_no_version() -> None:
    push = push_of(made(1))
    copy = push.copy = CommittedCopy(push.packing, CPU)
    packer = Packer(push.packing)
    buckets = PackedBuckets(packer, push, 7, False, PackerCache(CPU))
    buckets.make(0, lambda: None)
    copy.committed(BASE)
    assert not copy.is_valid
    copy = copied(made(1))
    push.copy = copy
    buckets = PackedBuckets(packer, push, 7, False, PackerCache(CPU))
    buckets.make(0, lambda: None)  # a dense push that fails then
    assert not copy.is_valid


def test_values_that_are_not_finite_are_found_while_comparing() -> None:
    copy, tensors = copied(made(1)), changed(made(1))
    tensors["b.weight"][0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match=r"b\.weight"):
        compare(push_of(tensors), copy, CPU, finite=True)
    assert copy.is_valid


def test_each_rank_compares_what_it_holds() -> None:
    """Each rank's delta is of its half of a tensor, and their digests add up."""
    tensors = {"a.weight": torch.arange(64.0).view(8, 8)}
    source: Any = tensor_source(tensors, CastRule(), "test")
    manifest = plan_buckets(source.metas)
    runs = (HeldRun(0, 0, 24), HeldRun(1, 24, 40))

    def push_at(rank: int) -> HeldPush:
        flat = tensors["a.weight"].view(-1)[runs[rank].begin :][: runs[rank].numel]
        ranks = OneRank()
        ranks.rank, ranks.size = rank, 2
        return held_push(
            source, [HeldElements(runs, rank, flat, [(0, len(flat))])], ranks, manifest
        )

    copies = []
    for rank in (0, 1):
        push = push_at(rank)
        push.copy = CommittedCopy(push.packing, CPU)
        send(push)
        push.copy.committed(BASE)
        copies.append(push.copy)
    tensors["a.weight"][5, 5] = -1
    deltas = [compare(push_at(rank), copies[rank], CPU, finite=False) for rank in (0, 1)]
    assert [each.num_changes for each in deltas] == [0, 1]
    sums = [each.totals(copy) for each, copy in zip(deltas, copies, strict=True)]
    whole = tensor_digest(tensors["a.weight"].view(-1).view(torch.uint8))
    assert sum(own[0] for own in sums) % 2**64 == whole
    packing = delta_packing(push_at(0).packing, BASE, [256, 512])
    assert [(w.sender, w.payload_bytes) for w in packing.plan.buckets] == [(0, 256), (1, 512)]
