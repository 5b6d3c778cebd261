"""WSUM64, the digest of a tensor's bytes: the same on every side, in any memory.

It finds accidents (bytes lost, torn or reordered), not attacks. It is linear: the digests of a
tensor's parts, each weighed at its place, add up to that of the whole, whoever held which part
and whichever buckets they came in.

On a GPU the kernels of ``kernel`` sum. Where they cannot run, bytes are copied to the host, and
digested there.

Source: protos/weft/v1/types.proto, DIGEST_ALGORITHM_WSUM64. Its weights come from SplitMix64
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch
import xxhash

from weft_rl.contract.manifest import ALIGN_BYTES
from weft_rl.transport.digests import kernel
from weft_rl.transport.digests.host_copy import HostCopy
from weft_rl.transport.digests.weights import (
    HOST,
    NUM_WRITTEN_ROWS,
    WIDTH,
    column_weights,
    first_weights,
    rows_at,
    rows_from,
)

_MASK = 2**64 - 1
#: A core's cache keeps so many rows (1 MiB) from the first sum over them to the second.
_CACHED_ROWS = 32
#: Words of a slice whose weights are written out at a time.
_BATCH_WORDS = 2**15
#: Rows of a slice are summed up first where at least so many have the same columns' weights.
_MIN_REPEATS = 8


class Part(NamedTuple):
    """Bytes of a payload, with the place in their tensor at which they are weighed."""

    at: int
    """First byte in the payload; a multiple of ``ALIGN_BYTES``."""
    num_bytes: int
    """Number of bytes, with the zeros that fill up the last block; a multiple of
    ``ALIGN_BYTES``."""
    first_byte: int = 0
    """First byte in the tensor; a multiple of ``ALIGN_BYTES``, of a slice a multiple of 8."""
    row_bytes: int = 0
    """Bytes of each row of a slice, whose rows lie one behind the other; 0 for contiguous bytes."""
    stride_bytes: int = 0
    """Bytes in the tensor from the beginning of one row of a slice to that of the next."""


def content_digest(tensor_digests: Sequence[int]) -> bytes:
    """Digest all tensors of a version as one, in its manifest's order; 8 bytes, big-endian.

    Source: protos/weft/v1/types.proto, ContentDigest.
    """
    return xxhash.xxh3_64_digest(joined(tensor_digests))


def joined(digests: Sequence[int]) -> bytes:
    """Join digests as they are digested further: 8 bytes each, little-endian."""
    return b"".join([digest.to_bytes(8, "little") for digest in digests])


def has_kernels(device: torch.device) -> bool:
    """Return whether a device is a GPU that sums by kernels; see ``kernel.works``."""
    return device.type != "cpu" and kernel.works(device)


def tensor_digest(
    content: torch.Tensor, *, first_byte: int = 0, going_on: Callable[[], bool] = lambda: True
) -> int:
    """Digest one tensor's bytes, in any memory: of a file, a bucket, a model.

    Reads them once from memory; blocks until that is done. On a GPU it runs on the calling thread's
    current stream.

    Args:
        content: uint8, 1-D, contiguous, on any device; the last word is filled up with zeros.
        first_byte: Offset of a part in its tensor; a multiple of 8.
        going_on: Called now and then on a CPU; once it returns False the result means nothing.
    """
    if not has_kernels(content.device):
        content = content.cpu()
    num, first = content.numel() // 8, first_byte // 8
    words = content[: num * 8].view(torch.int64)
    total = _sum(words, first, lambda begin, end: going_on())
    if num * 8 < content.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=content.device)
        last[: content.numel() - num * 8] = content[num * 8 :]
        total = total + _sum(last.view(torch.int64), first + num)
    return int(total.item()) & _MASK


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Digest each of several tensors, as ``tensor_digest`` of its bytes. On a GPU this is one
    launch, which reads each word once. Blocks until all digests are known.

    Args:
        tensors: Contiguous, all on one device; of any dtype and shape.
    """
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    found: dict[int, int] = {}
    even = [i for i, t in enumerate(flat) if not (t.data_ptr() | t.numel()) % 8]
    if even and has_kernels(flat[0].device):
        # From the first one's first word on: a GPU's memory has one address space.
        words = flat[even[0]].view(torch.int64)
        base = words.data_ptr()
        places = [
            kernel.CopiedWords((flat[i].data_ptr() - base) // 8, flat[i].numel() // 8, 0)
            for i in even
        ]
        sums = kernel.sums(words, tuple(places)).tolist()
        found = {i: value & _MASK for i, value in zip(even, sums, strict=True)}
    for i, own in enumerate(flat):
        if i not in found:
            found[i] = tensor_digest(own.clone() if own.data_ptr() % 8 else own)
    return [found[i] for i in range(len(flat))]


def filled_digest(content: torch.Tensor, first_byte: int, fill: Callable[[int, int], None]) -> int:
    """Digest host memory that is filled meanwhile, as ``tensor_digest``: what has just been written
    is read while it is in the core's cache.

    Args:
        content: Whole words.
        fill: Called before bytes of it are read, with the first and the one behind the last;
            ascending, without gaps.
    """

    def before(begin: int, end: int) -> bool:
        fill(8 * begin, 8 * end)
        return True

    return int(_sum(content.view(torch.int64), first_byte // 8, before)) & _MASK


def warm() -> None:
    """Compile the kernels for this process's GPU before the first push waits for them; returns at
    once. Does nothing where no GPU is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
        threading.Thread(
            target=kernel.works, args=(device,), name="weft-warm-digests", daemon=True
        ).start()


class Digests:
    """Digests of a payload's parts, which a GPU may still compute.

    Args:
        values: Digests in the order of the parts: known ones, or an int64 tensor on a GPU.
    """

    def __init__(self, values: list[int] | torch.Tensor) -> None:
        self._values = HostCopy(values) if isinstance(values, torch.Tensor) else values

    def wait(self) -> list[int]:
        """Block until the digests are known; return them in the order of the parts."""
        if isinstance(self._values, HostCopy):
            self._values = [value & _MASK for value in self._values.wait().tolist()]
        return self._values


def part_digests(payload: torch.Tensor, parts: Sequence[Part]) -> list[int]:
    """Digest each part of a payload, at its place in its tensor; as ``start_digests``, but blocks
    until the digests are known."""
    return start_digests(payload, parts).wait()


def start_digests(payload: torch.Tensor, parts: Sequence[Part]) -> Digests:
    """Begin to digest each part of a payload, at its place in its tensor.

    Reads the payload once from memory. On a GPU with the kernels that happens on the calling
    thread's current stream, in one launch or two, and with one copy to the host, for which nothing
    waits here. Else it blocks until it is done.

    Args:
        payload: uint8, 1-D, contiguous, on any device.
        parts: Need not cover it.
    """
    if has_kernels(payload.device):
        words = tuple([_words(*[n // 8 for n in part]) for part in parts])
        return Digests(kernel.sums(payload.view(torch.int64), words))
    return Digests(_host_digests(payload.cpu().view(torch.int64), parts))


def _words(at: int, num: int, first: int, row: int, stride: int) -> kernel.CopiedWords:
    return kernel.CopiedWords(at, num, first, row=row, stride=stride)


# -- parts on the host -------------------------------------------------------------------------


def _host_digests(words: torch.Tensor, parts: Sequence[Part]) -> list[int]:
    digests = [0] * len(parts)
    slices: dict[int, list[_RowSlice]] = {}
    for index, part in enumerate(parts):
        at, num, first, row, stride = [n // 8 for n in part]
        own = words[at : at + num]
        if not row:
            digests[index] = int(_sum(own, first))
        elif row >= WIDTH:
            digests[index] = sum(
                int(_sum(own[begin : begin + row], first + nth * stride))
                for nth, begin in enumerate(range(0, num, row))
            )
        else:
            whole = _RowSlice(index, at, num, first, row, stride)
            total, rest = _repeated(own, whole)
            digests[index] = total
            slices.setdefault(whole.block, []).extend(rest)
    for block, of_block in slices.items():
        for batch in _batches(of_block):
            sums = _together(words, batch, block).tolist()
            for piece, value in zip(batch, sums, strict=True):
                digests[piece.part] += value
    return [digest & _MASK for digest in digests]


#: Function called before words are read, with the first and the one behind the last; returns
#: whether to go on.
_Before = Callable[[int, int], bool]


def _sum(
    words: torch.Tensor, first: int, before: _Before = lambda begin, end: True
) -> torch.Tensor:
    """Return the weighed sum of words that follow one another from any place in their tensor on."""
    if not words.is_cpu:
        return kernel.sums(words, (kernel.CopiedWords(0, len(words), first),))
    num = len(words)
    if first + num <= NUM_WRITTEN_ROWS * WIDTH:
        before(0, num)
        return torch.dot(words, first_weights()[first : first + num])
    total = torch.zeros((), dtype=torch.int64)
    at = 0
    while at < num:
        row, column = divmod(first + at, WIDTH)
        if column or num - at < WIDTH:
            now = min(num - at, WIDTH - column)
            before(at, at + now)
            weights = column_weights(HOST)[column : column + now] + rows_from(row)[0]
            total += torch.dot(words[at : at + now], weights)
        else:
            now = (num - at) // WIDTH * WIDTH
            total += _whole_rows(words[at : at + now], row, _later(before, at))
        at += now
    return total


def _later(before: _Before, at: int) -> _Before:
    return lambda begin, end: before(at + begin, at + end)


def _whole_rows(words: torch.Tensor, first_row: int, before: _Before) -> torch.Tensor:
    """Return the weighed sum of whole rows, by two plain sums over the rows and the columns of a
    matrix. Nothing of their size is made, and int64 arithmetic wraps around as it should."""
    matrix = words.view(-1, WIDTH)
    by_row = torch.empty(len(matrix), dtype=torch.int64)
    by_column = torch.zeros(WIDTH, dtype=torch.int64)
    columns = torch.empty_like(by_column)
    for first in range(0, len(matrix), _CACHED_ROWS):
        rows = matrix[first : first + _CACHED_ROWS]
        if not before(first * WIDTH, (first + len(rows)) * WIDTH):
            break
        by_column += torch.sum(rows, 0, out=columns)  # the faster of the two to read from memory
        torch.sum(rows, 1, out=by_row[first : first + _CACHED_ROWS])
    total = torch.dot(by_column, column_weights(HOST))
    while len(by_row):
        weights = rows_from(first_row)[: len(by_row)]
        total += torch.dot(by_row[: len(weights)], weights)
        by_row, first_row = by_row[len(weights) :], first_row + len(weights)
    return total


# -- slices on the host ------------------------------------------------------------------------


class _RowSlice(NamedTuple):
    """Slice of a part, in words: rows that lie one behind the other, and apart in their tensor."""

    part: int
    at: int
    num: int
    first: int
    row: int
    stride: int

    @property
    def block(self) -> int:
        """Words of the blocks that it consists of, each within a row of the digest and its own."""
        return gcd(*self[1:], ALIGN_BYTES // 8)

    def cut(self, num: int) -> tuple[_RowSlice, _RowSlice]:
        """Return its first ``num`` words, which are whole rows, and the rest."""
        moved = num // self.row * self.stride
        rest = self._replace(at=self.at + num, num=self.num - num, first=self.first + moved)
        return self._replace(num=num), rest


def _repeated(words: torch.Tensor, whole: _RowSlice) -> tuple[int, list[_RowSlice]]:
    """Return the weighed sum of the portion of a slice in which columns' weights repeat, and what
    is left. It is computed like that of whole rows, but the rows of the digest change within those
    of the slice."""
    _, _, num, first, row, stride = whole
    period = WIDTH // gcd(stride, WIDTH)
    repeats = num // (period * row)
    if repeats < _MIN_REPEATS or whole.block < _MIN_REPEATS:
        return 0, [whole]
    own, rest = whole.cut(repeats * period * row)
    by_column = words[: own.num].view(-1, period * row).sum(0).view(period, row)
    begins = torch.arange(period).unsqueeze(1) * stride + first
    columns = (begins + torch.arange(row)) % WIDTH
    total = (by_column * column_weights(HOST)[columns]).sum()
    block = gcd(first, row, stride, WIDTH)
    by_block = words[: own.num].view(-1, row // block, block).sum(2)
    begins = torch.arange(len(by_block)).unsqueeze(1) * stride + first
    rows = (begins + torch.arange(0, row, block)) // WIDTH
    total += (by_block * rows_at(rows, int(rows[-1, -1]))).sum()
    return int(total), [rest] if rest.num else []


def _batches(slices: Sequence[_RowSlice]) -> Iterator[list[_RowSlice]]:
    """Yield slices together, up to the words of a batch; longer ones are cut."""
    batch: list[_RowSlice] = []
    room = _BATCH_WORDS
    for piece in slices:
        while piece.num:
            fits = room // piece.row * piece.row
            if piece.num > fits and batch:
                yield batch
                batch, room = [], _BATCH_WORDS
                continue
            now, piece = piece.cut(min(piece.num, max(fits, piece.row)))
            batch.append(now)
            room -= now.num
    if batch:
        yield batch


def _together(words: torch.Tensor, slices: Sequence[_RowSlice], block: int) -> torch.Tensor:
    """Return the weighed sums of several slices, which consist of blocks of ``block`` words."""
    at, num, first, row, stride = torch.tensor([piece[1:] for piece in slices]).T // block
    ends = num.cumsum(0)
    owner = torch.repeat_interleave(num)
    nth = torch.arange(len(owner)) - (ends - num)[owner]
    place = first[owner] + nth // row[owner] * stride[owner] + nth % row[owner]
    per_row = WIDTH // block
    weights = column_weights(HOST).view(-1, block)[place % per_row]
    rows = place // per_row
    weights += rows_at(rows, int(rows.max())).unsqueeze(1)
    weights *= words.view(-1, block)[at[owner] + nth]
    up_to = weights.sum(1).cumsum(0)[ends - 1]
    return torch.diff(up_to, prepend=up_to.new_zeros(1))
