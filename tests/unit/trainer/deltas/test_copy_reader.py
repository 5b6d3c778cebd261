"""Readers of a copy find the same changes, whatever comes at once and in which order."""

from __future__ import annotations

import random

import pytest
import torch

from tests.unit.trainer.deltas.test_delta_push import BASE, changed, copied, made, push_of, send
from trainer_side.deltas import committed_copy
from trainer_side.deltas import copy_reader as readers
from trainer_side.deltas.copy_reader import CopyReader, copy_reader
from trainer_side.packing.packer import Packer
from weft_rl.contract.errors import NotFiniteError
from weft_rl.contract.manifest import align_up
from weft_rl.contract.tensors import DataType
from weft_rl.transport.group import CPU
from weft_rl.transport.wire.changes import encode_changes


def read(reader: CopyReader, tensors: list[torch.Tensor], order: list[int]) -> None:
    """Take tensors in an order, each in memory that is used again at once."""
    for index in order:
        memory = tensors[index].clone()
        reader.take(index, memory)
        memory.zero_()


def no_room(*args: object, **options: object) -> Packer:
    raise torch.OutOfMemoryError("there is no room for a bucket")


@pytest.fixture(params=["by the host", "in groups", "in small groups"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "by the host":
        monkeypatch.setattr(readers, "has_host_coder", lambda device: False)
    if request.param == "in small groups":
        monkeypatch.setattr(committed_copy, "Packer", no_room)
    kind: str = request.param
    return kind


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("served", [None, DataType.BFLOAT16])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_changes_are_those_of_whole_buckets(seed: int | None, served: DataType | None) -> None:
    old, new = made(1), changed(made(1))
    copy, wanted = copied(old, served), copied(new, served)
    order = list(range(len(old)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    push = push_of(new, served)
    runs = push.packing.runs
    assert runs is not None
    expected = [
        encode_changes(copy.payload(nth), wanted.payload(nth), own, push.packing.itemsizes(own))
        for nth, own in enumerate(runs)
    ]
    reader = copy_reader(copy, CPU, finite=True, compares=True)
    copy.open()
    read(reader, [*new.values()], order)
    assert reader.digests() == send(push)[1]
    found = reader.changes()
    copy.close()
    copy.committed(BASE)
    assert copy.is_valid
    assert [each[1:] for each in found] == [each[1:] for each in expected]
    for nth, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(own.payload, other.payload)
        assert torch.equal(copy.payload(nth), wanted.payload(nth))


@pytest.mark.parametrize("has_room", [True, False])
def test_memory_of_groups_is_reported(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "has_host_coder", lambda device: False)
    copy = copied(made(1))
    assert copy.memory_bytes == copy.num_bytes
    if not has_room:
        monkeypatch.setattr(committed_copy, "Packer", no_room)
    for _ in range(2):  # it is kept for the next push
        copy_reader(copy, CPU, finite=False, compares=True)
        largest = max(slot.meta.num_bytes for slot in copy.packing.manifest.tensors)
        payloads = [wire.payload_bytes for wire in copy.packing.plan.buckets]
        kept = copy.memory_bytes - copy.num_bytes
        assert kept >= 2 * max(payloads) if has_room else kept == align_up(largest)


@pytest.mark.usefixtures("kind")
def test_what_is_not_finite_is_named() -> None:
    new = changed(made(1))
    new["a.1.weight"][7] = float("nan")
    copy = copied(made(1))
    reader = copy_reader(copy, CPU, finite=True, compares=True)
    copy.open()

    def read_all() -> None:
        read(reader, [*new.values()], list(range(len(new))))
        reader.changes()  # in groups it is seen once one is compared

    with pytest.raises(NotFiniteError, match=r"a\.1\.weight"):
        read_all()
    assert not copy.is_valid


def test_a_copy_that_held_nothing_is_filled() -> None:
    copy, wanted = copied(made(2)), copied(made(1))
    reader = copy_reader(copy, CPU, finite=False, compares=False)
    copy.open()
    read(reader, [*made(1).values()], [3, 1, 0, 2])
    assert reader.changes() == []
    assert reader.digests() == wanted.totals
    for nth in range(len(copy.packing.plan.buckets)):
        assert torch.equal(copy.payload(nth), wanted.payload(nth))
