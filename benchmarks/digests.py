"""``python -m benchmarks.digests``: how fast one thread digests tensors on a CPU, by size and by
algorithm: WSUM64 of one tensor, of buckets of them as pushes digest them, XXH3, SHA-256.

By the thread's own time, whatever runs beside it. With a GPU: buckets in its memory, by the
clock. What is read lies in memory; of small tensors there are many, so that no cache holds them
all.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable

import torch
import xxhash

from benchmarks.machine import describe
from weft_rl.transport.digests.wsum64 import Part, part_digests, tensor_digest

_ROUNDS = 5
_CPU_BYTES, _GPU_BYTES = 256 * 2**20, 2**30
_SIZES = (16 * 2**10, 64 * 2**10, 256 * 2**10, 4 * 2**20, 256 * 2**20)
_GPU_SIZES = (16 * 2**10, 256 * 2**10, 4 * 2**20, 64 * 2**20)
#: Half of the columns of a matrix that is 4096 wide, of two bytes each.
_ROW_BYTES, _STRIDE_BYTES = 4096, 8192
_BUCKET = "WSUM64 of a bucket"


def main() -> None:
    """Print the figures, and what they were measured on."""
    torch.set_num_threads(1)
    data = torch.randint(0, 256, (_CPU_BYTES,), dtype=torch.uint8)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "WSUM64": tensor_digest,
        "XXH3_64": lambda tensor: xxhash.xxh3_64_intdigest(tensor.numpy().data),
        "SHA-256": lambda tensor: hashlib.sha256(tensor.numpy().data).digest(),
    }
    print(describe())
    for size in _SIZES:
        tensors = data.view(-1, size).unbind()
        rates = {name: _rate(_of_each(way, tensors), data) for name, way in ways.items()}
        rates[_BUCKET] = _rate(_of_parts(data, _whole(data, size)), data)
        _print(f"{size / 2**10:,.0f} KiB a tensor", rates)
    _print("columns of matrices", {_BUCKET: _rate(_of_parts(data, _slices(data)), data)})
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        payload = torch.randint(0, 256, (_GPU_BYTES,), dtype=torch.uint8, device="cuda")
        for size in _GPU_SIZES:
            rate = _rate(_of_parts(payload, _whole(payload, size)), payload)
            _print(f"{size / 2**10:,.0f} KiB a tensor", {_BUCKET: rate})
        rate = _rate(_of_parts(payload, _slices(payload)), payload)
        _print("columns of matrices", {_BUCKET: rate})


def _of_each(
    way: Callable[[torch.Tensor], object], tensors: tuple[torch.Tensor, ...]
) -> Callable[[], object]:
    return lambda: [way(tensor) for tensor in tensors]


def _of_parts(payload: torch.Tensor, parts: list[Part]) -> Callable[[], object]:
    return lambda: part_digests(payload, parts)


def _whole(payload: torch.Tensor, size: int) -> list[Part]:
    return [Part(at, size) for at in range(0, payload.numel(), size)]


def _slices(payload: torch.Tensor, size: int = 32 * 2**20) -> list[Part]:
    starts = range(0, payload.numel(), size)
    return [Part(at, size, _ROW_BYTES, _ROW_BYTES, _STRIDE_BYTES) for at in starts]


def _print(what: str, rates: dict[str, float]) -> None:
    print(f"{what}, GB/s: {', '.join(f'{name} {rate:.2f}' for name, rate in rates.items())}")


def _rate(way: Callable[[], object], data: torch.Tensor) -> float:
    clock = time.perf_counter if data.is_cuda else time.thread_time
    seconds = []
    for _ in range(_ROUNDS):
        began = clock()
        way()  # blocks till its digests are on the host
        seconds.append(clock() - began)
    return data.numel() / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    main()
