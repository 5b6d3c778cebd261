"""WSUM64 of many parts on a GPU at once: one kernel, which reads them once.

Written in Triton, which comes with torch's builds for CUDA. Without it, or without the C compiler
that it asks for, ``wsum64`` sums with torch's own kernels: dozens of launches for each bucket.
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
_WARPS: Final = 4


class Words(NamedTuple):
    """Contiguous words of a tensor in a payload, and those of them that are copied elsewhere."""

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


def works(device: torch.device) -> bool:
    """Return whether a device can run the kernel; blocks for seconds the first time, while it is
    compiled."""
    return triton is not None and _is_right(device)


def sums(
    words: torch.Tensor, parts: tuple[Words, ...], target: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the digest of each part, int64, on the GPU; each word is read once for it.

    Does not block: it runs on the calling thread's current stream.

    Args:
        words: int64, 1-D, contiguous, on a GPU where the kernel ``works``.
        parts: Parts of ``words``.
        target: int64, on that GPU: receives the words of the parts that are copied.
    """
    table = _table(words.device, parts)
    out = torch.zeros(len(parts), dtype=torch.int64, device=words.device)
    if not len(table):
        return out
    with torch.cuda.device(words.device):
        _sum_rows[(len(table),)](
            words, table, column_weights(words.device), out, words if target is None else target,
            copies=target is not None, num_rows=_ROWS, num_columns=_COLUMNS, width=WIDTH,
            num_warps=_WARPS,
        )  # fmt: skip
    return out


@lru_cache(maxsize=256)
def _table(device: torch.device, parts: tuple[Words, ...]) -> torch.Tensor:
    """Build the kernel's arguments: a row of eight words for each program.

    A part's place in the payload less its place in its tensor; the words of the tensor that the
    program sums (first, end); where the tensor is copied to, and of which words (first, end); the
    first row of the digest; and which part. 64 bytes for each 512 KiB.
    """
    rows = []
    for index, (at, num, first, place, begin, end) in enumerate(parts):
        for row in range(first // WIDTH, -(-(first + num) // WIDTH), _ROWS):
            rows.append((at - first, first, first + num, place, begin, end, row, index))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 8).to(device)


@lru_cache(maxsize=16)
def _is_right(device: torch.device) -> bool:
    """Return whether the kernel compiles and gives the right sums, with copying and without. A
    first push that had to compile one of the two would wait for that."""
    # Two allocations: what is compiled depends on how pointers are aligned, too.
    words, copy = (make(1, dtype=torch.int64, device=device) for make in (torch.ones, torch.zeros))
    try:
        values = [
            int(sums(words, (Words(0, 1, 0),)).item()),
            int(sums(words, (Words(0, 1, 0, end=1),), copy).item()),
        ]
        is_copied = int(copy.item()) == 1
    except Exception as error:  # noqa: BLE001 (a compiler's, a driver's)
        _log.warning("digests on %s are made without a kernel of their own: %s", device, error)
        return False
    return is_copied and values == [int(first_weights(device)[0])] * 2


def _make_kernel() -> Any:
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

    return sum_rows


_sum_rows: Any = None if triton is None else _make_kernel()
