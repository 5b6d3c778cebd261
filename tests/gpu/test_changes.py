"""Kernels that code changes write and refuse what the specification in torch does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import Run
from weft_rl.transport.wire import change_kernels
from weft_rl.transport.wire.change_coding import (
    BLOCK_ELEMENTS,
    EncodedChanges,
    RunPlace,
    apply_changes,
    encode_changes,
    packed_places,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda")
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Case(NamedTuple):
    """Two payloads of runs, on the host."""

    runs: tuple[Run, ...]
    itemsizes: tuple[int, ...]
    old: torch.Tensor
    new: torch.Tensor


def make_case(seed: int, *, max_elements: int = 40000) -> Case:
    """Draw runs of all kinds and sizes, and changes of all densities and kinds in each."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    runs, itemsizes = [], []
    for _ in range(draw.randint(1, 6)):
        num = draw.choice(
            [1, 7, draw.randint(1, 300), draw.randint(1, max_elements), BLOCK_ELEMENTS,
             BLOCK_ELEMENTS + 1, draw.randint(16000, 17000)]
        )  # fmt: skip
        first = draw.choice([0, 0, draw.randint(0, 1000), draw.randint(0, 10**7), 5 * 10**9 + 3])
        run = Run(0, first, num)
        if draw.random() < 0.2:
            count = draw.randint(1, num)
            run = Run(0, first, count, count + draw.randint(0, 500), max(2, num // count))
        runs.append(run)
        itemsizes.append(draw.choice([1, 2, 2, 2, 4, 8]))
    size = sum(run.payload_bytes(s) for run, s in zip(runs, itemsizes, strict=True))
    old = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    new = old.clone()
    for place, run, itemsize in zip(packed_places(runs, itemsizes), runs, itemsizes, strict=True):
        num = run.num_elements
        own = new[place.at : place.at + num * itemsize].view(_DTYPES[itemsize])
        own.copy_(changed(own, draw, generator))
    return Case(tuple(runs), tuple(itemsizes), old, new)


def changed(own: torch.Tensor, draw: random.Random, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor's bit patterns with some of them changed, by few steps or to any others."""
    num = len(own)
    density, near = draw.choice([0, 0.002, 0.01, 0.05, 0.2, 0.7, 1]), draw.choice([0, 0.5, 0.87, 1])
    random_far = draw.choice([0, 0.1, 1])

    def below(bound: float) -> torch.Tensor:
        return torch.rand(num, generator=generator) < bound

    step = torch.where(below(near), 1, torch.randint(2, 11, (num,), generator=generator))
    other = torch.randint(0, 2**62, (num,), generator=generator)
    to = torch.where(
        below(random_far) & (step > 1), other, own + torch.where(below(0.5), step, -step)
    )
    return torch.where(below(density), to.to(own.dtype), own)


def spread_places(case: Case, seed: int) -> tuple[tuple[RunPlace, ...], int]:
    """Draw a place for each run in memory that is not packed; return the bytes needed, too."""
    draw = random.Random(seed)
    places, at = [], 0
    for run, itemsize in zip(case.runs, case.itemsizes, strict=True):
        num = run.num_elements
        count = draw.choice([num, max(1, num // 3), draw.randint(1, num)])
        stride = count + draw.randint(0, 9)
        at += -at % itemsize
        places.append(RunPlace(at, count, stride))
        at += -(-num // count) * stride * itemsize + draw.randint(0, 20)
    return tuple(places), at


def put(data: torch.Tensor, payload: torch.Tensor, case: Case, places: Sequence[RunPlace]) -> None:
    """Write the elements of a dense payload to their places."""
    packed = packed_places(case.runs, case.itemsizes)
    for run, itemsize, begin, place in zip(case.runs, case.itemsizes, packed, places, strict=True):
        nth = torch.arange(run.num_elements)
        element = nth // place.row * place.stride + nth % place.row
        byte = (place.at + element * itemsize).unsqueeze(1) + torch.arange(itemsize)
        own = payload[begin.at : begin.at + run.num_elements * itemsize]
        data[byte.view(-1)] = own


def wanted_code(wanted: EncodedChanges) -> change_kernels.CodedChanges:
    """Return what the kernels are to say of a bucket, by the specification."""
    _, num_changes, sums, head_bytes, used_bytes, _ = wanted
    return change_kernels.CodedChanges(used_bytes, num_changes, sums, head_bytes)


def check_case(seed: int, device: torch.device, *, max_elements: int = 40000) -> None:
    """Compare what the kernels write, apply, undo and refuse with what the specification does."""
    case = make_case(seed, max_elements=max_elements)
    runs, itemsizes, old, new = case
    wanted = encode_changes(old, new, runs, itemsizes)
    size = wanted.payload.numel()
    room = torch.full((size + seed % 2 * 512,), 7, dtype=torch.uint8, device=device)
    got = change_kernels.encode(old.to(device), new.to(device), runs, itemsizes, room)
    assert got == wanted_code(wanted), (seed, got)
    payload = room[:size]
    assert torch.equal(payload.cpu(), wanted.payload), (seed, case.runs, itemsizes)
    held = new.to(device)
    lying = [
        held[place.at : place.at + run.num_elements * itemsize]
        for place, run, itemsize in zip(
            packed_places(runs, itemsizes), runs, itemsizes, strict=True
        )
    ]
    there, again_in = old.to(device), torch.zeros_like(room)
    assert change_kernels.are_aligned(there, lying, runs, itemsizes)
    assert change_kernels.encode(there, lying, runs, itemsizes, again_in) == got
    assert torch.equal(again_in[:size], payload), seed
    cut = sum(run.payload_bytes(size) for run, size in zip(runs[:1], itemsizes, strict=False))
    several = [there[:cut].clone(), there[cut:].clone()]
    assert change_kernels.encode(several, lying, runs, itemsizes, again_in.zero_()) == got
    assert torch.equal(again_in[:size], payload), seed
    too_small = torch.empty(max(256, size - 256), dtype=torch.uint8, device=device)
    if too_small.numel() < size:
        again = change_kernels.encode(old.to(device), new.to(device), runs, itemsizes, too_small)
        assert again == got, seed

    places, num_bytes = spread_places(case, seed)
    before = torch.full((num_bytes,), 9, dtype=torch.uint8)
    after = before.clone()
    put(before, old, case, places)
    put(after, new, case, places)
    data = before.to(device)
    decoded = change_kernels.decode(payload, runs, itemsizes, data, places)
    decoded.check()
    assert decoded.sums() == wanted.sums, seed
    assert torch.equal(data.cpu(), before), seed
    for _ in range(2):
        decoded.apply()
        assert torch.equal(data.cpu(), after), seed
    decoded.undo()
    assert torch.equal(data.cpu(), before), seed
    check_junk(seed, case, places, before, payload)


def check_junk(
    seed: int,
    case: Case,
    places: tuple[RunPlace, ...],
    before: torch.Tensor,
    payload: torch.Tensor,
) -> None:
    """Compare what is refused of damaged payloads; whatever they are, nothing is written."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    runs, itemsizes = case.runs, case.itemsizes
    for nth in range(6):
        junk = payload.cpu().clone()
        for _ in range(draw.choice([1, 3, 30])):
            at = draw.randrange(len(junk))
            junk[at] = junk[at] ^ (1 << draw.randrange(8))
        if nth == 0:
            junk.random_(0, 256, generator=generator)
        elif nth == 1:
            junk = junk[: draw.randrange(0, len(junk), 8)]
        data, expected = before.to(payload.device), before.clone()
        is_refused = False
        try:
            apply_changes(junk, runs, itemsizes, expected, places)
        except DigestMismatchError:
            is_refused = True
        try:
            decoded = change_kernels.decode(junk.to(payload.device), runs, itemsizes, data, places)
            decoded.check()
        except DigestMismatchError:
            assert is_refused, (seed, nth)
            assert torch.equal(data.cpu(), before), (seed, nth)
        else:
            assert not is_refused, (seed, nth)
            decoded.apply()
            assert torch.equal(data.cpu(), expected), (seed, nth)


def test_the_kernels_run() -> None:
    """Without them a push of changes is many times as slow, and right."""
    assert change_kernels.works(CUDA)


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_bytes_and_refusals_are_those_of_the_specification(first: int) -> None:
    for seed in range(first, first + 20):
        check_case(seed, CUDA)


def test_a_bucket_of_hundreds_of_runs() -> None:
    generator = torch.Generator().manual_seed(1)
    runs = tuple(Run(i, i * 37, 70_000 + i * 501) for i in range(300))
    itemsizes = (2,) * len(runs)
    size = sum(run.payload_bytes(2) for run in runs)
    old = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    new = old.clone()
    at = torch.randint(0, size // 2, (size // 200,), generator=generator)
    new.view(torch.int16)[at] += 1
    wanted = encode_changes(old, new, runs, itemsizes)
    out = torch.empty(size // 8 // 256 * 256, dtype=torch.uint8, device=CUDA)
    there = old.to(CUDA), new.to(CUDA)
    for _ in range(5):  # the order in which blocks are coded differs
        got = change_kernels.encode(*there, runs, itemsizes, out)
        assert got == wanted_code(wanted)
        assert torch.equal(out[: got.num_bytes].cpu(), wanted.payload)
    places = tuple(packed_places(runs, itemsizes))
    decoded = change_kernels.decode(out[: got.num_bytes], runs, itemsizes, there[0], places)
    decoded.check()
    decoded.apply()
    # Only elements of runs are applied, and changes were drawn beside them, too.
    expected = old.clone()
    for place, run in zip(places, runs, strict=True):
        own = slice(place.at, place.at + 2 * run.num_elements)
        expected[own] = new[own]
    assert torch.equal(there[0].cpu(), expected)
    decoded.undo()
    assert torch.equal(there[0].cpu(), old)


def test_other_weights_are_refused() -> None:
    case = make_case(3)
    there = case.old.to(CUDA)
    wanted = encode_changes(case.old, case.new, case.runs, case.itemsizes)
    assert wanted.num_changes
    places = tuple(packed_places(case.runs, case.itemsizes))
    data = case.new.to(CUDA)
    payload = wanted.payload.to(CUDA)
    decoded = change_kernels.decode(payload, case.runs, case.itemsizes, data, places)
    with pytest.raises(DigestMismatchError, match="not those that the delta was made from"):
        decoded.check()
    change_kernels.decode(payload, case.runs, case.itemsizes, there, places).check()
