"""Deltas over the weights that are served: read first, written at the commit, taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rollout_side.memory.served_delta import (
    MOST_UNDO,
    ServedSlot,
    StagedDelta,
    stage_delta,
)
from rollout_side.memory.versions import ElementPlace, ServedBase
from tests.waits import in_thread
from weft_rl.contract.errors import DigestMismatchError, LoadFailedError, NotReadyError
from weft_rl.contract.manifest import Run, plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest
from weft_rl.transport.wire.changes import encode_changes

SHAPES = ((16, 24), (100,), (7,))
MANIFEST = plan_buckets(
    [TensorMeta(f"t.{i}.w", DataType.FLOAT32, shape) for i, shape in enumerate(SHAPES)]
)


def digests_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor_digest(t.view(-1).view(torch.uint8)) for t in tensors)


class Engine:
    """Weights: the first tensor lies in two parts, with room between, or in one; the second lies
    twice."""

    def __init__(self, seed: int = 1, *, in_one_piece: bool = False) -> None:
        torch.manual_seed(seed)
        self.memory = torch.zeros(1000)
        self.places = {
            0: [(0, 200, 10), (200, 384, 300)],
            1: [(0, 100, 500), (0, 100, 700)],
            2: [(0, 7, 900)],
        }
        if in_one_piece:
            self.places[0] = [(0, 384, 16)]
        self.slot = ServedSlot(threading.RLock())
        tensors = [torch.randn(shape) for shape in SHAPES]
        for number, tensor in enumerate(tensors):
            for begin, end, at in self.places[number]:
                self.memory[at : at + end - begin] = tensor.view(-1)[begin:end]
        digests = digests_of(tensors)
        self.slot.set(
            ServedBase(
                "t1",
                PolicyVersion("base", 1),
                MANIFEST,
                content_digest(digests),
                lambda index, out: out,
                digests,
                self.place,
            )
        )

    def place(self, tensor: int) -> list[ElementPlace]:
        bits = self.memory.view(torch.int32)
        return [ElementPlace(b, e, bits[at : at + e - b]) for b, e, at in self.places[tensor]]

    @property
    def base(self) -> ServedBase:
        assert self.slot.base is not None
        return self.slot.base

    def tensors(self) -> list[torch.Tensor]:
        found = []
        for number, shape in enumerate(SHAPES):
            copies = {}
            for begin, end, at in self.places[number]:
                copies.setdefault(begin, self.memory[at : at + end - begin].clone())
                assert copies[begin].equal(self.memory[at : at + end - begin])
            found.append(torch.cat([copies[begin] for begin in sorted(copies)]).view(shape))
        return found

    def stage(
        self, number: int, new: Sequence[torch.Tensor], runs: Sequence[Run] = ()
    ) -> StagedDelta:
        """Stage base@``number``, whose tensors are these, in these runs or whole ones."""
        old = self.tensors()
        runs = runs or [Run(i, 0, tensor.numel()) for i, tensor in enumerate(old)]
        sizes = [4] * len(runs)
        payload = encode_changes(_packed(old, runs), _packed(new, runs), runs, sizes).payload
        version = PolicyVersion("base", number)
        return stage_delta(self.base, f"t{number}", version, [(runs, payload)])


def _packed(tensors: Sequence[torch.Tensor], runs: Sequence[Run]) -> torch.Tensor:
    payload = torch.zeros(sum(run.payload_bytes(4) for run in runs), dtype=torch.uint8)
    at = 0
    for run in runs:
        flat = tensors[run.tensor].view(-1)[run.first : run.end]
        rows = flat.as_strided((run.repeats, run.count), (run.stride or run.count, 1))
        begin = at + run.first * 4 - run.begin_bytes(4)
        payload[begin : begin + 4 * run.num_elements] = rows.contiguous().view(-1).view(torch.uint8)
        at += run.payload_bytes(4)
    return payload


def changed(tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    new = [tensor.clone() for tensor in tensors]
    for tensor in new:
        flat = tensor.view(-1)
        at = torch.rand(len(flat)) < 0.1
        at[-1] = True
        flat[at] += 1
    return new


def same(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, two))


COLUMNS = [Run(0, 0, 8, 24, 16), Run(0, 8, 16, 24, 16), Run(1, 0, 50), Run(1, 50, 50), Run(2, 0, 7)]


@pytest.mark.parametrize("in_one_piece", [False, True])
@pytest.mark.parametrize("runs", [(), COLUMNS])
def test_nothing_is_written_before_it_is_applied_and_all_can_be_taken_back(
    runs: Sequence[Run], in_one_piece: bool
) -> None:
    engine = Engine(in_one_piece=in_one_piece)
    made = [engine.tensors()]
    for number in (2, 3, 4):
        new = changed(made[-1], number)
        before = engine.memory.clone()
        staged = engine.stage(number, new, runs)
        assert staged.content_digest == content_digest(digests_of(new))
        assert staged.tensor_digests == digests_of(new)
        assert engine.memory.equal(before)
        engine.slot.apply(staged)
        assert same(engine.tensors(), new)
        assert engine.base.version == PolicyVersion("base", number)
        assert engine.base.content_digest == staged.content_digest
        made.append(new)
    assert [base.version.version for base in engine.slot.reachable] == [3, 2, 1]
    assert 0 < engine.slot.undo_bytes < 4 * 4 * 1000
    wanted = engine.slot.reachable[1]
    assert not engine.slot.switch_to("t9", wanted.content_digest)
    assert engine.slot.switch_to("t2", wanted.content_digest)
    assert same(engine.tensors(), made[1])
    assert engine.base == wanted
    assert [base.version.version for base in engine.slot.reachable] == [1, 3, 4]
    # From where it has gone back to, another delta is applied, and those after it are left.
    engine.slot.apply(engine.stage(5, changed(made[1], 5)))
    assert [base.version.version for base in engine.slot.reachable] == [2, 1]


def test_what_was_gone_back_from_can_be_switched_to_again_until_another_delta() -> None:
    engine = Engine()
    made, bases = [engine.tensors()], [engine.base]
    for number in (2, 3, 4):
        new = changed(made[-1], number)
        engine.slot.apply(engine.stage(number, new))
        made.append(new)
        bases.append(engine.base)
    num_bytes = engine.slot.undo_bytes
    for number in (1, 4, 2, 3, 1, 3):
        wanted = bases[number - 1]
        assert engine.slot.switch_to(wanted.transfer_id, wanted.content_digest)
        assert same(engine.tensors(), made[number - 1])
        assert engine.base == wanted
        assert engine.slot.undo_bytes == num_bytes
        reachable = [base.version.version for base in engine.slot.reachable]
        assert reachable == [*range(number - 1, 0, -1), *range(number + 1, 5)]
    engine.slot.bound(num_bytes - 1)
    assert [base.version.version for base in engine.slot.reachable] == [2, 4]
    engine.slot.switch_to("t2", bases[1].content_digest)
    engine.slot.bound(1)
    assert engine.slot.reachable == ()
    assert engine.slot.switch_to("t2", bases[1].content_digest), "it is there"
    assert not engine.slot.switch_to("t4", bases[3].content_digest)


def test_a_switch_that_fails_on_its_way_ends_where_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    first = engine.base
    for number in (2, 3, 4):
        engine.slot.apply(engine.stage(number, changed(engine.tensors(), number)))
    last = engine.base
    engine.slot.switch_to("t1", first.content_digest)
    before, write, left = engine.memory.clone(), ElementPlace.write, [8]

    def writing(place: ElementPlace, elements: torch.Tensor, values: torch.Tensor) -> None:
        left[0] -= 1
        if not left[0]:  # within the second delta
            raise RuntimeError("an illegal memory access was encountered")
        write(place, elements, values)

    with monkeypatch.context() as patched:
        patched.setattr(ElementPlace, "write", writing)
        with pytest.raises(LoadFailedError) as failed:
            engine.slot.switch_to("t4", last.content_digest)
    assert "dirty" not in failed.value.metadata
    assert engine.memory.equal(before)
    assert engine.base == first
    assert engine.slot.switch_to("t4", last.content_digest)


@pytest.mark.parametrize(("at", "to"), [(1, 4), (4, 1)])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_switch_without_room_on_its_way_ends_where_it_began_or_says_that_it_is_mixed(
    monkeypatch: pytest.MonkeyPatch, at: int, to: int, num_failures: int
) -> None:
    """Reading what a delta was left without takes memory, which an accelerator may not have."""
    engine, bases = Engine(), list[ServedBase]()
    for number in (2, 3, 4, 5):
        bases.append(engine.base)
        engine.slot.apply(engine.stage(number, changed(engine.tensors(), number)))
    assert engine.slot.switch_to(f"t{at}", bases[at - 1].content_digest)
    before, completed, calls = engine.memory.clone(), StagedDelta.completed, [0]

    def complete(delta: StagedDelta) -> StagedDelta:
        calls[0] += 1
        if 2 <= calls[0] < 2 + num_failures:  # of the second delta, and on the way back
            raise torch.OutOfMemoryError("CUDA out of memory")
        return completed(delta)

    with monkeypatch.context() as patched:
        patched.setattr(StagedDelta, "completed", complete)
        with pytest.raises(LoadFailedError, match="out of memory") as failed:
            engine.slot.switch_to(f"t{to}", bases[to - 1].content_digest)
    if num_failures == 1:
        assert "dirty" not in failed.value.metadata
        assert engine.memory.equal(before)
        assert engine.base == bases[at - 1]
        assert engine.slot.switch_to(f"t{to}", bases[to - 1].content_digest)
    else:
        assert failed.value.metadata["dirty"] == "true"
        assert engine.slot.base is None


def test_a_switch_can_be_taken_back() -> None:
    engine = Engine()
    first, before = engine.base, engine.memory.clone()
    engine.slot.apply(engine.stage(2, changed(engine.tensors(), 2)))
    second, after = engine.base, engine.memory.clone()
    assert engine.slot.switch_back()
    assert (engine.base, engine.memory.equal(before)) == (first, True)
    assert engine.slot.switch_back()
    assert (engine.base, engine.memory.equal(after)) == (second, True)


def test_old_elements_are_kept_as_far_as_there_is_room() -> None:
    engine = Engine()
    sizes = []
    for number in (2, 3, 4):
        engine.slot.apply(engine.stage(number, changed(engine.tensors(), number)))
        sizes.append(engine.slot.undo_bytes)
    engine.slot.bound(sizes[-1] - 1)
    assert [base.version.version for base in engine.slot.reachable] == [3, 2]
    assert engine.slot.undo_bytes == sizes[-1] - sizes[0]
    engine.slot.bound(0)
    assert engine.slot.reachable == ()


def test_what_is_switched_by_is_not_forgotten_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiving thread makes room for a push as the engine's thread goes back."""
    engine = Engine()
    made = [engine.tensors()]
    for number in (2, 3):
        made.append(changed(made[-1], number))
        engine.slot.apply(engine.stage(number, made[-1]))
    write_each = StagedDelta.write_each

    def meanwhile(delta: StagedDelta, write: Callable[[Any], None]) -> None:
        in_thread(engine.slot.bound, 0).result(10)
        write_each(delta, write)

    former = engine.slot.reachable[1]
    with monkeypatch.context() as patched:
        patched.setattr(StagedDelta, "write_each", meanwhile)
        assert engine.slot.switch_to(former.transfer_id, former.content_digest)
    assert same(engine.tensors(), made[0])
    assert [base.version.version for base in engine.slot.reachable] == [2, 3]
    engine.slot.bound(0)
    assert engine.slot.reachable == ()


def test_deltas_of_nothing_are_not_kept_without_end() -> None:
    """They take no room, but a place in each heartbeat, and the digests of all tensors."""
    engine = Engine()
    for number in range(2, MOST_UNDO + 4):
        engine.slot.apply(engine.stage(number, engine.tensors()))
        engine.slot.bound(2**30)
    assert engine.slot.undo_bytes == 0
    assert len(engine.slot.reachable) == MOST_UNDO
    assert engine.slot.reachable[0].version == PolicyVersion("base", MOST_UNDO + 2)


def test_weights_that_are_loaded_anew_or_sleep_are_not_gone_back_from() -> None:
    for leave in (lambda slot: slot.set(None), lambda slot: slot.fall_asleep()):
        engine = Engine()
        first = engine.base
        engine.slot.apply(engine.stage(2, changed(engine.tensors(), 2)))
        leave(engine.slot)
        assert engine.slot.base is None
        assert not engine.slot.switch_to(first.transfer_id, first.content_digest)
    engine.slot.wake_up(discarded=False)
    assert engine.base.version == PolicyVersion("base", 2)


@pytest.mark.parametrize("element", [3, 250])
def test_an_old_element_that_is_another_is_refused_by_name(element: int) -> None:
    """In either of the parts that the tensor lies in."""
    engine = Engine()
    new = [tensor.clone() for tensor in engine.tensors()]
    new[0].view(-1)[element] += 1
    old = engine.tensors()
    runs = [Run(i, 0, tensor.numel()) for i, tensor in enumerate(old)]
    payload = encode_changes(_packed(old, runs), _packed(new, runs), runs, [4] * 3).payload
    begin, _, at = next(p for p in engine.places[0] if p[0] <= element < p[1])
    engine.memory.view(torch.int32)[at + element - begin] ^= 1
    before = engine.memory.clone()
    with pytest.raises(DigestMismatchError, match=r"tensor 't\.0\.w' of base@1"):
        stage_delta(engine.base, "t2", PolicyVersion("base", 2), [(runs, payload)])
    assert engine.memory.equal(before)


def test_a_delta_of_a_base_that_is_served_no_more_is_refused() -> None:
    engine = Engine()
    one, other = (engine.stage(number, changed(engine.tensors(), number)) for number in (2, 3))
    engine.slot.apply(one)
    before = engine.memory.clone()
    with pytest.raises(NotReadyError, match="changes base@1, which is not served any more"):
        engine.slot.apply(other)
    engine.slot.set(None)
    with pytest.raises(NotReadyError):
        engine.slot.apply(one)
    assert engine.memory.equal(before)


def test_what_fails_midway_is_taken_back_and_what_cannot_be_is_dirty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    before = engine.memory.clone()
    staged = engine.stage(2, changed(engine.tensors(), 2))
    write, fails = ElementPlace.write, [1]

    def writing(place: ElementPlace, elements: torch.Tensor, values: torch.Tensor) -> None:
        if fails[0] and place.end == 7:  # the last tensor
            fails[0] -= 1
            raise RuntimeError("an illegal memory access was encountered")
        write(place, elements, values)

    monkeypatch.setattr(ElementPlace, "write", writing)
    with pytest.raises(LoadFailedError, match="base@1 is back") as failed:
        engine.slot.apply(staged)
    assert "dirty" not in failed.value.metadata
    assert engine.memory.equal(before)
    assert engine.base.version == PolicyVersion("base", 1)
    fails[0] = 2
    with pytest.raises(LoadFailedError, match="the weights are mixed") as failed:
        engine.slot.apply(staged)
    assert failed.value.metadata["dirty"] == "true"
    assert engine.slot.base is None


def test_what_is_staged_is_committed_under_its_own_digest_alone() -> None:
    engine = Engine()
    staged = engine.stage(2, changed(engine.tensors(), 2))
    staged.check(staged.content_digest)
    with pytest.raises(DigestMismatchError, match="push again"):
        staged.check(b"87654321")
