"""``python -m benchmarks.gpu``: pushes from a trainer's GPU to replicas on other GPUs.

The trainer is this process, on GPU 0; replica ``i`` is ``weft rollout`` on GPU ``i + 1``, or all
on the trainer's, with vLLM's own server and clients that stream tokens all the time.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_pool import QWEN3_8B, QWEN3_MOE, GpuPool, write_config
from benchmarks.lost_member import recover
from benchmarks.machine import describe
from trainer_side import Publisher, PushResult
from weft_rl.cli.demo.processes import Process

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_RANK = 32
_STREAMS = 4


class Clients:
    """Streams of tokens from each replica; see ``token_gaps``."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._processes: list[Process] = []

    def add(self, name: str, url: str) -> None:
        """Begin to ask a replica for tokens."""
        args = ("-m", "benchmarks.token_gaps", url, "base-model", str(_STREAMS))
        process = Process(f"clients-{name}", args, self._work, {"CUDA_VISIBLE_DEVICES": ""})
        process.line(lambda text: text == "ready", 60)
        self._processes.append(process)

    def take(self, *times: float) -> list[dict[str, Any]]:
        """Return what each has seen since it was last asked, and until each of these times."""
        answers = []
        for process in self._processes:
            process.tell(" ".join(map(str, ("take", *times))))
            answers.append(process.answer(30))
        return answers

    def stop(self) -> None:
        """End them."""
        for process in self._processes:
            process.stop()


def worst(gaps: list[dict[str, Any]]) -> str:
    """The largest gap of all replicas, and the usual one."""
    seen = [g for g in gaps if g["tokens"]]
    if not seen:
        return "no requests"
    top, usual = max(g["max_ms"] for g in seen), statistics.median(g["median_ms"] for g in seen)
    return f"gap max {top:.1f} ms, median {usual:.1f} ms"


def measure(
    what: str,
    push: Callable[[], PushResult],
    clients: Clients,
    repeats: int,
    warm: int,
) -> None:
    """Push again and again; print each, and the median of those after the first ``warm``."""
    seconds, added = [], []
    for number in range(warm + repeats):
        time.sleep(0.2)
        clients.take()
        time.sleep(0.7)
        quiet = clients.take()
        torch.cuda.synchronize()
        report = push().report
        commits = time.monotonic() - report.committing_seconds
        sends = commits - report.staging_seconds
        time.sleep(0.3)
        gaps = clients.take(sends, commits)
        if number >= warm:
            seconds.append(report.seconds)
            if gaps and gaps[0]["tokens"] and quiet[0]["tokens"]:
                largest, usual = gaps[0]["max_ms"], quiet[0]["max_ms"]
                until = [gap - usual for gap in gaps[0]["max_until_ms"]]
                added.append((largest, largest - usual, *until))
        print(
            f"  {what} #{number}: {report.seconds * 1e3:.1f} ms (forming "
            f"{report.forming_seconds * 1e3:.1f}, staging {report.staging_seconds * 1e3:.1f}, "
            f"committing {report.committing_seconds * 1e3:.1f}, pause "
            f"{report.pause_seconds * 1e3:.1f}); {worst(gaps)}; before: {worst(quiet)}",
            flush=True,
        )
    size = report.total_bytes / 1e9
    median = statistics.median(seconds)
    print(
        f"RESULT {what}: {size:.3f} GB to {report.num_replicas} replicas, median "
        f"{median * 1e3:.1f} ms of {len(seconds)}, min {min(seconds) * 1e3:.1f}, max "
        f"{max(seconds) * 1e3:.1f} ({size / median:.1f} GB/s)",
        flush=True,
    )
    if added:
        largest, more, before, sent = map(statistics.median, zip(*added, strict=True))
        print(f"RESULT {what}: largest gap between tokens, median {largest:.1f} ms, "
              f"{more:.1f} ms more than without a push ({before:.1f} before it is sent, {sent:.1f} "
              f"while it is read); to prefill as much takes {quiet[0]['prefill_ms']:.1f} ms",
              flush=True)  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=None)
    parser.add_argument("--staging", default="device", help="of the replicas: device, in-place")
    parser.add_argument(
        "--running-requests", default="recompute", help="of the replicas: recompute, keep, abort"
    )
    parser.add_argument(
        "--experts", action="store_true", help="Qwen3-30B-A3B's shape, experts in the adapter, too"
    )
    parser.add_argument("--quantization", default="", help="vLLM's --quantization: fp8_per_tensor")
    parser.add_argument("--memory", default="0.5", help="vLLM's --gpu-memory-utilization")
    parser.add_argument(
        "--one-sided", action="store_true", help="replicas see the trainer's GPU, and read it"
    )
    parser.add_argument("--share", action="store_true", help="replicas are on the trainer's GPU")
    parser.add_argument("--named", action="store_true", help="push bases as named tensors, too")
    parser.add_argument("--only-base", action="store_true", help="push no adapters")
    parser.add_argument(
        "--backend", default="auto", help="or several, as gloo,stream: idle over each, then all"
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="run vLLM without compiling or CUDA graphs, to start sooner",
    )
    parser.add_argument("--native", action="store_true", help="measure vLLM's own ways, too")
    parser.add_argument("--work", type=Path, default=None)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="weft-gpu-"))
    work.mkdir(parents=True, exist_ok=True)
    print(describe(), flush=True)
    print(f"gpus: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", flush=True)
    shape = QWEN3_MOE if args.experts else QWEN3_8B
    model_dir = write_config(work / "model", {**shape, "num_hidden_layers": args.layers})
    pool, clients = GpuPool(work).start(), Clients(work)
    try:
        run(args, model_dir, pool, clients)
    finally:
        clients.stop()
        pool.stop()
    torch.cuda.empty_cache()
    for mode in ("base", "lora") if args.native else ():
        command = [sys.executable, "-m", "benchmarks.vllm_native", mode, str(model_dir)]
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                process.wait(100)
            except subprocess.TimeoutExpired:
                print(f"RESULT vLLM's own way ({mode}) did not end in 100 s", flush=True)
            os.killpg(process.pid, 9)


def run(args: argparse.Namespace, model_dir: Path, pool: GpuPool, clients: Clients) -> None:
    """Every measurement: one replica, idle and busy; then all of them."""
    vllm = ("--load-format", "dummy", "--max-model-len", "4096",
            "--gpu-memory-utilization", args.memory,
            "--enable-lora", "--max-lora-rank", str(_RANK), "--max-loras", "2",
            "--max-cpu-loras", "4", *(["--enforce-eager"] if args.eager else []),
            *(["--quantization", args.quantization] if args.quantization else []))  # fmt: skip
    # An engine that starts meanwhile would take the trainer's memory for its own.
    models = make_models(model_dir) if args.share else None
    began = time.monotonic()
    names = [f"replica-{number}" for number in range(args.replicas)]
    for number, name in enumerate(names):
        options = ("--staging", args.staging, "--running-requests", args.running_requests)
        gpus = f"{number + 1},0" if args.one_sided else str(number + 1)
        gpus = "0" if args.share else gpus
        if args.share and number:  # they would take each other's memory for their own
            pool.url(names[number - 1])
        pool.launch(name, gpus, model_dir, *vllm, options=options)
    model, peft_model = models or make_models(model_dir)
    urls = {name: pool.url(name) for name in names}
    took = time.monotonic() - began
    print(f"{len(names)} replicas, staging {args.staging}, running requests "
          f"{args.running_requests}, serve after {took:.1f} s", flush=True)  # fmt: skip
    pool.wait_registered(len(names), 30)
    for name in names[1:]:
        pool.set_apart(name)
    for backend in (backends := args.backend.split(",")):
        is_last = backend == backends[-1]
        pushes(args, pool, clients, urls, (model, peft_model), backend, is_last=is_last)
    if names[1:]:
        kill(pool, model, len(names))


def pushes(
    args: argparse.Namespace,
    pool: GpuPool,
    clients: Clients,
    urls: dict[str, str],
    models: tuple[Any, Any],
    backend: str,
    *,
    is_last: bool,
) -> None:
    """Pushes over one backend; only over the last one while a replica is busy, too."""
    names, (model, peft_model) = [*urls], models
    settings: Any = {"progress": None, "timeout_seconds": 60, "backend": backend, "delta": "never"}
    if args.bucket_mib:
        settings["bucket_bytes"] = args.bucket_mib * 2**20
    how = "" if backend == "auto" else f"{backend}, "
    with Publisher(pool.target, trainer_id="bench", **settings) as publisher:

        def both(what: str, warm: int) -> None:
            measure(f"base, {what}", lambda: publisher.push_base(model),
                    clients, args.repeats, warm)  # fmt: skip
            if args.named:
                for how, push in named_pushes(model, publisher, args.staging).items():
                    measure(f"base, {how}, {what}", push, clients, args.repeats, 2)
            if args.only_base:
                return
            measure(f"adapter, {what}", lambda: publisher.push_adapter(peft_model, "math"),
                    clients, args.repeats, warm)  # fmt: skip

        both(f"{how}1 replica, idle", 3)
        if not is_last:
            return
        clients.add(names[0], urls[names[0]])
        both(f"{how}1 replica, busy", 1)
        if names[1:]:
            for name in names[1:]:
                pool.bring_back(name)
            seconds = pool.wait_ready(len(names), 60)
            print(f"RESULT {len(names) - 1} late joiners cloned base and adapters and were ready "
                  f"in {seconds:.2f} s", flush=True)  # fmt: skip
            both(f"{how}{len(names)} replicas, 1 busy", 2)


def named_pushes(
    model: Any, publisher: Publisher, staging: str
) -> dict[str, Callable[[], PushResult]]:
    """Ways to push a model's weights as named tensors, where the replica takes them so."""
    pairs = list(model.named_parameters())
    ways: dict[str, Callable[[], PushResult]] = {
        "named with metadata": lambda: publisher.push_tensors(pairs, metadata=pairs)
    }
    if staging != "in-place":
        ways["named"] = lambda: publisher.push_tensors(pairs)
        ways["named in another order"] = lambda: publisher.push_tensors(pairs[::-1])
    return ways


def make_models(model_dir: Path) -> tuple[Any, Any]:
    """The trainer's model on GPU 0, and one with an adapter that shares its base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.cuda.set_device(0)
    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        other = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        experts = config.model_type == "qwen3_moe"
        targets: dict[str, Any] = {"target_modules": _TARGETS}
        if experts:
            targets = {"target_modules": _TARGETS[:4], "target_parameters": _EXPERTS}
        rank = _RANK // 4 if experts else _RANK
        settings = LoraConfig(r=rank, lora_alpha=2 * rank, **targets,
                              init_lora_weights=False, task_type="CAUSAL_LM")  # fmt: skip
        peft_model = get_peft_model(other, settings)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model, peft_model


def kill(pool: GpuPool, model: Any, count: int) -> None:
    """End a replica in the middle of a push: how long until the others serve it."""
    process = pool.replicas[f"replica-{count - 1}"]
    found = recover(
        pool.target,
        model,
        lambda: os.killpg(process.pid, 9),
        count - 1,
        bucket_bytes=256 * 2**20,
        timeout_seconds=60,
    )
    print(f"RESULT peer killed: {found}", flush=True)


if __name__ == "__main__":
    main()
    print(json.dumps({"ok": True}), flush=True)
    os._exit(0)
