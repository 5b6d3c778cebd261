"""Changed elements as they are coded: what is applied is what was compared, or nothing is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import Run
from weft_rl.transport.digests.wsum64 import Part, part_digests
from weft_rl.transport.wire import change_coding, host_changes
from weft_rl.transport.wire.change_coding import BLOCK_ELEMENTS
from weft_rl.transport.wire.changes import (
    RunPlace,
    apply_changes,
    decode_changes,
    encode_changes,
    encode_over,
    join_changes,
    joined_bytes,
    packed_places,
    run_sum,
)

TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LENGTHS = (1, 5, 300, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 40_000)
DENSITIES = (0.0, 0.0005, 0.01, 0.05, 0.3, 0.9, 1.0)


class Pair(NamedTuple):
    """Two versions of a bucket's payload."""

    runs: list[Run]
    sizes: list[int]
    old: torch.Tensor
    new: torch.Tensor

    @property
    def places(self) -> list[RunPlace]:
        return packed_places(self.runs, self.sizes)

    @property
    def parts(self) -> list[Part]:
        found, at = [], 0
        for run, size in zip(self.runs, self.sizes, strict=True):
            row = run.count * size if run.repeats > 1 else 0
            num_bytes = run.payload_bytes(size)
            found.append(Part(at, num_bytes, run.begin_bytes(size), row, run.stride * size))
            at += num_bytes
        return found


def elements(payload: torch.Tensor, place: RunPlace, run: Run, size: int) -> torch.Tensor:
    """Copy the elements of a run."""
    end = place.at + run.num_elements * size
    return payload[place.at : end].clone().view(TYPES[size])


def pair_of(
    runs: list[Run], sizes: list[int], density: float, seed: int, longest: int = 12
) -> Pair:
    """Draw two versions: of what changes, four in five by one unit, others by up to ``longest``."""
    torch.manual_seed(seed)
    num_bytes = sum(run.payload_bytes(size) for run, size in zip(runs, sizes, strict=True))
    old = torch.zeros(num_bytes, dtype=torch.uint8)
    new = old.clone()
    for place, run, size in zip(packed_places(runs, sizes), runs, sizes, strict=True):
        span = slice(place.at, place.at + run.num_elements * size)
        old[span] = torch.randint(0, 256, (run.num_elements * size,), dtype=torch.uint8)
        values = elements(old, place, run, size)
        many = len(values)
        steps = torch.where(
            torch.rand(many) < 0.8,
            torch.randint(0, 2, (many,)) * 2 - 1,
            torch.randint(-longest, longest + 1, (many,)),
        )
        changes = torch.rand(many) < density
        moved = values.to(torch.int64) + torch.where(changes, steps, 0)
        jumps = torch.rand(many) < density * 0.1
        moved = torch.where(jumps, torch.randint(-(2**40), 2**40, (many,)), moved)
        new[span] = moved.to(TYPES[size]).view(torch.uint8)
    return Pair(runs, sizes, old, new)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    runs, sizes = [], []
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 2, 2, 4, 8]))
        unit = 8 // size
        if draw(st.booleans()):
            row = unit * draw(st.integers(1, 20))
            stride = row + unit * draw(st.integers(1, 9))
            first = unit * draw(st.integers(0, 50))
            runs.append(Run(number, first, row, stride, draw(st.integers(2, 60))))
        else:
            runs.append(Run(number, draw(st.integers(0, 3000)), draw(st.sampled_from(LENGTHS))))
        sizes.append(size)
    return pair_of(runs, sizes, draw(st.sampled_from(DENSITIES)), draw(st.integers(0, 2**30)))


def test_this_machine_compiles_the_coder() -> None:
    """It is as fast as docs/deltas.md says; without it, all here would be torch's."""
    assert host_changes.works()


@settings(max_examples=40, deadline=None)
@given(st.lists(pairs(), min_size=1, max_size=3))
def test_joined_changes_are_those_of_all_runs(several: list[Pair]) -> None:
    parts = [encode_changes(pair.old, pair.new, pair.runs, pair.sizes) for pair in several]
    joined = join_changes(parts)
    runs = [run for pair in several for run in pair.runs]
    sizes = [size for pair in several for size in pair.sizes]
    old, new = (torch.cat([getattr(pair, side) for pair in several]) for side in ("old", "new"))
    assert joined.equal(encode_changes(old, new, runs, sizes).payload)
    assert len(joined) == joined_bytes(parts)


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_every_way_of_coding_makes_the_same_payload(pair: Pair) -> None:
    one = change_coding.encode_changes(pair.old, pair.new, pair.runs, pair.sizes)
    other = host_changes.encode(pair.old, pair.new, pair.runs, pair.sizes)
    assert one.payload.equal(other.payload)
    assert one[1:] == other[1:]
    for apply in (change_coding.apply_changes, host_changes.apply):
        data = pair.old.clone()
        assert apply(one.payload, pair.runs, pair.sizes, data, pair.places) == one.sums
        assert data.equal(pair.new)
    where_they_lie = [
        elements(pair.new, *each) for each in zip(pair.places, pair.runs, pair.sizes, strict=True)
    ]
    assert host_changes.encode(pair.old, where_they_lie, pair.runs, pair.sizes).payload.equal(
        one.payload
    )


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_what_is_compared_is_written_over_what_was_there(pair: Pair) -> None:
    for run, size, place in zip(pair.runs, pair.sizes, pair.places, strict=True):
        span = slice(place.at, place.at + run.num_elements * size)
        old = torch.cat([pair.old[span], torch.zeros(-run.num_elements * size % 256).byte()])
        new = elements(pair.new, place, run, size)
        alone = Run(0, 0, run.num_elements)
        packed = torch.cat([new.view(torch.uint8), old[new.nbytes :]])
        wanted = encode_changes(old, packed, [alone], [size])
        coded = encode_over(old, new, alone, size)
        assert coded.payload.equal(wanted.payload)
        assert coded[1:] == wanted[1:]
        assert old.equal(packed)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("density", [0.0, 0.01, 0.9])
def test_threads_share_the_blocks_of_a_bucket(density: float) -> None:
    """They cut runs where blocks end, and one has runs of several sizes."""
    runs = [Run(0, 0, 40, 60, 50_000), Run(1, 7, 1_000_000), *(Run(n, 0, 900) for n in range(2, 9))]
    sizes = [2, 1, 2, 4, 8, 1, 2, 4, 8]
    pair = pair_of(runs, sizes, density, seed=6)
    one = change_coding.encode_changes(pair.old, pair.new, runs, sizes)
    coded = host_changes.encode(pair.old, pair.new, runs, sizes)
    assert coded.payload.equal(one.payload)
    assert coded[1:] == one[1:]
    data = pair.old.clone()
    again = host_changes.encode(data, pair.new, runs, sizes, overwrites=True)
    assert again.payload.equal(one.payload)
    assert data.equal(pair.new)
    data.copy_(pair.old)
    read = host_changes.read(coded.payload, runs, sizes, data, [pair.places])
    assert read.sums == host_changes.apply(coded.payload, runs, sizes, data, pair.places)
    assert data.equal(pair.new)
    read.undo()
    assert data.equal(pair.old)
    read.apply()
    assert data.equal(pair.new)
    if density:
        with pytest.raises(DigestMismatchError, match=r"tensor=0.* other elements"):
            host_changes.apply(coded.payload, runs, sizes, data, pair.places)
        assert data.equal(pair.new)
    if density == 0.01:
        damaged = coded.payload.clone()
        damaged[coded.used_bytes - 40 : coded.used_bytes] = 0
        with pytest.raises(DigestMismatchError, match="malformed"):
            host_changes.apply(damaged, runs, sizes, pair.old, pair.places)


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_what_is_applied_is_what_was_compared(pair: Pair) -> None:
    coded = encode_changes(pair.old, pair.new, pair.runs, pair.sizes)
    assert coded.payload.numel() % 256 == 0
    before, after = (part_digests(payload, pair.parts) for payload in (pair.old, pair.new))
    assert [(a + b) % 2**64 for a, b in zip(before, coded.sums, strict=True)] == after
    data = pair.old.clone()
    apply_changes(coded.payload, pair.runs, pair.sizes, data, pair.places)
    assert data.equal(pair.new)
    if coded.num_changes:  # steps are not taken twice
        with pytest.raises(DigestMismatchError, match="not those that the delta was made from"):
            apply_changes(coded.payload, pair.runs, pair.sizes, pair.new.clone(), pair.places)


@settings(max_examples=60, deadline=None)
@given(pairs(), st.data())
def test_whatever_a_payload_holds_nothing_is_written_unless_all_is(
    pair: Pair, data: st.DataObject
) -> None:
    """Digests find what the network does to it; here nothing is to be read or written elsewhere."""
    payload = encode_changes(pair.old, pair.new, pair.runs, pair.sizes).payload
    match data.draw(st.sampled_from(["flip", "cut", "junk", "longer"])):
        case "flip":
            for at in data.draw(st.lists(st.integers(0, 8 * len(payload) - 1), min_size=1)):
                payload[at // 8] ^= 1 << at % 8
        case "cut":
            payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
        case "junk":
            payload = torch.randint(0, 256, payload.shape, dtype=torch.uint8)
        case "longer":
            payload = torch.cat([payload, payload.new_zeros(256)])
    ends = []
    for apply in (change_coding.apply_changes, host_changes.apply):
        memory = torch.full((len(pair.old) + 512,), 0xAB, dtype=torch.uint8)
        target = memory[256 : 256 + len(pair.old)].copy_(pair.old)
        try:
            apply(payload, pair.runs, pair.sizes, target, pair.places)
            ends.append(target.clone())
        except DigestMismatchError:
            assert target.equal(pair.old)
        assert memory[:256].eq(0xAB).all()
        assert memory[-256:].eq(0xAB).all()
    assert len(ends) in (0, 2), "they refuse the same"
    assert not ends or ends[0].equal(ends[1])


def test_runs_are_applied_to_their_places_in_any_memory() -> None:
    """Columns of a tensor of rows of 24 are where they lie there, and not as they are packed."""
    pair = pair_of([Run(0, 4, 8, 24, 16), Run(1, 3, 70)], [2, 4], 0.2, seed=4)
    coded = encode_changes(pair.old, pair.new, pair.runs, pair.sizes)
    places = [RunPlace(256 + 8, 8, 24), RunPlace(2048 + 12, 70, 0)]
    data = torch.zeros(4096, dtype=torch.uint8)
    wanted = data.clone()
    for memory, payload in ((data, pair.old), (wanted, pair.new)):
        packed = pair.places
        rows = elements(payload, packed[0], pair.runs[0], 2).view(16, 8)
        memory[256 + 8 : 256 + 8 + 16 * 48].view(torch.int16).view(16, 24)[:, :8] = rows
        memory[2060 : 2060 + 280] = elements(payload, packed[1], pair.runs[1], 4).view(torch.uint8)
    apply_changes(coded.payload, pair.runs, pair.sizes, data, places)
    assert data.equal(wanted)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bits_of_numbers_are_bits(size: int) -> None:
    """NaN of any kind, both zeros, and the longest steps, around the ends of the range."""
    low = -(2 ** (8 * size - 1))
    values = torch.tensor([0, low, -1, low, ~low, 1, low + 1, ~low - 8], dtype=torch.int64)
    others = torch.tensor([low, 0, ~low, ~low, low, -1, low, ~low], dtype=torch.int64)
    runs = [Run(0, 0, 8)]
    padding = torch.zeros(256 - 8 * size, dtype=torch.uint8)
    old, new = (
        torch.cat([bits.to(TYPES[size]).view(torch.uint8), padding]) for bits in (values, others)
    )
    coded = encode_changes(old, new, runs, [size])
    apply_changes(coded.payload, runs, [size], old, packed_places(runs, [size]))
    assert old.equal(new)


def test_what_lies_beside_the_runs_is_not_compared() -> None:
    run = Run(0, 3, 10)
    old = torch.zeros(256, dtype=torch.uint8)
    new = torch.full_like(old, 7)
    new[6:26] = 0
    assert encode_changes(old, new, [run], [2]).num_changes == 0


@pytest.mark.parametrize(
    ("density", "bits"), [(0.0052, 12.2), (0.0147, 10.2), (0.0367, 8.7), (0.0959, 7.1)]
)
def test_a_change_takes_so_many_bits(density: float, bits: float) -> None:
    """Changes are drawn as training makes them: 87 % of the steps by one unit, the others
    geometric. The bits that a share of changes needs at least are 10 to 30 % fewer."""
    torch.manual_seed(1)
    many = 2**20
    old = torch.randint(-(2**15), 2**15, (many,)).to(torch.int16)
    steps = torch.where(torch.rand(many) < 0.87, 1, 1 + torch.empty(many).geometric_(0.5))
    steps *= torch.randint(0, 2, (many,)) * 2 - 1
    new = old + torch.where(torch.rand(many) < density, steps, 0).to(torch.int16)
    coded = encode_changes(old.view(torch.uint8), new.view(torch.uint8), [Run(0, 0, many)], [2])
    assert 8 * len(coded.payload) / coded.num_changes < bits


def test_a_payload_is_never_much_longer_than_all_elements() -> None:
    pair = pair_of([Run(i, 0, 40_000) for i in range(3)], [2, 4, 1], 1.0, 3, longest=2**40)
    coded = encode_changes(pair.old, pair.new, pair.runs, pair.sizes)
    assert len(coded.payload) <= len(pair.old) * 1025 / 1024 + 512 * len(pair.runs)


def test_decoded_elements_are_those_that_differ() -> None:
    pair = pair_of([Run(0, 5, 20_000), Run(1, 0, 8, 16, 40)], [2, 4], 0.01, seed=9)
    payload = encode_changes(pair.old, pair.new, pair.runs, pair.sizes).payload
    decoded = decode_changes(payload, pair.runs, pair.sizes)
    for run, size, place, own in zip(pair.runs, pair.sizes, pair.places, decoded, strict=True):
        one, other = (elements(each, place, run, size) for each in (pair.old, pair.new))
        assert own.positions.equal((one != other).nonzero().view(-1))
        assert own.new_values(one[own.positions]).equal(other[own.positions])
        assert own.old_sum == run_sum(run, own.positions, one[own.positions], size)


def _malformed(change: Sequence[tuple[int, int]], match: str) -> None:
    """Refuse a payload in whose header of the only block bytes were changed."""
    pair = pair_of([Run(0, 0, 100)], [2], 0.3, seed=2)
    payload = encode_changes(pair.old, pair.new, pair.runs, pair.sizes).payload
    for at, value in change:
        payload[8 + at] = value
    with pytest.raises(DigestMismatchError, match=match):
        decode_changes(payload, pair.runs, pair.sizes)


def test_what_is_malformed_is_named() -> None:
    _malformed([(0, 101)], "a block's numbers do not fit it")
    _malformed([(4, 90)], "a block's numbers do not fit it")
    _malformed([(0, 0xFF), (1, 0xFF)], "a block's numbers do not fit it")
    _malformed([(6, 200)], "it has another length")
    _malformed([(0, 1)], "a block has another length")
    with pytest.raises(DigestMismatchError, match="it is too short"):
        decode_changes(torch.zeros(0, dtype=torch.uint8), [Run(0, 0, 1)], [2])


def test_changes_of_nothing_write_nothing() -> None:
    """Torch gives an empty list no address."""
    pair = pair_of([Run(0, 0, 40_000), Run(1, 0, 500)], [2, 4], 0.0, seed=4)
    payload = encode_changes(pair.old, pair.new, pair.runs, pair.sizes).payload
    for _ in range(50):
        torch.full((len(pair.runs),), 2**40)  # what memory without values may hold
        read = host_changes.read(payload, pair.runs, pair.sizes, pair.old, [pair.places])
        assert read.sums == [0, 0]
        read.apply()
        read.undo()
    assert pair.old.equal(pair.new)
