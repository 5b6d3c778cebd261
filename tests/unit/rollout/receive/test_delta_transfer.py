"""Deltas as a replica receives them: applied to a copy, digested whole, and refused as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import PartialTransfer, StagedVersion, bucket_starts, tensors_in
from rollout_side.receive import delta_transfer
from rollout_side.receive.delta_transfer import DeltaTransfer
from rollout_side.spill.files import Link, read_into, read_manifest, write_changes, write_version
from tests.doubles.wire import seal_wire
from weft_rl import interrupts
from weft_rl.contract.errors import (
    DigestMismatchError,
    InvalidManifestError,
    NotReadyError,
    WeftError,
)
from weft_rl.contract.manifest import (
    Manifest,
    Run,
    SendPlan,
    WireBucket,
    make_send_plan,
    plan_buckets,
    whole_runs,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import content_digest, part_digests, tensor_digest
from weft_rl.transport.group import CPU
from weft_rl.transport.wire import changes, host_changes
from weft_rl.transport.wire.buckets import ArrivedBucket, changes_parts, run_parts
from weft_rl.transport.wire.changes import encode_changes

NONCE = 7
SHAPES = ((16, 24), (100,), (8, 16), (3,), (5, 7))
#: Runs of one bucket, for each wire bucket.
Cut = Callable[[Manifest], list[list[Run]]]


def layout() -> Manifest:
    metas = [TensorMeta(f"t.{i}.w", DataType.FLOAT32, shape) for i, shape in enumerate(SHAPES)]
    return plan_buckets(metas, 2048)


def whole(manifest: Manifest) -> list[list[Run]]:
    return [[*runs] for runs in whole_runs(manifest)]


def joined(manifest: Manifest) -> list[list[Run]]:
    """One wire bucket for all buckets of the layout."""
    return [[run for runs in whole_runs(manifest) for run in runs]]


def in_columns(manifest: Manifest) -> list[list[Run]]:
    """Two wire buckets for each bucket: of matrices the first 8 columns, and the others."""
    found: list[list[Run]] = []
    for tensors in manifest.tensors_by_bucket:
        halves: tuple[list[Run], list[Run]] = ([], [])
        for tensor in tensors:
            shape = manifest.tensors[tensor].meta.shape
            rows, columns = shape if len(shape) == 2 else (1, shape[0])
            if rows > 1 and columns % 2 == 0:
                halves[0].append(Run(tensor, 0, 8, columns, rows))
                halves[1].append(Run(tensor, 8, columns - 8, columns, rows))
            else:
                halves[0].append(Run(tensor, 0, 1))
                halves[1].append(Run(tensor, 1, rows * columns - 1))
        found += halves
    return found


def packed(
    manifest: Manifest, tensors: Sequence[torch.Tensor], runs: Sequence[Run]
) -> torch.Tensor:
    payload = torch.zeros(sum(run.payload_bytes(4) for run in runs), dtype=torch.uint8)
    for run, part in zip(runs, run_parts(manifest, runs), strict=True):
        flat = tensors[run.tensor].view(-1)[run.first : run.end]
        rows = flat.as_strided((run.repeats, run.count), (run.stride or run.count, 1))
        at = part.at + (0 if run.repeats > 1 else run.first * 4 - run.begin_bytes(4))
        content = rows.contiguous().view(torch.uint8).view(-1)
        payload[at : at + content.numel()] = content
    return payload


def digest_of(tensors: Sequence[torch.Tensor]) -> bytes:
    return content_digest([tensor_digest(t.reshape(-1).view(torch.uint8)) for t in tensors])


class Delta(NamedTuple):
    """Delta as its sender makes it."""

    plan: SendPlan
    wires: list[torch.Tensor]


def delta(
    manifest: Manifest, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], cut: Cut
) -> Delta:
    carried = cut(manifest)
    num_senders = max(1, len(carried) // len(manifest.buckets))
    payloads = [
        encode_changes(
            packed(manifest, old, runs), packed(manifest, new, runs), runs, [4] * len(runs)
        ).payload
        for runs in carried
    ]
    plan = make_send_plan(
        num_senders,
        [
            WireBucket(i % num_senders, i // num_senders, len(payload), len(carried[i]))
            for i, payload in enumerate(payloads)
        ],
        digest_of(old),
    )
    wires = []
    for index, (runs, payload) in enumerate(zip(carried, payloads, strict=True)):
        wire = torch.zeros(plan.wire_bytes(index), dtype=torch.uint8)
        wire[: len(payload)] = payload
        digests = part_digests(payload, changes_parts(len(payload)))
        seal_wire(wire, len(payload), NONCE, index, digests, runs)
        wires.append(wire)
    return Delta(plan, wires)


class Replica:
    """Store of a replica that holds one base, and what it receives."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.manifest = layout()
        self.store = WorkerStore(2**20, 2**20, 1)
        segment = self.store.reserve("t0", self.manifest.wire_bytes, adapter=False)
        starts = bucket_starts(self.manifest)
        for slot, tensor in zip(self.manifest.tensors, tensors, strict=True):
            begin = starts[slot.bucket] + slot.offset_bytes
            segment.data[begin : begin + slot.meta.num_bytes] = tensor.view(-1).view(torch.uint8)
        base = PolicyVersion("base", 1)
        digest = digest_of(tensors)
        self.held = StagedVersion("t0", base, self.manifest, segment, digest)
        self.store.put_staged(self.held)
        self.store.keep_base("t0")
        self.reported: list[int] = []
        self.loans: list[ExitStack] = []

    def prepared(self, plan: SendPlan, partial_: PartialTransfer | None = None) -> DeltaTransfer:
        """Prepare as a receiver does."""
        find = partial(self.store.base_of_content, self.manifest.layout_digest, plan.delta_from)
        with ExitStack() as loan:
            loan.callback(self.loans.pop)
            self.loans.append(loan)
            base = loan.enter_context(self.store.lend(find))
            if partial_ is None:
                segment = self.store.reserve("t1", self.manifest.wire_bytes, adapter=False)
                segment.data.fill_(0xAB)  # it was used before
                partial_ = PartialTransfer("t1", "trainer", self.manifest, segment, [], True)
            version, report = PolicyVersion("base", 2), self.reported.append
            return DeltaTransfer(self.store, version, partial_, plan, base, loan.pop_all(), report)

    def receive(self, transfer: DeltaTransfer, wires: Sequence[torch.Tensor], first: int = 0,
                end: int | None = None, *, lent: bool = False) -> None:  # fmt: skip
        ring = transfer.ring(first, CPU, 2, lambda: None)
        assert ring.copies_lent
        for index in range(first, len(wires) if end is None else end):
            if lent:
                theirs = wires[index].clone()
                done = ring.accept(index, NONCE, ArrivedBucket(theirs))
                theirs.fill_(0xCD)
                done()
            else:
                ring.wire(index)[:] = wires[index]
                ring.accept(index, NONCE)()
            ring.wire(index).fill_(0xEE)  # the next bucket comes there
        assert ring.sink.num_kept == transfer.num_verified

    def staged(self, digest: bytes) -> list[torch.Tensor]:
        version = self.store.staged("t1", digest)
        return [tensor for _, tensor in tensors_in(self.manifest, version.segment.data)]

    @property
    def is_as_before(self) -> bool:
        """Whether it holds one base, unchanged, that nobody reads, and nothing else."""
        own = [t for _, t in self.held.tensors()]
        is_same = digest_of(own) == self.held.content_digest
        return is_same and self.store.usage().retained_bases == (1,) and not self.loans


def values(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape) for shape in SHAPES]


def changed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    new = [tensor.clone() for tensor in tensors]
    new[0][3, 5:19] *= 1.5
    new[2].view(torch.int32)[7, 15] += 1
    new[3][0] = float("nan")
    new[4][4, 6] = -0.0
    return new


def same(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("cut", [whole, joined, in_columns])
@pytest.mark.parametrize("lent", [False, True])
def test_what_is_staged_is_what_all_elements_would_make(cut: Cut, lent: bool) -> None:
    old = values(1)
    new = changed(old)
    replica = Replica(old)
    made = delta(replica.manifest, old, new, cut)
    transfer = replica.prepared(made.plan)
    assert transfer.num_verified == 0
    replica.receive(transfer, made.wires, lent=lent)
    assert transfer.finish(lambda: None) == digest_of(new)
    assert same(replica.staged(digest_of(new)), new)
    assert replica.is_as_before
    num_buckets = len(replica.manifest.buckets)
    assert replica.reported[:num_buckets] == [*range(num_buckets)]
    assert {*replica.reported[num_buckets:]} == {num_buckets - 1}
    # Changes are not kept with a base that is served.
    replica.store.keep_base("t1")
    assert transfer.num_verified == 0
    assert replica.store.retained_bases() == (2,)


def test_a_coder_that_is_being_compiled_is_waited_for_with_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = values(1)
    new, replica = changed(old), Replica(old)
    made = delta(replica.manifest, old, new, whole)
    works, compiled = host_changes.works, threading.Event()

    class Reports(list[int]):
        def append(self, bucket: int) -> None:
            super().append(bucket)
            if len(self) > 5 * len(replica.manifest.buckets):
                compiled.set()

    def works_late() -> bool:
        assert compiled.wait(20), "nothing was reported"
        return works()

    replica.reported = Reports()
    transfer = replica.prepared(made.plan)
    replica.receive(transfer, made.wires)
    monkeypatch.setattr(interrupts, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(host_changes, "works", works_late)
    changes.warm.cache_clear()
    assert transfer.finish(lambda: None) == digest_of(new)


@pytest.mark.parametrize("cut", [whole, joined, in_columns])
def test_what_is_written_to_disk_is_kept_as_it_came(
    cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_transfer, "KEPT_SHARE", 0.1)  # ten times its bytes: it is tiny
    old = values(1)
    new, replica = changed(old), Replica(old)
    replica.store.writes_copies = True
    made = delta(replica.manifest, old, new, cut)
    transfer = replica.prepared(made.plan)
    replica.receive(transfer, made.wires)
    transfer.finish(lambda: None)
    replica.store.keep_base("t1")
    held = replica.store.held(PolicyVersion("base", 2))
    assert [each.on_host() for each in held.changes] == held.changes, "they came there"
    (parent, own) = (tmp_path / "base@1", tmp_path / "base@2")
    for directory in (parent, own):
        directory.mkdir()
    write_version(parent, replica.held, "", "f", going_on=lambda: True)
    write_changes(own, held, Link(parent, held.changes), "f", going_on=lambda: True)
    data = torch.empty(replica.manifest.wire_bytes, dtype=torch.uint8)
    assert read_into([parent, own], read_manifest(own), data, lambda: None) == digest_of(new)
    assert same([tensor for _, tensor in tensors_in(replica.manifest, data)], new)


@pytest.mark.parametrize(("writes", "share"), [(False, 0.1), (True, 100)])
def test_changes_are_not_kept_where_none_are_written_or_they_are_many(
    writes: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_transfer, "KEPT_SHARE", share)
    old = values(1)
    new, replica = changed(old), Replica(old)
    replica.store.writes_copies = writes
    made = delta(replica.manifest, old, new, whole)
    transfer = replica.prepared(made.plan)
    replica.receive(transfer, made.wires)
    staged = replica.store.staged("t1", transfer.finish(lambda: None))
    assert isinstance(staged, StagedVersion)
    assert staged.changes == []


def test_its_switch_is_prepared_before_it_is_staged() -> None:
    """And says that it goes on: a model takes a while."""
    old = values(1)
    new = changed(old)
    replica = Replica(old)
    made, seen = delta(replica.manifest, old, new, joined), list[bytes]()

    def prepare(staged: StagedVersion, on_progress: Callable[[], None]) -> None:
        assert not replica.store.usage().staged_transfer_ids
        seen.append(staged.content_digest)
        replica.reported.clear()
        on_progress()
        assert replica.reported == [len(replica.manifest.buckets) - 1]

    replica.store.prepare_switch = prepare
    transfer = replica.prepared(made.plan)
    replica.receive(transfer, made.wires)
    assert seen == []
    assert transfer.finish(lambda: None) == digest_of(new)
    assert seen == [digest_of(new)]


def test_buckets_may_come_again_and_a_transfer_may_resume_in_another_group() -> None:
    old = values(1)
    new = changed(old)
    replica = Replica(old)
    made = delta(replica.manifest, old, new, in_columns)
    transfer = replica.prepared(made.plan)
    replica.receive(transfer, made.wires, end=3)
    transfer.keep()
    kept = replica.store.take_partial("t1", "trainer")
    assert kept is not None
    assert kept.num_verified == 3
    transfer = replica.prepared(made.plan, kept)
    replica.receive(transfer, made.wires, first=1)  # two of them for a slower member
    assert transfer.finish(lambda: None) == digest_of(new)
    # Staged whole, it comes to a further group that resumes at the end: made anew from the base.
    again = replica.store.take_partial("t1", "trainer")
    assert again is not None
    transfer = replica.prepared(made.plan, again)
    assert transfer.num_verified == len(made.wires)
    assert transfer.finish(lambda: None) == digest_of(new)
    assert same(replica.staged(digest_of(new)), new)


def _receive_all(replica: Replica, made: Delta) -> None:
    """Receive as a group's thread does; what fails is dropped."""
    transfer = replica.prepared(made.plan)
    try:
        replica.receive(transfer, made.wires)
        transfer.finish(lambda: None)
    except WeftError:
        transfer.keep()
        replica.store.discard("t1")
        raise


def _refused(replica: Replica, made: Delta, error: type[WeftError], match: str) -> None:
    with pytest.raises(error, match=match):
        _receive_all(replica, made)
    assert replica.is_as_before
    assert replica.store.usage().staged_transfer_ids == ()


def test_a_base_that_is_not_held_is_refused_before_memory_is_taken() -> None:
    replica, others = Replica(values(1)), values(2)
    made = delta(replica.manifest, others, changed(others), whole)
    with pytest.raises(NotReadyError, match=r"none is held here.*base@1") as refused:
        replica.prepared(made.plan)
    assert refused.value.reason == "DELTA_REFUSED"
    assert replica.is_as_before
    assert replica.store.usage().free_bytes == 0


def test_a_base_of_another_layout_is_refused() -> None:
    replica = Replica(values(1))
    other = plan_buckets([slot.meta for slot in replica.manifest.tensors], 4096)
    with pytest.raises(NotReadyError, match="in this layout"):
        replica.store.base_of_content(other.layout_digest, digest_of(values(1)))


@pytest.mark.parametrize(("name", "element"), [("t.0.w", (3, 5)), ("t.1.w", (50,))])
def test_a_copy_that_changed_is_refused(name: str, element: tuple[int, ...]) -> None:
    """Where the delta changes it, and elsewhere: it is digested whole as it is copied."""
    old = values(1)
    replica = Replica(old)
    made = delta(replica.manifest, old, changed(old), whole)
    (tensor,) = [t for own, t in replica.held.tensors() if own == name]
    tensor.view(torch.int32)[element] ^= 1 << 9
    with pytest.raises(DigestMismatchError, match="the copy of base@1 here has the digest"):
        _receive_all(replica, made)
    tensor.view(torch.int32)[element] ^= 1 << 9
    assert replica.is_as_before


def test_a_run_that_is_lost_or_comes_twice_is_refused() -> None:
    old = values(1)
    replica = Replica(old)

    def without_last(manifest: Manifest) -> list[list[Run]]:
        found = whole(manifest)
        found[0].pop()
        return found

    def twice(manifest: Manifest) -> list[list[Run]]:
        found = whole(manifest)
        found[-1].append(found[-1][-1])
        return found

    for cut, match in ((without_last, "did not come"), (twice, "came twice")):
        _refused(
            replica, delta(replica.manifest, old, changed(old), cut), InvalidManifestError, match
        )


@pytest.mark.parametrize("at", [-1, 0, 32 + 8 + 16])
def test_bytes_that_changed_on_the_way_are_refused(at: int) -> None:
    """They are of the payload, of the trailer behind it, or of the list of runs behind that."""
    old = values(1)
    replica = Replica(old)
    made = delta(replica.manifest, old, changed(old), whole)
    made.wires[0][made.plan.buckets[0].payload_bytes + at] ^= 1
    _refused(replica, made, DigestMismatchError, "bucket 0")
