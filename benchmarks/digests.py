"""``python -m benchmarks.digests``: how fast one thread digests tensors on a CPU, by size and by
algorithm: the weighted sum of torch's words (WSUM64), the same written in numpy, XXH3, SHA-256.

What is read lies in memory; of small tensors there are many, so that no cache holds them all.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import xxhash

from benchmarks.machine import describe
from rollout_side.memory.digest_reading import digest_in_pieces
from weft.transport.digest import _column_weights, _row_weights

_TOTAL_BYTES, _ROUNDS, _ROW = 256 * 2**20, 5, 4096
_SIZES = (16 * 2**10, 256 * 2**10, 4 * 2**20, 256 * 2**20)
_CPU = torch.device("cpu")


def main() -> None:
    """Print the figures, and what they were measured on."""
    torch.set_num_threads(1)
    data = torch.randint(0, 256, (_TOTAL_BYTES,), dtype=torch.uint8)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "WSUM64, torch": digest_in_pieces,
        "WSUM64, numpy": _in_numpy,
        "XXH3_64": lambda tensor: xxhash.xxh3_64_intdigest(tensor.numpy().data),
        "SHA-256": lambda tensor: hashlib.sha256(tensor.numpy().data).digest(),
    }
    assert _in_numpy(data[: _SIZES[1]]) == digest_in_pieces(data[: _SIZES[1]])
    print(describe())
    for size in _SIZES:
        tensors = data.view(-1, size).unbind()
        rates = ", ".join(f"{name} {_rate(way, tensors):.2f}" for name, way in ways.items())
        print(f"{size / 2**10:,.0f} KiB a tensor, GB/s: {rates}")


def _in_numpy(tensor: torch.Tensor) -> int:
    """The same sum, of whole rows of the first 1 GiB."""
    words = tensor.numpy().view(np.uint64).reshape(-1, min(_ROW, tensor.numel() // 8))
    rows = _row_weights(_CPU, 0).numpy().view(np.uint64)[: len(words)]
    columns = _column_weights(_CPU).numpy().view(np.uint64)[: words.shape[1]]
    by_row, by_column = words.sum(1) * rows, words.sum(0) * columns
    return (int(by_row.sum()) + int(by_column.sum())) % 2**64


def _rate(way: Callable[[torch.Tensor], object], tensors: tuple[torch.Tensor, ...]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for tensor in tensors:
            way(tensor)
        seconds.append(time.perf_counter() - began)
    return _TOTAL_BYTES / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    main()
