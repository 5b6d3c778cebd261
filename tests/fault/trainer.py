"""A trainer process for the kill matrix: pushes the base as often as it is told.

``python -m tests.fault.trainer COORDINATOR [RANK STORE SIZE MAX_SENDERS]``: each line "push
VALUE TIMEOUT" of its standard input is one push; it answers one line of JSON. "sleep" puts the
replicas on its GPU to sleep until "wake". With RANK it is
one of SIZE, which meet in the file STORE and hold an equal part of each tensor. With --adapter
it is another trainer, which pushes an adapter to whoever is there.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.doubles.replica_weights import BUCKET_BYTES, model
from trainer_side import Publisher, rollout_sleep
from weft_rl.contract.errors import WeftError


def sharded(whole: nn.Module) -> nn.Module:
    """The same with this rank's part of each parameter; no communication."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in whole.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            local = param.detach().chunk(mesh.size())[dist.get_rank()]
            shard = DTensor.from_local(  # parts may be uneven
                local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride()
            )
            setattr(module, name, nn.Parameter(shard, requires_grad=False))
    return whole


def write_adapter(directory: Path) -> Path:
    """An adapter of the double's only layer that may have one."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.layers.0.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.ones(4, 64),
        f"{prefix}.lora_B.weight": torch.ones(64, 4),
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def push(
    publisher: Publisher, value: float, timeout_seconds: float, adapter: Path | None = None
) -> dict[str, Any]:
    """One push; how it ended."""
    began = time.time()
    try:
        if adapter is not None:
            version = publisher.push_adapter(
                adapter, "math", timeout_seconds=timeout_seconds
            ).version
        else:
            weights = sharded(model(value)) if dist.is_initialized() else model(value)
            version = publisher.push_base(weights, timeout_seconds=timeout_seconds).version
        outcome: dict[str, Any] = {"version": version.version}
    except WeftError as error:
        outcome = {"error": error.reason, "message": error.message}
    return {**outcome, "began": began, "ended": time.time()}


def main() -> None:
    """Serve until standard input closes."""
    rollout_sleep.used_gpus = lambda: ["GPU-a"]
    coordinator, *ranked = sys.argv[1:]
    max_senders = None
    if ranked == ["--adapter"]:
        with (
            tempfile.TemporaryDirectory() as directory,
            Publisher(coordinator, trainer_id="trainer-b", require=1, progress=None) as publisher,
        ):
            _serve(publisher, write_adapter(Path(directory)))
        return
    if ranked:
        rank, store, size, max_senders = int(ranked[0]), ranked[1], int(ranked[2]), int(ranked[3])
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with Publisher(
        coordinator,
        trainer_id="trainer-a",
        require=2,
        bucket_bytes=BUCKET_BYTES,
        progress=None,
        max_senders=max_senders,
    ) as publisher:
        _serve(publisher)
    sys.stdout.flush()


def _serve(publisher: Publisher, adapter: Path | None = None) -> None:
    print("ready", flush=True)
    asleep = contextlib.ExitStack()
    for line in sys.stdin:
        what, value, timeout_seconds = line.split()
        if what == "sleep":
            names = asleep.enter_context(publisher.rollouts_asleep())
            outcome: dict[str, Any] = {"asleep": names, "ended": time.time()}
        elif what == "wake":
            asleep.close()
            outcome = {"asleep": (), "ended": time.time()}
        else:
            outcome = push(publisher, float(value), float(timeout_seconds), adapter)
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
