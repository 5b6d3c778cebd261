"""``python -m benchmarks.finite``: what looking for NaN and infinities adds to an adapter of
175 MB, on the GPU if there is one.

The adapter is in bfloat16, of 448 tensors as of rank 32 on an 8B model. Two figures: the
look alone, and a bucket's packing with and without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.machine import describe
from trainer_side.packing.packer import Packer, check_finite
from trainer_side.pushes.rank_push import RankPushFactory
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.source import CastRule, tensor_source
from weft_rl.contract.backends import GLOO, NCCL
from weft_rl.contract.manifest import Manifest

_NUM_TENSORS, _TOTAL_BYTES, _ROUNDS = 448, 175_000_000, 11


def main() -> None:
    """Print the figures, and what they were measured on."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    elements = _TOTAL_BYTES // 2 // _NUM_TENSORS
    tensors = {
        f"layers.{i // 14}.t{i % 14}.lora_A.weight": torch.randn(elements, device=device).to(
            torch.bfloat16
        )
        for i in range(_NUM_TENSORS)
    }
    source = tensor_source(tensors, CastRule(enabled=False), "benchmark")
    push = RankPushFactory(OneRank(), None).weights_push(source, NCCL if on_gpu else GLOO)
    packer, manifest = Packer(push.packing, device=device), push.packing.manifest

    def pack(finite: bool) -> None:
        for index in range(len(manifest.buckets)):
            packer.pack(index, push, 1, finite=finite)

    pack(False)
    alone = _milliseconds(lambda: _look(packer, manifest), device)
    without, beside = (_milliseconds(lambda f=f: pack(f), device) for f in (False, True))
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(describe())
    print(
        f"{manifest.total_bytes / 1e6:.0f} MB bfloat16 in {len(manifest.buckets)} buckets on "
        f"{where}: the look alone {alone:.2f} ms, packing {without:.2f} ms, with the look "
        f"{beside:.2f} ms (medians of {_ROUNDS})"
    )


def _look(packer: Packer, manifest: Manifest) -> None:
    """All buckets; those whose buffer was used again read what lies there now."""
    for index, bucket in enumerate(manifest.buckets):
        slots = [slot for slot in manifest.tensors if slot.bucket == index]
        check_finite(packer.wire(index)[: bucket.payload_bytes], slots)


def _milliseconds(work: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
