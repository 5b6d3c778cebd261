"""``python -m benchmarks.freezing``: what it costs to freeze what a push sends, on the GPU if there
is one.

A base of 512 MiB in bfloat16 with LoRA of rank 32 on each of its 64 layers. What an async push
copies before it returns is compared with packing the same push; and a look at what a push that
blocks reads, which is made twice, with packing it. All take turns in one run: the ratios count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.machine import describe
from trainer_side.packing.packer import Packer
from trainer_side.params.snapshot import HostMemory
from trainer_side.pushes.content import Content, adapter_content, base_content
from trainer_side.pushes.rank_push import RankPushFactory
from trainer_side.ranks.ranks import OneRank
from weft_rl.contract.backends import GLOO, NCCL
from weft_rl.contract.errors import UnsupportedError
from weft_rl.contract.tensors import DataType, Reference
from weft_rl.rpc.codec import dtype_to_proto
from weft_rl.v1 import publish_pb2 as pb

_LAYERS, _WIDTH, _RANK, _ROUNDS = 64, 2048, 32, 5
_BF16 = dtype_to_proto(DataType.BFLOAT16)


def main() -> None:
    """Print the figures, and what they were measured on."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    base = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
    names = [str(i) for i in range(_LAYERS)]
    model = get_peft_model(base, LoraConfig(r=_RANK, target_modules=names))
    model = model.to(device, torch.bfloat16)
    backend, ranks = NCCL if on_gpu else GLOO, OneRank()  # models are kept open by their ranks
    print(describe())
    for what, content in (
        ("merged", lambda: base_content(model, ranks, True, "default")),
        ("adapter", lambda: adapter_content(model, ranks, True, "default", True)),
    ):
        print(f"{what} on {device.type}: {_figures(content, backend, device)}")


def _figures(content: Callable[[], Content], backend: str, device: torch.device) -> str:
    target = pb.DescribeTargetResponse(base_dtype=_BF16, adapter_dtype=_BF16, backends=[backend])
    push, _ = content().rank_push(target, RankPushFactory(OneRank(), None), _no_reference)
    packer = Packer(push.packing, device=device)
    memory = HostMemory(OneRank())
    copies: list[int] = []

    def pack() -> None:
        for index in range(len(push.packing.manifest.buckets)):
            packer.pack(index, push, 1)

    def copy() -> None:
        lent = memory.lend(1)
        content().kept(lent)
        copies.append(lent.num_bytes)
        memory.give_back(1)

    def look() -> None:
        content().check_unchanged()

    first = _milliseconds(copy, device)
    taken: dict[str, list[float]] = {"pack": [], "copy": [], "look": []}
    for _ in range(_ROUNDS + 1):
        for name, work in (("pack", pack), ("copy", copy), ("look", look)):
            taken[name].append(_milliseconds(work, device))
    packing, copying, looking = (statistics.median(each[1:]) for each in taken.values())
    return (
        f"packing {packing:.1f} ms; the copy of {copies[0] / 1e6:.0f} MB {copying:.1f} ms, "
        f"{copying / packing:.2f} times that ({first:.0f} ms into fresh memory), "
        f"{memory.total_bytes / 1e6:.0f} MB of memory; both looks {looking:.2f} ms, "
        f"{looking / packing:.3f} times that (medians of {_ROUNDS})"
    )


def _milliseconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def _no_reference() -> Reference:
    raise UnsupportedError("a model's push asks for no reference")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
