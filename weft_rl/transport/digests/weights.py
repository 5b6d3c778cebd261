"""Weights of WSUM64: a word's weight is the sum of its row's and its column's.

Source: protos/weft/v1/types.proto, DIGEST_ALGORITHM_WSUM64.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Final

import torch

HOST: Final = torch.device("cpu")
#: Words of a row.
WIDTH: Final = 4096
#: Weights are made for this many rows at a time: enough for a tensor of 1 GiB.
NUM_ROWS: Final = 32768
#: Weights of so many are written out, once for the beginnings of all tensors: one product with
#: them is less than the calls that two sums take.
NUM_WRITTEN_ROWS: Final = 16


def rows_from(row: int) -> torch.Tensor:
    """Return the weights of ``row`` and of the rows that follow it in its block of weights, on the
    host; a view."""
    return _row_weights(row - row % NUM_ROWS)[row % NUM_ROWS :]


def rows_at(rows: torch.Tensor, last: int) -> torch.Tensor:
    """Return the weights of any rows up to ``last``, on the host."""
    if last < NUM_ROWS:
        return _row_weights(0)[rows]
    return _split_mix(rows) << 1


def weights_of(words: torch.Tensor) -> torch.Tensor:
    """Return the weights of any words, int64, on their device."""
    rows = torch.div(words, WIDTH, rounding_mode="floor")
    if words.device == HOST and len(words):
        of_rows = rows_at(rows, int(rows.max()))
    else:
        of_rows = _split_mix(rows) << 1
    return of_rows + column_weights(words.device)[words % WIDTH]


@cache
def first_weights() -> torch.Tensor:
    """Return the weight of each word of the first ``NUM_WRITTEN_ROWS`` rows, on the host."""
    rows = rows_from(0)[:NUM_WRITTEN_ROWS].unsqueeze(1)
    return (rows + column_weights(HOST)).view(-1)


@lru_cache(maxsize=256)
def _row_weights(first: int) -> torch.Tensor:
    """Compute the even weights of rows ``first`` to ``first + NUM_ROWS``; 256 KiB each."""
    # Whatever torch's default device is where it is first asked for.
    return _split_mix(torch.arange(first, first + NUM_ROWS, device=HOST)) << 1


@lru_cache(maxsize=64)
def column_weights(device: torch.device) -> torch.Tensor:
    """Compute the odd weights of the columns, on a device."""
    return ((_split_mix(torch.arange(2**32, 2**32 + WIDTH)) << 1) + 1).to(device)


def _split_mix(n: torch.Tensor) -> torch.Tensor:
    """Compute the outputs of SplitMix64 seeded with 0 that have these numbers, as int64."""
    z = (n + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically to the right: torch's own shift keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
