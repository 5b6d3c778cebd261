"""WSUM64, the digest of a tensor's bytes: the same on every side, wherever they lie.

It finds accidents (bytes lost, torn or reordered), not attacks. It is linear: the digests of a
tensor's parts, each weighed at its place, add up to that of the whole, whoever held which part
and whichever buckets they came in.

Source: protos/weft/v1/types.proto, DIGEST_ALGORITHM_WSUM64. Its weights come from SplitMix64
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
import xxhash

from weft_rl.contract.layout.manifest import ALIGN_BYTES
from weft_rl.transport.digests import kernel
from weft_rl.transport.digests.host_copy import Fetched
from weft_rl.transport.digests.weights import (
    NUM_ROWS,
    NUM_WRITTEN_ROWS,
    WIDTH,
    column_weights,
    first_weights,
    rows_at,
    rows_from,
)

_MASK = 2**64 - 1
# A core's cache keeps so many rows (1 MiB) from the first sum over them to the second.
_HOST_ROWS = 32
# What has fewer words than this, on the host and on an accelerator, is summed together with
# others, over weights that are written out for so many words at once: that reads and writes
# more, but launches fewer kernels. On the host only slices are.
_SMALL_WORDS, _SMALL_WORDS_ON_DEVICE = WIDTH, 2**19
_BATCH_WORDS, _BATCH_WORDS_ON_DEVICE = 2**15, 2**22
# A slice's rows are summed up first where so many of them have the same weights.
_MIN_PERIODS = 8


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


class _Piece(NamedTuple):
    """A part, or a piece of one, in words."""

    part: int
    at: int
    num: int
    first: int
    row: int
    stride: int

    def begin(self, num: int) -> _Piece:
        """Return its first ``num`` words."""
        return self._replace(num=num)

    def rest(self, num: int) -> _Piece:
        """Return what follows its first ``num`` words, which are whole rows of a slice."""
        moved = num // self.row * self.stride if self.row else num
        return self._replace(at=self.at + num, num=self.num - num, first=self.first + moved)


def content_digest(tensor_digests: Sequence[int]) -> bytes:
    """Digest all tensors of a version as one, in its manifest's order; 8 bytes, big-endian.

    Source: protos/weft/v1/types.proto, ContentDigest.
    """
    return xxhash.xxh3_64_digest(joined(tensor_digests))


def joined(digests: Sequence[int]) -> bytes:
    """Join digests as they are digested further: 8 bytes each, little-endian."""
    return b"".join([digest.to_bytes(8, "little") for digest in digests])


def tensor_digest(
    content: torch.Tensor, *, first_byte: int = 0, going_on: Callable[[], bool] = lambda: True
) -> int:
    """Digest one tensor's bytes, wherever it lies: in a file, a bucket, a model.

    Reads them once from memory; blocks until that is done. On an accelerator it runs on the
    calling thread's current stream.

    Args:
        content: uint8, 1-D, contiguous, on any device; the last word is filled up with zeros.
        first_byte: Offset of a part in its tensor; a multiple of 8.
        going_on: Asked now and then on a CPU; once it returns False the result means nothing.
    """
    num, first = content.numel() // 8, first_byte // 8
    words = content[: num * 8].view(torch.int64)
    total = _contiguous(words, first, lambda begin, end: going_on())
    if num * 8 < content.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=content.device)
        last[: content.numel() - num * 8] = content[num * 8 :]
        total = total + _contiguous(last.view(torch.int64), first + num)
    return int(total.item()) & _MASK


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

    return int(_contiguous(content.view(torch.int64), first_byte // 8, before)) & _MASK


def warm() -> None:
    """Compile the digest kernel for this process's GPU before the first push waits for it; returns
    at once. Does nothing where no GPU is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
        threading.Thread(
            target=kernel.works, args=(device,), name="weft-warm-digests", daemon=True
        ).start()


class Digests:
    """Digests of a payload's parts, which a GPU may still work on.

    Args:
        values: Digests that are known already, by part.
        owners: Part that each element of ``found`` adds to.
        found: int64, on a GPU; None where there is none.
    """

    def __init__(
        self, values: list[int], owners: Sequence[int] = (), found: torch.Tensor | None = None
    ) -> None:
        self._values, self._owners = values, owners
        self._found = None if found is None else Fetched(found)

    def wait(self) -> list[int]:
        """Block until the digests are known; return them in the order of the parts. Called once."""
        if self._found is not None:
            for owner, value in zip(self._owners, self._found.wait().tolist(), strict=True):
                self._values[owner] = (self._values[owner] + value) & _MASK
        return self._values


def part_digests(payload: torch.Tensor, parts: Sequence[Part]) -> list[int]:
    """Digest each part of a payload, at its place in its tensor; as ``start_digests``, but blocks
    until the digests are known."""
    return start_digests(payload, parts).wait()


def start_digests(payload: torch.Tensor, parts: Sequence[Part]) -> Digests:
    """Begin to digest each part of a payload, at its place in its tensor.

    Reads the payload once from memory. On an accelerator that happens on the calling thread's
    current stream, with few kernels and one copy to the host, for which nothing waits here; on
    the host it blocks until it is done.

    Args:
        payload: uint8, 1-D, contiguous, on any device.
        parts: Need not cover it.
    """
    words, is_host = payload.view(torch.int64), _is_host(payload.device)
    digests = [0] * len(parts)
    small: dict[int, list[_Piece]] = {}
    owners: list[int] = []
    sums: list[torch.Tensor] = []
    pieces = [_Piece(index, *[n // 8 for n in part]) for index, part in enumerate(parts)]
    contiguous = [piece for piece in pieces if not piece.row]
    if is_host:
        for piece in contiguous:
            own = words[piece.at : piece.at + piece.num]
            digests[piece.part] = int(_contiguous(own, piece.first)) & _MASK
    elif kernel.works(words.device):
        places = tuple([kernel.Words(p.at, p.num, p.first) for p in contiguous])
        owners = [piece.part for piece in contiguous]
        sums = [kernel.sums(words, places)]
    if is_host or sums:
        pieces = [piece for piece in pieces if piece.row]
    for whole in pieces:
        for piece in _long_rows(whole, words.device):
            large, rest = _large(words, piece)
            owners += [piece.part] * len(large)
            sums += large
            for left in rest:
                small.setdefault(_block_words(left), []).append(left)
    for block_words, pieces in small.items():
        for batch in _batches(pieces, words.device):
            owners += [piece.part for piece in batch]
            sums.append(_together(words, batch, block_words))
    return Digests(digests, owners, torch.cat(sums) if sums else None)


# -- what is contiguous, by itself -----------------------------------------------------------


#: Called before words are read, with the first and the one behind the last; whether to go on.
_Before = Callable[[int, int], bool]


def _contiguous(
    words: torch.Tensor, first: int, before: _Before = lambda begin, end: True
) -> torch.Tensor:
    """Return the weighed sum of words that follow one another from any place in their tensor on."""
    num, device = len(words), words.device
    if _is_host(device) and first + num <= NUM_WRITTEN_ROWS * WIDTH:
        before(0, num)
        return torch.dot(words, first_weights(device)[first : first + num])
    total = torch.zeros((), dtype=torch.int64, device=device)
    at = 0
    while at < num:
        row, column = divmod(first + at, WIDTH)
        if column or num - at < WIDTH:
            now = min(num - at, WIDTH - column)
            before(at, at + now)
            weights = column_weights(device)[column : column + now] + rows_from(device, row)[0]
            total += (words[at : at + now] * weights).sum()
        else:
            now = (num - at) // WIDTH * WIDTH
            total += _whole_rows(words[at : at + now], row, _later(before, at))
        at += now
    return total


def _later(before: _Before, at: int) -> _Before:
    return lambda begin, end: before(at + begin, at + end)


# -- what is large: few kernels for each ---------------------------------------------------


def _long_rows(piece: _Piece, device: torch.device) -> Iterator[_Piece]:
    """Yield the rows of a slice that are worth summing by themselves; else the piece as it is."""
    if piece.row < _small_words(device):
        yield piece
        return
    while piece.num:
        yield piece.begin(min(piece.row, piece.num))._replace(row=0, stride=0)
        piece = piece.rest(min(piece.row, piece.num))


def _large(words: torch.Tensor, piece: _Piece) -> tuple[list[torch.Tensor], list[_Piece]]:
    """Sum the large portion of a piece, if there is one; return that sum and the pieces left."""
    small = _small_words(words.device)
    if piece.num < small:
        return [], [piece]
    if piece.row:
        period = WIDTH // gcd(piece.stride, WIDTH)
        periods = piece.num // (period * piece.row)
        if periods < _MIN_PERIODS or _block_words(piece) < _MIN_PERIODS:
            return [], [piece]
        now = piece.begin(periods * period * piece.row)
        return [_slice(words, now, period).view(1)], _rest(piece, now.num)
    head = -piece.first % WIDTH
    num = (piece.num - head) // WIDTH * WIDTH
    if num < small:
        return [], [piece]
    first = piece.at + head
    large = _whole_rows(words[first : first + num], (piece.first + head) // WIDTH)
    return [large.view(1)], [p for p in (piece.begin(head), *_rest(piece, head + num)) if p.num]


def _rest(piece: _Piece, num: int) -> list[_Piece]:
    return [piece.rest(num)] if num < piece.num else []


def _whole_rows(
    words: torch.Tensor, first_row: int, before: _Before = lambda begin, end: True
) -> torch.Tensor:
    """Return the weighed sum of whole rows, by two plain sums over the rows and the columns of a
    matrix. Nothing of their size is made, and int64 arithmetic wraps around as it should."""
    matrix, device = words.view(-1, WIDTH), words.device
    step = _HOST_ROWS if _is_host(device) else NUM_ROWS
    by_row = torch.empty(len(matrix), dtype=torch.int64, device=device)
    by_column = torch.zeros(WIDTH, dtype=torch.int64, device=device)
    columns = torch.empty_like(by_column)
    for first in range(0, len(matrix), step):
        rows = matrix[first : first + step]
        if not before(first * WIDTH, (first + len(rows)) * WIDTH):
            break
        by_column += torch.sum(rows, 0, out=columns)  # the faster of the two to read from memory
        torch.sum(rows, 1, out=by_row[first : first + step])
    total = _weighed(by_column, column_weights(device))
    while len(by_row):
        weights = rows_from(device, first_row)[: len(by_row)]
        total += _weighed(by_row[: len(weights)], weights)
        by_row, first_row = by_row[len(weights) :], first_row + len(weights)
    return total


def _weighed(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


def _slice(words: torch.Tensor, piece: _Piece, period: int) -> torch.Tensor:
    """Return the weighed sum of a slice of a multiple of ``period`` rows, after which columns'
    weights repeat. It is computed like that of whole rows, but the rows of the digest change within
    those of the slice."""
    device, length, stride = words.device, piece.row, piece.stride
    own = words[piece.at : piece.at + piece.num]
    by_column = own.view(-1, period * length).sum(0).view(period, length)
    begins = torch.arange(period, device=device).unsqueeze(1) * stride + piece.first
    columns = (begins + torch.arange(length, device=device)) % WIDTH
    total = (by_column * column_weights(device)[columns]).sum()
    size = gcd(piece.first, length, stride, WIDTH)
    by_block = own.view(-1, length // size, size).sum(2)
    begins = torch.arange(len(by_block), device=device).unsqueeze(1) * stride + piece.first
    rows = (begins + torch.arange(0, length, size, device=device)) // WIDTH
    last = (piece.first + len(by_block) * stride + length) // WIDTH
    return total + (by_block * rows_at(rows, last)).sum()


# -- what is small: many together ------------------------------------------------------------


def _block_words(piece: _Piece) -> int:
    """Return the words of each block that a piece consists of; a block lies within one row of the
    digest and one row of the piece."""
    return gcd(piece.at, piece.num, piece.first, piece.row, piece.stride, ALIGN_BYTES // 8)


def _batches(pieces: Sequence[_Piece], device: torch.device) -> Iterator[list[_Piece]]:
    """Yield pieces together, up to the words of a batch; longer ones, which are slices, are cut."""
    bound = _BATCH_WORDS if _is_host(device) else _BATCH_WORDS_ON_DEVICE
    batch: list[_Piece] = []
    room = bound
    for piece in pieces:
        while piece.num:
            fits = room // piece.row * piece.row if piece.row else room
            if piece.num > fits and len(batch):
                yield batch
                batch, room = [], bound
                continue
            now = piece.begin(min(piece.num, fits))
            batch.append(now)
            piece, room = piece.rest(now.num), room - now.num
    if batch:
        yield batch


def _together(words: torch.Tensor, pieces: Sequence[_Piece], size: int) -> torch.Tensor:
    """Return the weighed sums of several pieces, which consist of blocks of ``size`` words."""
    device = words.device
    table = torch.tensor([piece[1:] for piece in pieces]).T.contiguous().to(device) // size
    at, num, first, length, stride = table
    total = sum(piece.num for piece in pieces) // size
    ends = num.cumsum(0)
    owner = torch.repeat_interleave(num, output_size=total)
    local = torch.arange(total, device=device) - (ends - num)[owner]
    place = first[owner] + local
    if any(piece.row for piece in pieces):
        row = local // length.clamp(min=1)[owner] * (length > 0)[owner]
        place += row * (stride - length)[owner]
    blocks = words.view(-1, size)
    is_one = all(a.at + a.num == b.at for a, b in pairwise(pieces))
    begin = pieces[0].at // size
    blocks = blocks[begin : begin + total] if is_one else blocks[at[owner] + local]
    last = max(
        piece.first + (piece.num // piece.row + 1) * piece.stride + piece.row
        if piece.row
        else piece.first + piece.num
        for piece in pieces
    )
    per_row = WIDTH // size
    weights = column_weights(device).view(-1, size)[place % per_row]
    weights += rows_at(place // per_row, last // WIDTH).unsqueeze(1)
    weights *= blocks
    up_to = weights.sum(1).cumsum(0)[ends - 1]
    return torch.diff(up_to, prepend=up_to.new_zeros(1))


def _small_words(device: torch.device) -> int:
    return _SMALL_WORDS if _is_host(device) else _SMALL_WORDS_ON_DEVICE


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"
