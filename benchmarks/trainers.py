"""What it costs a trainer of two ranks to bring its weights to its sender.

``python -m benchmarks.trainers``: for each kind of trainer, Weft's bounded gather beside
the naive way (each parameter gathered by its framework, then copied; for merged LoRA:
merge, gather, unmerge), in one run, on the same weights. Both end with every bucket
packed and digested at the sender; nothing is sent to replicas. Memory is the largest
growth of any rank's resident memory by the first of them, its two buckets included.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.machine import describe
from tests.trainers.kinds import wrap
from trainer_side.packing.packer import Packer, whole_packing
from trainer_side.params.params import WholeParams
from trainer_side.pushes.content import ModelBase
from trainer_side.pushes.rank_push import RankPushFactory
from trainer_side.ranks.ranks import SENDER, OneRank
from trainer_side.ranks.torch_ranks import ranks_of
from trainer_side.sources.source import CastRule, ParamsSource
from weft_rl.contract.backends import GLOO
from weft_rl.contract.manifest import Manifest, plan_buckets
from weft_rl.contract.tensors import DataType
from weft_rl.rpc.codec import dtype_to_proto
from weft_rl.v1 import publish_pb2 as pb

ROUNDS = 5
BUCKET_BYTES = 16 * 2**20
KINDS = ("ddp", "fsdp1", "fsdp2", "zero3")


class Block(nn.Module):
    """A residual stack of square linears."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (n, width)."""
        for linear in self.linears:
            hidden = hidden + linear(hidden)
        return hidden


class Stack(nn.Module):
    """Blocks, sharded one by one."""

    def __init__(self, width: int, depth: int, num_blocks: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width, depth) for _ in range(num_blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (n, width)."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


#: Name to width, linears a block, blocks.
SHAPES = {"many small": (64, 16, 50), "few large": (2048, 2, 4)}


def _loss_of(width: int) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        out: torch.Tensor = model(torch.randn(2, width))
        return out.pow(2).mean()

    return loss


# -- the two ways ------------------------------------------------------------------


def _weft(source: Any, manifest: Manifest, packer: Packer | None, ranks: Any) -> None:
    ranks.open(time.monotonic() + 60)
    push = RankPushFactory(ranks, BUCKET_BYTES, max_senders=1).weights_push(source, GLOO)
    if packer is None:
        push.assist(is_under_way=True)
        return
    for index in range(len(manifest.buckets)):
        packer.pack(index, push, nonce=1)


def _naive(trainer: Any, adapter: bool, manifest: Manifest, packer: Packer | None) -> None:
    """Each parameter whole on every rank in turn, kept at the sender, then packed."""
    module = trainer.model.module if trainer.kind in ("ddp", "zero3", "fsdp1") else trainer.model
    whole: dict[str, torch.Tensor] = {}
    with _whole_model(trainer, adapter):
        if adapter:
            module.merge_adapter()
        try:
            for raw, param in module.named_parameters():
                name = raw.replace("_fsdp_wrapped_module.", "").removeprefix("base_model.model.")
                name = name.replace(".base_layer", "")
                if "lora_" in name:
                    continue
                with _gathered(trainer, adapter, param) as tensor:
                    if dist.get_rank() == SENDER:
                        whole[name] = tensor.detach().clone()
        finally:
            if adapter:
                module.unmerge_adapter()
    if packer is not None:
        cast = CastRule(enabled=False)
        source = ParamsSource(WholeParams(whole, ""), {n: n for n in whole}, cast, "")
        push = RankPushFactory(OneRank(), BUCKET_BYTES).weights_push(source, GLOO)
        for index in range(len(manifest.buckets)):
            packer.pack(index, push, nonce=1)


@contextlib.contextmanager
def _whole_model(trainer: Any, adapter: bool) -> Iterator[None]:
    """Where the framework merges or reads only what every rank holds whole."""
    if trainer.kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

        with Fsdp.summon_full_params(trainer.model, writeback=False):
            yield
    elif trainer.kind == "zero3" and adapter:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(trainer.model.module.parameters())):
            yield
    else:
        yield


@contextlib.contextmanager
def _gathered(trainer: Any, adapter: bool, param: Any) -> Iterator[torch.Tensor]:
    if trainer.kind == "zero3" and not adapter:
        import deepspeed

        with deepspeed.zero.GatheredParameters([param]):
            yield param
    else:
        yield param.full_tensor() if hasattr(param, "full_tensor") else param


# -- measuring ---------------------------------------------------------------------


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(field)


def _measure(run: Callable[[], None]) -> tuple[float, int]:
    """Seconds, and the largest growth of resident memory of any rank."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _resident("VmRSS"), time.perf_counter()
    run()
    dist.barrier()
    seconds = time.perf_counter() - began
    growth = torch.tensor([max(0, _resident("VmHWM") - before)])
    dist.all_reduce(growth, op=dist.ReduceOp.MAX)
    return seconds, int(growth)


def _case(kind: str, shape: str, adapter: bool) -> list[str]:
    width, depth, num_blocks = SHAPES[shape]
    torch.manual_seed(0)
    module: Any = Stack(width, depth, num_blocks)
    blocks = list(module.blocks)
    if adapter:
        from peft import LoraConfig, get_peft_model

        targets = [f"linears.{i}" for i in range(depth)]
        module = get_peft_model(module, LoraConfig(r=16, target_modules=targets))
    trainer = wrap(kind, module, blocks, _loss_of(width))
    trainer.train(0, 1)
    ranks = ranks_of("all")
    target = pb.DescribeTargetResponse(base_dtype=dtype_to_proto(DataType.FLOAT32))

    def open_source() -> Any:
        content = ModelBase.of(trainer.model, ranks, False, "default" if adapter else None)
        return content.source(target)[0]

    manifest = plan_buckets(open_source().metas, BUCKET_BYTES)
    packers: dict[str, Packer | None] = dict.fromkeys(("weft", "naive"))

    def packer_of(name: str) -> Packer | None:
        if packers[name] is None and ranks.rank == SENDER:
            packers[name] = Packer(whole_packing(manifest))
        return packers[name]

    ways: dict[str, Callable[[], None]] = {
        "weft": lambda: _weft(open_source(), manifest, packer_of("weft"), ranks),
        "naive": lambda: _naive(trainer, adapter, manifest, packer_of("naive")),
    }
    # The first of each allocates its buckets: their memory counts, its time does not.
    memory = {name: _measure(way)[1] for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(_measure(way)[0])
    ranks.abandon()
    best = {name: min(values) for name, values in times.items()}
    return [
        kind, shape, "merged" if adapter else "full", f"{manifest.total_bytes / 1e6:,.0f} MB",
        f"{best['weft'] * 1e3:,.1f} ms", f"{best['naive'] * 1e3:,.1f} ms",
        f"{best['naive'] / best['weft']:.1f}", f"{memory['weft'] / 1e6:,.0f} MB",
        f"{memory['naive'] / 1e6:,.0f} MB",
    ]  # fmt: skip


def rank_main(rank: int, store: str, kind: str, shape: str, push: str) -> None:
    """One rank of one case; rank 0 prints its row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    row = _case(kind, shape, push == "merged")
    if rank == 0:
        print("| " + " | ".join(row) + " |", flush=True)
    dist.barrier()
    os._exit(0)  # DeepSpeed now and then aborts at exit, after all work


def _run_case(case: Sequence[str]) -> None:
    """In two fresh processes: what an earlier case freed would hide what this one takes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "benchmarks.trainers", "--case", *case]
        ranks = [
            subprocess.Popen(
                [*command, "--store", f"{work}/store", "--rank", str(rank)],
                env=env,
                stderr=(Path(work) / f"{rank}.log").open("w"),
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.wait()
        if any(process.returncode for process in ranks):
            raise SystemExit((Path(work) / "0.log").read_text()[-3000:])


def main() -> None:
    """Run every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help="of trainer")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        rank_main(arguments.rank, arguments.store, *arguments.case)
        return
    print(describe(), end="\n\n")
    print("| trainer | model | push | bytes | Weft | naive | naive / Weft | memory | naive's |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for case in itertools.product(arguments.kinds, SHAPES, ("full", "merged")):
        _run_case(case)


if __name__ == "__main__":
    main()
