"""``make bench``: what pushes cost on this machine, as a table.

Real coordinator process, real gRPC and gloo. The adapter push is measured against a
real vLLM replica; control plane and staging against the engine double in processes
of their own, so that what is measured is Weft.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.bare_gloo import BareGloo
from benchmarks.idle import compare
from benchmarks.machine import describe, peak_bytes, reset_peak, resident_bytes
from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.manifest import DEFAULT_BUCKET_BYTES

_ADAPTER_PUSHES = 21
_CONTROL_PUSHES = 31
_REPLICAS = (1, 2, 4)
_STAGING_BYTES = 512 * 2**20
_STAGING_PUSHES = 7
_TENSOR_ELEMENTS = 2**20


class Rows:
    """The table: what, measured, target."""

    def __init__(self) -> None:
        self._table = Table("what", "measured", "to reach")

    def add(self, what: str, measured: str, target: str) -> None:
        self._table.add_row(what, measured, target)
        Console(stderr=True).print(f"  {what}: {measured} ({target})", highlight=False)

    def show(self) -> None:
        Console(width=120).print(self._table)


@contextmanager
def coordinator(work: Path, name: str) -> Iterator[str]:
    """A coordinator process; its HOST:PORT."""
    args = ("-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0", "--catalog",
            str(work / f"{name}.db"), "--log-level", "warning")  # fmt: skip
    process = Process(name, args, work, {})
    try:
        line = process.line(lambda text: text.startswith("listening on "), 30)
        yield line.removeprefix("listening on ")
    finally:
        process.stop()


@contextmanager
def doubles(work: Path, target: str, count: int, num_tensors: int, elements: int) -> Iterator[None]:
    """Processes of engine doubles, for a base of so many tensors of as many elements."""
    with ExitStack() as stack:
        for i in range(count):
            args = ("-m", "tests.doubles.replica_process", target, f"replica-{i}",
                    str(num_tensors), str(elements))  # fmt: skip
            process = Process(f"double-{count}-{i}", args, work, {})
            stack.callback(process.stop)
            process.line(lambda text: text == "ready", 60)
        yield


def model_of(num_tensors: int, elements: int) -> nn.Module:
    """Parameters that the double's base has the names and shapes of."""
    model = nn.Module()
    layers = nn.ModuleList(nn.Module() for _ in range(-(-num_tensors // 8)))
    model.layers = layers
    for i in range(num_tensors):
        part = nn.Module()
        part.weight = nn.Parameter(torch.full((elements,), float(i)), requires_grad=False)
        layers[i // 8].add_module(f"t{i % 8}", part)
    q_proj = nn.Module()
    q_proj.weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    layers[0].add_module("q_proj", q_proj)
    return model


def control_plane(work: Path, rows: Rows) -> None:
    """Pushes of an adapter of 4 KiB: nothing is left but the control plane."""
    medians: dict[int, float] = {}
    for count in _REPLICAS:
        with (
            coordinator(work, f"control-{count}") as target,
            doubles(work, target, count, 1, 16),
            Publisher(target, trainer_id="bench", progress=None) as publisher,
        ):
            adapter = tiny_adapter(work)
            seconds = []
            for _ in range(_CONTROL_PUSHES):
                report = publisher.push_adapter(adapter, "tiny").report
                seconds.append(report.seconds)
            medians[count] = statistics.median(seconds[3:])
    first, last = min(medians), max(medians)
    per_replica = (medians[last] - medians[first]) / (last - first)
    shown = ", ".join(f"{n}: {s * 1e3:.1f} ms" for n, s in medians.items())
    rows.add("control plane of a push, replicas: median", shown, "1 replica < 15 ms")
    rows.add("control plane, each further replica", f"{per_replica * 1e3:.2f} ms", "< 2 ms")


def tiny_adapter(work: Path) -> Path:
    """An adapter of 4 KiB, as a directory in ``work``."""
    from safetensors.torch import save_file

    path = work / "tiny-adapter"
    if not path.exists():
        path.mkdir()
        prefix = "base_model.model.layers.0.q_proj"
        pair = {"lora_A": torch.ones(4, 64), "lora_B": torch.ones(64, 4)}
        save_file(
            {f"{prefix}.{k}.weight": v for k, v in pair.items()}, path / "adapter_model.safetensors"
        )
        (path / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'
        )
    return path


def staging(work: Path, rows: Rows) -> None:
    """Staging of 512 MiB against bare gloo, in turn; and the trainer's extra memory."""
    num_tensors = _STAGING_BYTES // (4 * _TENSOR_ELEMENTS)
    model = model_of(num_tensors, _TENSOR_ELEMENTS)
    bare = BareGloo(_STAGING_BYTES, DEFAULT_BUCKET_BYTES)
    with (
        coordinator(work, "staging") as target,
        doubles(work, target, 1, num_tensors, _TENSOR_ELEMENTS),
        Publisher(target, trainer_id="bench", progress=None) as publisher,
    ):
        publisher.push_adapter(tiny_adapter(work), "tiny")  # forms the group, starts threads
        before = resident_bytes()
        reset_peak()
        publisher.push_base(model)
        extra = peak_bytes() - before
        weft, floor = [], []
        for _ in range(_STAGING_PUSHES):
            floor.append(bare.run())
            report = publisher.push_base(model).report
            weft.append(report.staging_seconds)
    bare.close()
    ratio = statistics.median(f / w for f, w in zip(floor, weft, strict=True))
    fast, slow = _STAGING_BYTES / 1e9 / statistics.median(floor), _STAGING_BYTES / 1e9
    rows.add(
        "staging 512 MiB, 2 ranks, against bare gloo",
        f"{slow / statistics.median(weft):.2f} of {fast:.2f} GB/s, ratio {ratio:.2f}",
        ">= 0.70",
    )
    bound = 2 * DEFAULT_BUCKET_BYTES + 4 * _TENSOR_ELEMENTS
    rows.add(
        "trainer's extra memory while pushing 512 MiB",
        f"{extra / 2**20:.0f} MiB",
        f"two buckets and the largest tensor: {bound / 2**20:.0f} MiB",
    )


def adapter(work: Path, rows: Rows) -> None:
    """Pushes of a 9 MB adapter to a real vLLM replica, from call to served."""
    from peft import LoraConfig, get_peft_model

    from weft_rl.cli.demo.main import _ENGINE_ENV
    from weft_rl.cli.demo.tiny_model import load_model, make_model

    path = work / "model"
    make_model(path, hidden_size=512, intermediate_size=1536, num_hidden_layers=15)
    peft_model = get_peft_model(
        load_model(path),
        LoraConfig(
            r=16, lora_alpha=32, init_lora_weights=False,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj",
                            "gate_proj", "up_proj", "down_proj"],
        ),
    )  # fmt: skip
    with coordinator(work, "adapter") as target:
        args = ("-m", "weft_rl", "rollout", "-c", target, "--http-port", "0",
                "--replica-id", "replica-0", "--log-level", "warning", "--", str(path),
                "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
                "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2")  # fmt: skip
        replica = Process("replica-0", args, work, _ENGINE_ENV)
        try:
            replica.line(lambda text: text.startswith("serving on "), 180)
            _push_adapters(target, peft_model, rows)
        finally:
            replica.stop()


def _push_adapters(target: str, peft_model: Any, rows: Rows) -> None:
    reports = []
    with Publisher(target, trainer_id="bench", progress=None) as publisher:
        for _ in range(_ADAPTER_PUSHES):
            report = publisher.push_adapter(peft_model, "math").report
            reports.append(report)
    kept = reports[1:]  # the first one forms the group

    def median(name: str) -> float:
        return statistics.median(getattr(r, name) for r in kept) * 1e3

    rows.add(
        f"adapter of {kept[0].total_bytes / 1e6:.1f} MB to one vLLM replica, from call to served",
        f"median {median('seconds'):.1f} ms (forming {median('forming_seconds'):.1f}, staging "
        f"{median('staging_seconds'):.1f}, committing {median('committing_seconds'):.1f})",
        "< 60 ms",
    )
    rows.add("the same, first push (forms the group)", f"{reports[0].seconds * 1e3:.1f} ms", "-")


def idle(work: Path, rows: Rows) -> None:
    """A replica that nobody asks anything, beside plain vLLM."""
    with coordinator(work, "idle") as target:
        for num_ranks in (1, 2):
            shares = compare(work, target, num_ranks)
            plain, replica = shares.plain * 100, shares.replica * 100
            rows.add(
                f"idle replica, {num_ranks} worker{'s' * (num_ranks > 1)}, beside plain vLLM",
                f"{replica:.2f} of {plain:.2f} % of a core, ratio {replica / plain:.2f}",
                "<= 1.10",
            )
            rows.add("the same, a trainer's side group kept up", f"{shares.attached:.2%}", "-")


_PARTS = {"adapter": adapter, "control": control_plane, "staging": staging, "idle": idle}


def main() -> None:
    """Run all parts, or those named; print the table last."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], default=[])
    chosen = parser.parse_args().parts or list(_PARTS)
    torch.set_num_threads(1)
    rows = Rows()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as directory:
        for part in chosen:
            print(f"{part} ...", file=sys.stderr, flush=True)
            _PARTS[part](Path(directory), rows)
    print(describe())
    rows.show()


if __name__ == "__main__":
    main()
