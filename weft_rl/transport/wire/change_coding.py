"""Lossless coding of the elements of a wire bucket that have changed, as operations of torch.

It is the specification, for any device: what is faster is compared with it. Elements are bit
patterns; nothing here knows numbers. All runs of a bucket are coded together, in blocks: what is
done once for each run in Python would take longer than the bytes.

Source: docs/protocol.md, A bucket of changes. Gaps are Golomb's codes with a power of two (Rice,
Some Practical Universal Noiseless Coding Techniques, 1979), their halves in streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import ALIGN_BYTES, Run, align_up
from weft_rl.transport.digests.weights import weights_of

_BLOCK_BITS = 14
#: Elements of a block, which is coded by itself.
BLOCK_ELEMENTS = 1 << _BLOCK_BITS
#: Steps of up to so many units of the bit pattern are coded as such; else the new bits are.
_LONGEST_STEP = 8
_LITERAL = 7
#: The header's first number of a block whose elements are all given as they are.
_RAW = 0xFFFF
#: Bytes compared at a time: in a core's cache, with what is made of them.
_PIECE_BYTES = 2 * 2**20
_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RunPlace(NamedTuple):
    """Place of a run's elements in some memory."""

    at: int
    """Byte of its first element; a multiple of the element's size."""
    row: int
    """Elements of each row."""
    stride: int = 0
    """Elements from the beginning of one row to that of the next; 0 where there is but one."""


class EncodedChanges(NamedTuple):
    """Changed elements of a wire bucket, coded."""

    payload: torch.Tensor
    """uint8, 1-D, a multiple of 256 bytes, on the device of what was compared."""
    num_changes: int
    """Elements that differ."""
    sums: list[int]
    """Number that the digest of each run changes by, from old to new, modulo 2**64."""
    head_bytes: int
    """Bytes of the payload before the bodies."""
    used_bytes: int
    """Bytes of the payload before the zeros at its end."""
    num_buckets: int = 1
    """Wire buckets whose changes these are, together."""


def joined_bytes(parts: Iterable[EncodedChanges]) -> int:
    """Return the size of ``join_changes``."""
    return align_up(sum(part.used_bytes for part in parts))


def join_changes(parts: Sequence[EncodedChanges]) -> torch.Tensor:
    """Return the payload of the runs of several wire buckets: those of the first, of the second and
    so on; uint8, 1-D. That of one is not copied."""
    if len(parts) == 1:
        return parts[0].payload
    sums, headers, bodies = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for part in parts:
        sums_end = 8 * len(part.sums)
        sums.append(part.payload[:sums_end])
        headers.append(part.payload[sums_end : part.head_bytes])
        bodies.append(part.payload[part.head_bytes : part.used_bytes])
    used = sum(part.used_bytes for part in parts)
    zeros = parts[0].payload.new_zeros(align_up(used) - used)
    return torch.cat([*sums, *headers, *bodies, zeros])


def join_encoded(parts: Sequence[EncodedChanges]) -> EncodedChanges:
    """Return the changes of several wire buckets as those of one; see ``join_changes``."""
    if len(parts) == 1:
        return parts[0]
    return EncodedChanges(
        join_changes(parts),
        sum(part.num_changes for part in parts),
        [total for part in parts for total in part.sums],
        sum(part.head_bytes for part in parts),
        sum(part.used_bytes for part in parts),
        sum(part.num_buckets for part in parts),
    )


def grouped(parts: Sequence[EncodedChanges], most_bytes: int) -> list[tuple[EncodedChanges, ...]]:
    """Divide the changes of consecutive wire buckets into groups of at most ``most_bytes``; what
    has more by itself is a group."""
    groups, begin, num_bytes = list[tuple[EncodedChanges, ...]](), 0, 0
    for index, part in enumerate(parts):
        num_bytes += part.used_bytes
        if index > begin and num_bytes > most_bytes:
            groups.append(tuple(parts[begin:index]))
            begin, num_bytes = index, part.used_bytes
    return [*groups, tuple(parts[begin:])] if begin < len(parts) else groups


class DecodedRun(NamedTuple):
    """Elements of a run that a payload lists, ascending."""

    old_sum: int
    """Weighed sum of their old bits; see ``run_sum``."""
    positions: torch.Tensor
    """Places in the run, int64."""
    steps: torch.Tensor
    """Difference of the bits from old to new, int64; of no meaning where they are given."""
    is_given: torch.Tensor
    """True where the new bits are given as they are."""
    given: torch.Tensor
    """These, int64."""

    def new_values(self, old: torch.Tensor) -> torch.Tensor:
        """Return the new bits, of the dtype of the old ones, which are integers."""
        return torch.where(self.is_given, self.given, old.to(torch.int64) + self.steps).to(
            old.dtype
        )


def packed_places(runs: Sequence[Run], itemsizes: Sequence[int]) -> list[RunPlace]:
    """Return the places of runs that lie one behind the other, as a payload of all elements holds
    them."""
    found, at = [], 0
    for run, size in zip(runs, itemsizes, strict=True):
        begin = 0 if run.repeats > 1 else run.first * size - run.begin_bytes(size)
        found.append(RunPlace(at + begin, run.num_elements, 0))
        at += run.payload_bytes(size)
    return found


def head_bytes(runs: Sequence[Run]) -> int:
    """Return the bytes before the bodies in a payload of changes of these runs."""
    return 8 * len(runs) + 8 * sum(-(-run.num_elements // BLOCK_ELEMENTS) for run in runs)


def max_changes_bytes(runs: Sequence[Run], itemsizes: Sequence[int]) -> int:
    """Return the largest size of a payload of changes of these runs: all blocks as they are."""
    total = head_bytes(runs)
    for run, size in zip(runs, itemsizes, strict=True):
        total += run.num_elements * size + 4 * -(-run.num_elements // BLOCK_ELEMENTS)
    return align_up(total)


def run_sum(run: Run, positions: torch.Tensor, bits: torch.Tensor, itemsize: int) -> int:
    """Return the sum of some of a run's elements, weighed as WSUM64 weighs the words of its tensor
    that they lie in, modulo 2**64.

    Args:
        positions: Their places in the run, int64.
        bits: Integers of ``itemsize`` bytes.
    """
    return int(_weighed(run_elements(run, positions), bits, itemsize).sum()) % 2**64


def encode_changes(
    old: torch.Tensor, new: torch.Tensor, runs: Sequence[Run], itemsizes: Sequence[int]
) -> EncodedChanges:
    """Compare two packed versions of a bucket, and code what differs; see ``changes``."""
    blocks = _Blocks.of(runs, itemsizes, old.device)
    changes = _find(old, new, blocks)
    return _Encoder(blocks, changes, old, new).encode()


def decode_changes(
    payload: torch.Tensor, runs: Sequence[Run], itemsizes: Sequence[int]
) -> list[DecodedRun]:
    """Return the elements of each run that a payload lists.

    Raises:
        DigestMismatchError: The payload is malformed; says how.
    """
    return _Decoder(_Blocks.of(runs, itemsizes, payload.device), payload).decode()


def apply_changes(
    payload: torch.Tensor,
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    data: torch.Tensor,
    places: Sequence[RunPlace],
) -> list[int]:
    """Overwrite elements once all old ones were found to be there; see ``changes``."""
    to_write, sums = [], []
    for run, size, place, own in zip(
        runs, itemsizes, places, decode_changes(payload, runs, itemsizes), strict=True
    ):
        memory = data[: data.numel() // size * size].view(_TYPES[size])
        at = place.at // size + own.positions
        if place.stride:
            rows = torch.div(own.positions, place.row, rounding_mode="floor")
            at += rows * (place.stride - place.row)
        old = memory[at]
        if run_sum(run, own.positions, old, size) != own.old_sum:
            raise not_the_base(run)
        new = own.new_values(old)
        sums.append((run_sum(run, own.positions, new, size) - own.old_sum) % 2**64)
        to_write.append((memory, at, new))
    for memory, at, values in to_write:
        memory[at] = values
    return sums


class WrongBaseError(DigestMismatchError):
    """Presence of other elements than were changed, where a delta is to be applied; the delta has
    arrived as it was sent."""


def not_the_base(run: Run) -> WrongBaseError:
    """Return the refusal of memory whose elements of a run are not those that were changed."""
    return WrongBaseError(
        f"{run} holds other elements than those that were changed: the weights here are not those "
        "that the delta was made from"
    )


def malformed(why: str) -> DigestMismatchError:
    """Return the refusal of a payload that nobody has made so."""
    return DigestMismatchError(f"the payload of changes is malformed: {why}")


# -- runs and blocks ---------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """Blocks of all runs of a bucket, one behind the other."""

    runs: Sequence[Run]
    itemsizes: Sequence[int]
    places: list[RunPlace]
    """Places in a payload of all elements."""
    first: torch.Tensor
    """Index of each run's first block; one more for the end. int64, as the others."""
    run: torch.Tensor
    """Run of each block."""
    size: torch.Tensor
    """Bytes of an element of each block."""
    num: torch.Tensor
    """Elements of each block."""

    @classmethod
    def of(cls, runs: Sequence[Run], itemsizes: Sequence[int], device: torch.device) -> _Blocks:
        """Cut runs into blocks."""
        lengths = torch.tensor([run.num_elements for run in runs], device=device)
        counts = -(-lengths // BLOCK_ELEMENTS)
        ends = counts.cumsum(0)
        first = torch.cat([ends.new_zeros(1), ends])
        run = torch.repeat_interleave(counts)
        nth = torch.arange(len(run), device=device) - first[run]
        num = (lengths[run] - nth * BLOCK_ELEMENTS).clamp(max=BLOCK_ELEMENTS)
        size = torch.tensor(list(itemsizes), device=device)[run]
        return cls(runs, itemsizes, packed_places(runs, itemsizes), first, run, size, num)

    def parameter(self, count: torch.Tensor) -> torch.Tensor:
        """Return the bits of a gap's remainder in each block, for so many entries: the first k for
        which 2**k is more than half of the mean distance, less a quarter."""
        halves = (2 * self.num - count) // (4 * count.clamp(min=1))
        _, exponent = torch.frexp(halves.to(torch.float64))
        return exponent.to(torch.int64) * (count > 0)


def run_elements(run: Run, positions: torch.Tensor) -> torch.Tensor:
    """Return the indices in its tensor of a run's elements."""
    if run.repeats == 1:
        return positions + run.first
    rows = torch.div(positions, run.count, rounding_mode="floor")
    return positions + run.first + rows * (run.stride - run.count)


def _weighed(elements: torch.Tensor, bits: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return elements' parts of WSUM64, int64, which wraps around."""
    per_word = 8 // itemsize
    words = torch.div(elements, per_word, rounding_mode="floor")
    values = bits.to(torch.int64)
    if itemsize < 8:
        values = values & ((1 << (8 * itemsize)) - 1)
        values = values << (8 * itemsize * (elements % per_word))
    return weights_of(words) * values


# -- comparing and coding -------------------------------------------------------------


class _Changes(NamedTuple):
    """Elements that differ, in the order of the payload."""

    run: torch.Tensor
    position: torch.Tensor
    old: torch.Tensor
    """Bits, int64; so are those of ``new``."""
    new: torch.Tensor


def _find(old: torch.Tensor, new: torch.Tensor, blocks: _Blocks) -> _Changes:
    """Compare word by word, and look at the elements of the words that differ."""
    one, other = old.view(torch.int64), new.view(torch.int64)
    step = _PIECE_BYTES // 8 if old.device.type == "cpu" else len(one)
    found = [
        (one[at : at + step] != other[at : at + step]).nonzero().view(-1).add_(at)
        for at in range(0, len(one), step)
    ]
    words = torch.cat(found)
    begins, at = [0], 0
    for run, size in zip(blocks.runs, blocks.itemsizes, strict=True):
        at += run.payload_bytes(size)
        begins.append(at // 8)
    edges = torch.searchsorted(words, torch.tensor(begins, device=old.device)).tolist()
    parts = [
        _find_in_run(index, one, other, words[edges[index] : edges[index + 1]], blocks)
        for index in range(len(blocks.runs))
        if edges[index] < edges[index + 1]
    ]
    if not parts:
        empty = words.new_zeros(0)
        return _Changes(empty, empty, empty, empty)
    return _Changes(*map(torch.cat, zip(*parts, strict=True)))


def _find_in_run(
    index: int, one: torch.Tensor, other: torch.Tensor, words: torch.Tensor, blocks: _Blocks
) -> _Changes:
    """Return a run's elements that differ in some words of its payload."""
    run, size, place = blocks.runs[index], blocks.itemsizes[index], blocks.places[index]
    per_word, dtype = 8 // size, _TYPES[size]
    olds, news = one[words].view(dtype), other[words].view(dtype)
    changed = (olds != news).nonzero().view(-1)
    position = words[changed // per_word] * per_word + changed % per_word - place.at // size
    inside = (position >= 0) & (position < run.num_elements)
    if not bool(inside.all()):
        changed, position = _where(inside, changed, position)
    return _Changes(
        torch.full_like(position, index),
        position,
        olds[changed].to(torch.int64),
        news[changed].to(torch.int64),
    )


def _where(mask: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each[mask] for each in values)


class _Encoder:
    """Coder of one bucket's changes."""

    def __init__(
        self, blocks: _Blocks, changes: _Changes, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        self._blocks, self._changes, self._old, self._new = blocks, changes, old, new
        self._device = old.device

    def encode(self) -> EncodedChanges:
        """Return the payload, and what it changes."""
        blocks, changes = self._blocks, self._changes
        nth = changes.position >> _BLOCK_BITS
        block = blocks.first[changes.run] + nth
        within = changes.position - (nth << _BLOCK_BITS)
        count = torch.bincount(block, minlength=len(blocks.num))
        step = _wrapped(changes.new - changes.old, _spread(blocks.size, count))
        is_near = step.abs() == 1
        near_at, far_at = (each.nonzero().view(-1) for each in (is_near, ~is_near))
        far_steps = step[far_at]
        is_given = (far_steps.abs() > _LONGEST_STEP) | (far_steps == _LOWEST)
        near = _GapList.of(blocks, block[near_at], within[near_at])
        far = _GapList.of(blocks, block[far_at], within[far_at])
        given_at = far_at[is_given]
        num_given = torch.bincount(block[given_at], minlength=len(blocks.num))
        lay = _BodyLayout.of(near, far)
        num_bytes = -(-(lay.end + near.unary_bits + far.unary_bits) // 8)
        words = -(-(num_bytes + num_given * blocks.size) // 4)
        raw_words = -(-(blocks.num * blocks.size) // 4)
        is_raw = words >= raw_words
        words = torch.where(is_raw, raw_words, words)
        starts = words.cumsum(0) - words
        acc = torch.zeros(int(words.sum()) + 1, dtype=torch.int64, device=self._device)
        base = 32 * starts
        raw = is_raw.nonzero().view(-1).tolist()
        left_out = is_raw if raw else None
        near.write(acc, base, lay.near, lay.near_unary, left_out)
        far.write(acc, base, lay.far, lay.far_unary(near), left_out)
        signs = (step[near_at] < 0).to(torch.int64)
        near.put(acc, near.spread(base + lay.signs) + near.nth, signs, left_out)
        codes = _codes(far_steps, is_given)
        far.put(acc, far.spread(base + lay.codes) + 4 * far.nth, codes, left_out)
        lower = torch.empty(len(acc), dtype=torch.int32, device=self._device)
        body = lower.copy_(acc.view(torch.int32)[::2]).view(torch.uint8)
        if raw:
            given_at = given_at[~is_raw[block[given_at]]]
        self._write_given(body, 4 * starts + num_bytes, block[given_at], changes.new[given_at])
        for index in raw:
            whole = self._raw(self._new, index)
            at = 4 * int(starts[index])
            body[at : at + len(whole)] = whole
        header = torch.where(is_raw, _RAW, near.count | far.count << 16 | num_given << 32)
        sums, old_sums = self._sums(block, is_raw, raw)
        head = torch.cat([old_sums, header | words << 48]).view(torch.uint8)
        used = len(head) + 4 * int(words.sum())
        payload = torch.zeros(align_up(used), dtype=torch.uint8, device=self._device)
        payload[: len(head)] = head
        payload[len(head) : used] = body[: used - len(head)]
        found = [s % 2**64 for s in sums.tolist()]
        return EncodedChanges(payload, len(changes.run), found, len(head), used)

    def _write_given(
        self,
        body: torch.Tensor,
        begins: torch.Tensor,
        block: torch.Tensor,
        new: torch.Tensor,
    ) -> None:
        """Write new bits that are given as they are, behind each block's codes."""
        size = self._blocks.size[block]
        at = begins[block] + _ranks(block) * size
        for byte in range(max(self._blocks.itemsizes)):
            has = size > byte
            body[at[has] + byte] = ((new[has] >> (8 * byte)) & 0xFF).to(torch.uint8)

    def _raw(self, payload: torch.Tensor, index: int) -> torch.Tensor:
        """Return the bytes of a block's elements in a payload of all."""
        at, num_bytes = self._span(index)
        return payload[at : at + num_bytes]

    def _span(self, index: int) -> tuple[int, int]:
        blocks = self._blocks
        run = int(blocks.run[index])
        size, nth = blocks.itemsizes[run], index - int(blocks.first[run])
        return blocks.places[run].at + nth * BLOCK_ELEMENTS * size, int(blocks.num[index]) * size

    def _sums(
        self, block: torch.Tensor, is_raw: torch.Tensor, raw: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each run's digest changes by, and the sum of the old elements that are
        listed."""
        blocks, changes = self._blocks, self._changes
        sums, old_sums = torch.zeros(2, len(blocks.runs), dtype=torch.int64, device=self._device)
        bounds = torch.arange(len(blocks.runs) + 1, device=self._device)
        edges = torch.searchsorted(changes.run, bounds).tolist()
        for index, (run, size) in enumerate(zip(blocks.runs, blocks.itemsizes, strict=True)):
            own = slice(edges[index], edges[index + 1])
            if own.start == own.stop:
                continue
            elements = run_elements(run, changes.position[own])
            old = _weighed(elements, changes.old[own], size)
            sums[index] = (_weighed(elements, changes.new[own], size) - old).sum()
            old_sums[index] = (old[~is_raw[block[own]]] if raw else old).sum()
        for index in raw:
            number = int(blocks.run[index])
            first = (index - int(blocks.first[number])) * BLOCK_ELEMENTS
            positions = torch.arange(first, first + int(blocks.num[index]), device=self._device)
            size = blocks.itemsizes[number]
            bits = self._raw(self._old, index).clone().view(_TYPES[size])
            elements = run_elements(blocks.runs[number], positions)
            old_sums[number] += _weighed(elements, bits, size).sum()
        return sums, old_sums


_LOWEST = -(2**63)


def _wrapped(steps: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return differences of bits as the shortest way around, modulo the elements' range."""
    half = torch.ones_like(steps) << (8 * sizes - 1)
    return torch.where(sizes < 8, ((steps + half) & (2 * half - 1)) - half, steps)


def _codes(steps: torch.Tensor, is_given: torch.Tensor) -> torch.Tensor:
    """Return the codes of steps of two and more: 0 to 6 upwards, 8 to 14 downwards."""
    codes = torch.where(steps > 0, steps - 2, 6 - steps)
    return torch.where(is_given, _LITERAL, codes)


def _ranks(blocks: torch.Tensor) -> torch.Tensor:
    """Return how many entries before each are of the same block; blocks ascend."""
    if not len(blocks):
        return blocks
    index = torch.arange(len(blocks), device=blocks.device)
    is_first = torch.ones_like(blocks, dtype=torch.bool)
    is_first[1:] = blocks[1:] != blocks[:-1]
    return index - torch.where(is_first, index, 0).cummax(0).values


def _spread(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the value of each entry's block, for so many entries of each."""
    return torch.repeat_interleave(values, counts)


def _add_bits(acc: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Put values of a few bits, which are disjoint, at bit offsets into words of 32 bits, which
    lie in int64."""
    shifted = values << (at & 31)
    word = at >> 5
    acc.index_add_(0, word, shifted & 0xFFFFFFFF)
    acc.index_add_(0, word + 1, shifted >> 32)


@dataclass(frozen=True)
class _GapList:
    """Ascending entries of blocks, as gaps."""

    block: torch.Tensor
    nth: torch.Tensor
    """Place of each entry in its block's list."""
    count: torch.Tensor
    """Entries of each block."""
    bits: torch.Tensor
    """Bits of a remainder in each block."""
    own_bits: torch.Tensor
    """Bits of each entry's remainder."""
    remainder: torch.Tensor
    mark: torch.Tensor
    """Place of the one that ends each entry's quotient, in its block's stream."""
    unary_bits: torch.Tensor
    """Bits of each block's stream of quotients."""

    @classmethod
    def of(cls, blocks: _Blocks, block: torch.Tensor, within: torch.Tensor) -> _GapList:
        """Code the places of entries in their blocks."""
        count = torch.bincount(block, minlength=len(blocks.num))
        firsts = count.cumsum(0) - count
        nth = torch.arange(len(block), device=block.device) - _spread(firsts, count)
        bits = blocks.parameter(count)
        gap = within - 1
        gap[1:] -= within[:-1]
        gap[nth == 0] = within[nth == 0]
        own = _spread(bits, count)
        quotient = gap >> own
        remainder = gap - (quotient << own)
        ends = (quotient + 1).cumsum(0)
        total = torch.cat([ends.new_zeros(1), ends])
        mark = ends - 1 - _spread(total[firsts], count)
        unary_bits = total[firsts + count] - total[firsts]
        return cls(block, nth, count, bits, own, remainder, mark, unary_bits)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each entry's block."""
        return _spread(values, self.count)

    def put(
        self,
        acc: torch.Tensor,
        at: torch.Tensor,
        values: torch.Tensor,
        left_out: torch.Tensor | None,
    ) -> None:
        """Put a value of each entry at a bit offset, unless its block is left out."""
        if left_out is not None:
            at, values = _where(~left_out[self.block], at, values)
        _add_bits(acc, at, values)

    def write(
        self,
        acc: torch.Tensor,
        base: torch.Tensor,
        remainders: torch.Tensor,
        quotients: torch.Tensor,
        left_out: torch.Tensor | None,
    ) -> None:
        """Write remainders and quotients at their offsets from the bodies of blocks, in bits."""
        at = self.spread(base + remainders) + self.nth * self.own_bits
        self.put(acc, at, self.remainder, left_out)
        marks = self.spread(base + quotients) + self.mark
        self.put(acc, marks, torch.ones_like(marks), left_out)


class _BodyLayout(NamedTuple):
    """Offsets in each block's body, in bits."""

    near: torch.Tensor
    """Offset of the remainders of steps by one."""
    signs: torch.Tensor
    far: torch.Tensor
    codes: torch.Tensor
    end: torch.Tensor
    """Offset of the quotients."""

    @classmethod
    def of(cls, near: _GapList, far: _GapList) -> _BodyLayout:
        """Lay the streams of coded lists out."""
        return cls.counted(near.count, near.bits, far.count, far.bits)

    @classmethod
    def counted(
        cls,
        near: torch.Tensor,
        near_bits: torch.Tensor,
        far: torch.Tensor,
        far_bits: torch.Tensor,
    ) -> _BodyLayout:
        """Lay the streams of so many entries out."""
        signs = near * near_bits
        begin = signs + near
        codes = begin + far * far_bits
        return cls(torch.zeros_like(signs), signs, begin, codes, codes + 4 * far)

    @property
    def near_unary(self) -> torch.Tensor:
        """Offsets of the quotients of steps by one."""
        return self.end

    def far_unary(self, near: _GapList) -> torch.Tensor:
        """Return the offsets of the quotients of other steps."""
        return self.end + near.unary_bits


# -- decoding ---------------------------------------------------------------------


class _Decoder:
    """Reader of one bucket's payload, which may be anybody's."""

    def __init__(self, blocks: _Blocks, payload: torch.Tensor) -> None:
        self._blocks, self._payload = blocks, payload
        num_runs, num_blocks = len(blocks.runs), len(blocks.num)
        head = 8 * (num_runs + num_blocks)
        _check(payload.numel() >= head and not payload.numel() % ALIGN_BYTES, "it is too short")
        self._head = head
        numbers = payload[:head].view(torch.int64)
        self._old_sums, header = numbers[:num_runs], numbers[num_runs:]
        near, far, given, words = (header >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        self._is_raw = near == _RAW
        coded = ~self._is_raw
        self._near, self._far, self._given = near * coded, far * coded, given * coded
        self._words = words
        whole = -(-(blocks.num * blocks.size) // 4)
        fits = torch.where(
            self._is_raw,
            (words == whole) & (far == 0) & (given == 0),
            (near + far <= blocks.num) & (given <= far) & ((near + far > 0) | (words == 0)),
        )
        _check(bool(fits.all()), "a block's numbers do not fit it")
        num_words = int(words.sum())
        _check(payload.numel() == align_up(head + 4 * num_words), "it has another length")
        self._starts = words.cumsum(0) - words
        body = payload[head : head + 4 * num_words]
        self._body = body
        # One more, since a value may be read across the end of the last.
        self._acc = torch.cat([body.view(torch.int32), body.new_zeros(8).view(torch.int32)])

    def decode(self) -> list[DecodedRun]:
        """Return what is listed, by run."""
        blocks = self._blocks
        near_bits, far_bits = blocks.parameter(self._near), blocks.parameter(self._far)
        lay = _BodyLayout.counted(self._near, near_bits, self._far, far_bits)
        quotients, end = self._quotients(lay)
        base = 32 * self._starts
        num_bytes = -(-(lay.end + end) // 8)
        coded = ~self._is_raw
        needed = -(-(num_bytes + self._given * blocks.size) // 4)
        _check(bool((needed == self._words)[coded].all()), "a block has another length")
        self._check_zeros(lay.end + end, num_bytes)
        both = self._near + self._far
        block = torch.repeat_interleave(both)
        rank = _ranks(block)
        is_near = rank < self._near[block]
        near, far = block[is_near], block[~is_near]
        nth_near, nth_far = rank[is_near], rank[~is_near] - self._near[far]
        at_near = self._entries(
            near, nth_near, quotients[is_near], (base + lay.near)[near], near_bits
        )
        at_far = self._entries(far, nth_far, quotients[~is_near], (base + lay.far)[far], far_bits)
        signs = self._bits((base + lay.signs)[near] + nth_near, 1)
        codes = self._bits((base + lay.codes)[far] + 4 * nth_far, 4)
        _check(not bool((codes == 15).any()), "a step has no meaning")
        is_given = codes == _LITERAL
        listed = torch.bincount(far[is_given], minlength=len(blocks.num))
        _check(bool((listed == self._given).all()), "a block gives another number of elements")
        steps = torch.where(codes < _LITERAL, codes + 2, 6 - codes)
        given = torch.zeros_like(steps)
        given[is_given] = self._read_given(far[is_given], 4 * self._starts + num_bytes)
        raw = self._raw()
        found = _Listed(
            torch.cat([near, far, raw.block]),
            torch.cat([at_near, at_far, raw.within]),
            torch.cat([1 - 2 * signs, steps, torch.zeros_like(raw.given)]),
            torch.cat([torch.zeros_like(near, dtype=torch.bool), is_given, raw.is_given]),
            torch.cat([torch.zeros_like(near), given, raw.given]),
        )
        return [*self._by_run(found)]

    def _check_zeros(self, ends: torch.Tensor, num_bytes: torch.Tensor) -> None:
        """Refuse what lies behind the codes of blocks, up to a byte, behind their last elements, up
        to a word, and behind the last block, unless it is zero."""
        base, blocks = 32 * self._starts, self._blocks
        is_coded = ~self._is_raw
        codes = self._bits(base + ends, (8 * num_bytes - ends) * is_coded)
        given = torch.where(self._is_raw, blocks.num, self._given) * blocks.size
        used = num_bytes * is_coded + given
        rest = self._bits(base + 8 * used, 8 * (4 * self._words - used))
        behind = self._payload[self._head + len(self._body) :]
        _check(not bool(codes.any() | rest.any() | behind.any()), "it is not filled up with zeros")

    def _quotients(self, lay: _BodyLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the quotients of all gaps, by block, and the bits of each block's streams."""
        both = self._near + self._far
        has = (both > 0).nonzero().view(-1)
        words = self._words[has]
        owner = torch.repeat_interleave(words)
        nth = torch.arange(len(owner), device=owner.device) - (words.cumsum(0) - words)[owner]
        values = self._acc[(self._starts[has])[owner] + nth]
        bits = (values.unsqueeze(1) >> torch.arange(32, device=owner.device)) & 1
        which, bit = bits.nonzero(as_tuple=True)
        mark = 32 * nth[which] + bit - lay.end[has][owner[which]]
        which, mark = _where(mark >= 0, owner[which], mark)
        rank = _ranks(which)
        which, mark, rank = _where(rank < both[has][which], which, mark, rank)
        counts = torch.bincount(which, minlength=len(has))
        _check(bool((counts == both[has]).all()), "a gap does not end")
        before = torch.cat([mark.new_full((1,), -1), mark[:-1]])
        quotients = mark - torch.where(rank == 0, -1, before) - 1
        end = torch.zeros_like(both)
        if len(has):
            end[has] = mark[counts.cumsum(0) - 1] + 1
        return quotients, end

    def _entries(
        self,
        block: torch.Tensor,
        nth: torch.Tensor,
        quotients: torch.Tensor,
        begin: torch.Tensor,
        bits: torch.Tensor,
    ) -> torch.Tensor:
        """Return the places in their blocks of a list's entries."""
        own = bits[block]
        gaps = (quotients << own) + self._bits(begin + nth * own, own)
        ends = (gaps + 1).cumsum(0)
        before = torch.where(nth == 0, ends - gaps - 1, 0).cummax(0).values
        within = ends - 1 - before
        _check(bool((within < self._blocks.num[block]).all()), "an element is none of its block")
        return within

    def _bits(self, at: torch.Tensor, num: torch.Tensor | int) -> torch.Tensor:
        """Return values of so many bits, at most 32, at bit offsets in the bodies."""
        word = at >> 5
        low = self._acc[word].to(torch.int64) & 0xFFFFFFFF
        high = self._acc[word + 1].to(torch.int64) << 32
        mask = (torch.ones_like(at) << num) - 1
        return ((low | high) >> (at & 31)) & mask

    def _read_given(self, block: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Return the bits of elements that are given as they are, int64."""
        size = self._blocks.size[block]
        at = begins[block] + _ranks(block) * size
        found = torch.zeros_like(block)
        for byte in range(max(self._blocks.itemsizes)):
            has = size > byte
            found[has] |= self._body[at[has] + byte].to(torch.int64) << (8 * byte)
        return found

    def _raw(self) -> _Listed:
        """Return all elements of blocks that are given whole."""
        empty = self._starts.new_zeros(0)
        parts = [_Listed(empty, empty, empty, empty.to(torch.bool), empty)]
        for index in self._is_raw.nonzero().view(-1).tolist():
            size = int(self._blocks.size[index])
            at, num = 4 * int(self._starts[index]), int(self._blocks.num[index])
            values = self._body[at : at + num * size].clone().view(_TYPES[size])
            within = torch.arange(num, device=empty.device)
            is_given = torch.ones_like(within, dtype=torch.bool)
            parts.append(
                _Listed(
                    torch.full_like(within, index),
                    within,
                    torch.zeros_like(within),
                    is_given,
                    values.to(torch.int64),
                )
            )
        return _Listed(*map(torch.cat, zip(*parts, strict=True)))

    def _by_run(self, found: _Listed) -> Iterator[DecodedRun]:
        """Yield what is listed of each run, ascending; refuse an element that is listed twice."""
        blocks = self._blocks
        key = found.block * BLOCK_ELEMENTS + found.within
        order = torch.argsort(key)
        key = key[order]
        _check(not bool((key[1:] == key[:-1]).any()), "an element comes twice")
        edges = torch.searchsorted(key, blocks.first * BLOCK_ELEMENTS).tolist()
        for index, old_sum in enumerate(self._old_sums.tolist()):
            own = order[edges[index] : edges[index + 1]]
            first = blocks.first[index] * BLOCK_ELEMENTS
            yield DecodedRun(
                old_sum % 2**64,
                key[edges[index] : edges[index + 1]] - first,
                found.step[own],
                found.is_given[own],
                found.given[own],
            )


class _Listed(NamedTuple):
    """Elements that a payload lists, in any order."""

    block: torch.Tensor
    within: torch.Tensor
    step: torch.Tensor
    is_given: torch.Tensor
    given: torch.Tensor


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise malformed(what)
