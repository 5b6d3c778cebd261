"""``python -m benchmarks.gpu_sharded``: pushes of a trainer that is sharded over GPUs (FSDP2), or
that shares its one GPU with the replica.

The replica is ``weft rollout`` on the GPU named by ``--replica-gpu``, with memory to spare for a
trainer there; each rank of the trainer is a process on a GPU of its own, from 0, where there are so
many. ``--delta 0.01`` changes a hundredth of the elements before each push of all parameters, and
sends these alone. ``--dry`` runs the same on CPUs over gloo, with a tiny model: for writing this
file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_deltas import step
from benchmarks.gpu_pool import QWEN3_8B, GpuPool, write_config, write_weights
from benchmarks.machine import describe
from trainer_side import Publisher, PushReport

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_RANK = 32
_TINY = {
    **QWEN3_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
}
_LOOKS = 200.0


def trainer(args: argparse.Namespace) -> None:
    """One rank: pushes again and again, and prints what that took where it is rank 0."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    device = torch.device("cpu" if args.dry else f"cuda:{rank % num_gpus}")
    if not args.dry:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.dry or size > num_gpus else "nccl")
    config = AutoConfig.from_pretrained(args.model)
    with device:
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = model.model.layers
    if args.what != "full":
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=_RANK, lora_alpha=64, init_lora_weights=False,
                              task_type="CAUSAL_LM", target_modules=_TARGETS)  # fmt: skip
        model = get_peft_model(model, settings, autocast_adapter_dtype=False)
    if size > 1:
        mesh = init_device_mesh(device.type, (size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def push(publisher: Publisher) -> PushReport:
        if args.what == "full":
            return publisher.push_base(model).report
        if args.what == "merged":
            return publisher.push_merged(model).report
        return publisher.push_adapter(model, "math").report

    def settle() -> None:
        if not args.dry:
            torch.cuda.synchronize()
        dist.barrier()

    seconds, compared, size_gb = [], [], 0.0
    name = f"{args.what}, {'FSDP2 over ' + str(size) if size > 1 else 'whole'}"
    with Publisher(
        args.coordinator,
        trainer_id="sharded",
        progress=None,
        timeout_seconds=90,
        backend=args.backend,
        bucket_bytes=args.bucket_mib * 2**20 if args.bucket_mib else None,
        delta="always" if args.delta else "never",
    ) as publisher:
        for number in range(args.pushes):
            step(model, args.delta)
            settle()
            time.sleep(args.pause)
            dist.barrier()
            began = time.perf_counter()
            report = push(publisher)
            settle()
            seconds.append(time.perf_counter() - began)
            if rank == 0:
                compared.append(report.delta.comparing_seconds)
                size_gb = (report.sent_bytes if args.delta else report.total_bytes) / 1e9
                print(
                    f"  {name} #{number}: {seconds[-1] * 1e3:.1f} ms (forming "
                    f"{report.forming_seconds * 1e3:.1f}, staging "
                    f"{report.staging_seconds * 1e3:.1f}, committing "
                    f"{report.committing_seconds * 1e3:.1f}, pause "
                    f"{report.pause_seconds * 1e3:.1f}, comparing {compared[-1] * 1e3:.1f}) "
                    f"{report.source} {report.remarks} {report.delta.whole_reason}",
                    flush=True,
                )
    if rank == 0:
        kept = seconds[2:] or seconds
        print(f"RESULT {name}: {size_gb:.3f} GB, first {seconds[0] * 1e3:.0f} ms, then median "
              f"{statistics.median(kept) * 1e3:.1f} of {len(kept)}, min {min(kept) * 1e3:.1f} ms, "
              f"comparing {statistics.median(compared[2:] or compared) * 1e3:.1f} over "
              f"{report.backend}", flush=True)  # fmt: skip
    if 1 < size <= num_gpus and args.what == "full":
        for _ in range(2):
            settle()
            began = time.perf_counter()
            for parameter in model.parameters():
                parameter.full_tensor()
            settle()
        if rank == 0:
            print(f"RESULT beside it, full_tensor() of every parameter: "
                  f"{(time.perf_counter() - began) * 1e3:.1f} ms", flush=True)  # fmt: skip
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def floors() -> None:
    """The rates of the links that bytes go over, in this run: 1 GiB at a time."""
    size = 2**30
    source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
    for to in range(min(2, torch.cuda.device_count())):
        target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{to}")
        for repeats in (2, 16):
            for device in {0, to}:
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(repeats):
                target.copy_(source, non_blocking=True)
            for device in {0, to}:
                torch.cuda.synchronize(device)
        rate = repeats * size / (time.perf_counter() - began) / 1e9
        print(f"RESULT floor: a copy from GPU 0 to GPU {to}: {rate:.0f} GB/s", flush=True)
        del target
    del source
    torch.cuda.empty_cache()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="", help="of a trainer's rank; set by the parent")
    parser.add_argument("--model", default="")
    parser.add_argument("--what", default="full,adapter,merged")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--pushes", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.8, help="seconds before each push")
    parser.add_argument("--staging", default="device")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--bucket-mib", type=int, default=0)
    parser.add_argument(
        "--delta", type=float, default=0.0, help="share of elements that change; send these alone"
    )
    parser.add_argument("--replica-gpu", default="1")
    parser.add_argument("--memory", default="0.3")
    parser.add_argument(
        "--weights", action="store_true", help="start the replica from files, not at random"
    )
    parser.add_argument("--verbose", action="store_true", help="say what the replica waited for")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        trainer(args)
    print(describe(), flush=True)
    if not args.dry:
        floors()
    work = Path(tempfile.mkdtemp(prefix="weft-sharded-"))
    config = _TINY if args.dry else {**QWEN3_8B, "num_hidden_layers": args.layers}
    model = write_config(work / "model", config)
    if args.weights:
        write_weights(model, "cpu" if args.dry else "cuda:0")
    pool = GpuPool(work).start()
    load_format = () if args.weights else ("--load-format", "dummy")
    vllm = (*load_format, "--max-model-len", "512", "--gpu-memory-utilization",
            args.memory, "--enable-lora", "--max-lora-rank", str(_RANK), "--max-loras", "2",
            "--max-cpu-loras", "4")  # fmt: skip
    try:
        staging = "host" if args.dry else args.staging
        is_told = args.weights or args.verbose
        options = ("--staging", staging, *(["--log-level", "debug"] if is_told else []))
        pool.launch("replica-0", args.replica_gpu, model, *vllm, options=options)
        pool.url("replica-0")
        pool.wait_registered(1, 60)
        if args.weights and not args.dry:
            seconds = pool.wait_logged("replica-0", "plain copies", 60)
            print(f"RESULT copies were learnt {seconds:.1f} s after it served", flush=True)
        for what in args.what.split(","):
            _ranks(args, pool.target, model, what)
        if args.verbose:
            text = pool.replicas["replica-0"].log_path.read_text()
            print("\n".join(line for line in text.splitlines() if "waited for bytes" in line))
    finally:
        pool.stop()


def _ranks(args: argparse.Namespace, target: str, model: Path, what: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(args.ranks), "-m", "benchmarks.gpu_sharded", "--coordinator", target,
               "--model", str(model), "--what", what, "--pushes", str(args.pushes),
               "--backend", args.backend, "--pause", str(args.pause),
               "--bucket-mib", str(args.bucket_mib), "--delta", str(args.delta),
               *(["--dry"] if args.dry else [])]  # fmt: skip
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(_LOOKS)
            if code:
                print(f"RESULT {what}: the trainer ended with {code}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"RESULT {what}: did not end in {_LOOKS:.0f} s", flush=True)
            os.killpg(process.pid, 9)


if __name__ == "__main__":
    main()
    print(json.dumps({"ok": True}), flush=True)
