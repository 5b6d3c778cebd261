"""Kernels of WSUM64 on a GPU: many parts in one launch, each word read once.

Written in Triton, which comes with torch's builds for CUDA and needs a C compiler. Where they do
not work, ``wsum64`` copies to the host what it digests, and a warning says so.
"""

from __future__ import annotations

# Triton's functions take what their source says, not what annotations do.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, name-defined"
import logging
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from weft_rl.transport.digests.weights import WIDTH, column_weights, first_weights

_log = logging.getLogger(__name__)


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


triton, tl = _imported("triton"), _imported("triton.language")

#: Rows of the digest that one program sums, and columns of them that it reads at a time.
_ROWS: Final = 16
_COLUMNS: Final = 256
#: Words of a slice that one program sums, and those that it reads at a time.
_SLICE_WORDS: Final = 2**14
_SLICE_STEP: Final = 2**10
_WARPS: Final = 4


class CopiedWords(NamedTuple):
    """Words of a tensor in a payload, and those of them that are copied elsewhere; of contiguous
    ones only."""

    at: int
    """First word in the payload."""
    num: int
    first: int
    """First word in the tensor."""
    place: int = 0
    """Place in the target where the tensor begins."""
    begin: int = 0
    """First word of the tensor that is copied there."""
    end: int = 0
    """Word behind the last that is copied there."""
    row: int = 0
    """Words of each row of a slice, whose rows lie one behind the other in the payload; 0 for
    contiguous words."""
    stride: int = 0
    """Words in the tensor from the beginning of one row of a slice to that of the next."""


@lru_cache(maxsize=16)
def works(device: torch.device) -> bool:
    """Return whether a device runs the kernels; a warning says why not. Blocks for seconds the
    first time, while they are compiled."""
    why_not = _why_not(device)
    if why_not:
        _log.warning(
            "tensors on %s are copied to the host to be digested, which makes pushes slow: %s",
            device, why_not,
        )  # fmt: skip
    return not why_not


def sums(
    words: torch.Tensor, parts: tuple[CopiedWords, ...], target: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the digest of each part, int64, on the GPU; each word is read once for it.

    Does not block: it runs on the calling thread's current stream.

    Args:
        words: int64, 1-D, contiguous, on a GPU where the kernels ``works``.
        parts: Parts of ``words``.
        target: int64, on that GPU: receives the words of the parts that are copied.
    """
    device = words.device
    rows, slices = _tables(device, parts)
    columns = column_weights(device)
    out = torch.zeros(len(parts), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        if len(rows):
            _sum_rows[(len(rows),)](
                words, rows, columns, out, words if target is None else target,
                copies=target is not None, num_rows=_ROWS, num_columns=_COLUMNS, width=WIDTH,
                num_warps=_WARPS,
            )  # fmt: skip
        if len(slices):
            _sum_slices[(len(slices),)](
                words, slices, columns, out, num_words=_SLICE_WORDS, step=_SLICE_STEP,
                width=WIDTH, num_warps=_WARPS,
            )  # fmt: skip
    return out


@lru_cache(maxsize=256)
def _tables(
    device: torch.device, parts: tuple[CopiedWords, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build the kernels' arguments: a row of eight words for each program; 64 bytes for each 512 or
    128 KiB.

    Of contiguous parts: a part's place in the payload less its place in its tensor; the words of
    the tensor that the program sums (first, end); where the tensor is copied to, and of which words
    (first, end); the first row of the digest; and which part. Of slices: the part's place in the
    payload; its first word in its tensor; its row and stride; the words of the part that the
    program sums (first, end); and which part.
    """
    rows, slices = [], []
    for index, (at, num, first, place, begin, end, row, stride) in enumerate(parts):
        if row:
            for nth in range(0, num, _SLICE_WORDS):
                last = min(num, nth + _SLICE_WORDS)
                slices.append((at, first, row, stride, nth, last, index, 0))
            continue
        for nth in range(first // WIDTH, -(-(first + num) // WIDTH), _ROWS):
            rows.append((at - first, first, first + num, place, begin, end, nth, index))
    by_rows, by_slices = (
        torch.tensor(table, dtype=torch.int64).view(-1, 8).to(device) for table in (rows, slices)
    )
    return by_rows, by_slices


def _why_not(device: torch.device) -> str:
    """Return why a device cannot run the kernels; empty if they compile and give the right sums,
    with copying and without. A first push that had to compile one of them would wait for that."""
    if triton is None:
        return "Triton cannot be imported; install torch's build for this GPU, which brings it"
    # Two allocations: what is compiled depends on how pointers are aligned, too.
    words, copy = (make(1, dtype=torch.int64, device=device) for make in (torch.ones, torch.zeros))
    try:
        values = [
            int(sums(words, (CopiedWords(0, 1, 0),)).item()),
            int(sums(words, (CopiedWords(0, 1, 0, end=1),), copy).item()),
            int(sums(words, (CopiedWords(0, 1, 0, row=1, stride=2),)).item()),
        ]
        is_copied = int(copy.item()) == 1
    except Exception as error:  # noqa: BLE001 (a compiler's, a driver's)
        return f"Triton compiles no kernel; install a C compiler (gcc): {error}"
    if is_copied and values == [int(first_weights()[0])] * 3:
        return ""
    return "Triton's kernels give wrong digests; install the release of Triton that torch names"


def _make_kernels() -> tuple[Any, Any]:
    @triton.jit
    def sum_rows(words, table, columns, out, target, copies: tl.constexpr, num_rows: tl.constexpr,
                 num_columns: tl.constexpr, width: tl.constexpr):  # fmt: skip
        own = table + tl.program_id(0) * 8
        moved, begin, end = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        place, copied_begin, copied_end = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
        rows = tl.load(own + 6) + tl.arange(0, num_rows)
        z = (rows.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        by_row = ((z ^ (z >> 31)) << 1).to(tl.int64)
        total = tl.zeros((num_rows, num_columns), dtype=tl.int64)
        for first in range(0, width, num_columns):
            column = first + tl.arange(0, num_columns)
            index = rows[:, None] * width + column[None, :]
            is_own = (index >= begin) & (index < end)
            read = tl.load(words + moved + index, mask=is_own, other=0)
            total += read * (by_row[:, None] + tl.load(columns + column)[None, :])
            if copies:
                is_copied = is_own & (index >= copied_begin) & (index < copied_end)
                tl.store(target + place + index, read, mask=is_copied)
        tl.atomic_add(out + tl.load(own + 7), tl.sum(tl.sum(total, 1), 0), sem="relaxed")

    @triton.jit
    def sum_slices(words, table, columns, out, num_words: tl.constexpr, step: tl.constexpr,
                   width: tl.constexpr):  # fmt: skip
        own = table + tl.program_id(0) * 8
        at, first, row, stride = (tl.load(own), tl.load(own + 1), tl.load(own + 2),
                                  tl.load(own + 3))  # fmt: skip
        begin, end = tl.load(own + 4), tl.load(own + 5)
        total = tl.zeros((step,), dtype=tl.int64)
        for done in range(0, num_words, step):
            nth = begin + done + tl.arange(0, step)
            is_own = nth < end
            place = first + nth // row * stride + nth % row
            z = ((place // width).to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB
            weight = ((z ^ (z >> 31)) << 1).to(tl.int64) + tl.load(columns + place % width)
            total += tl.load(words + at + nth, mask=is_own, other=0) * weight
        tl.atomic_add(out + tl.load(own + 6), tl.sum(total, 0), sem="relaxed")

    return sum_rows, sum_slices


_sum_rows: Any
_sum_slices: Any
_sum_rows, _sum_slices = (None, None) if triton is None else _make_kernels()
