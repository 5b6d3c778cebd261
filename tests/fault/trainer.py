"""A trainer process for the kill matrix: pushes the base as often as it is told.

``python -m tests.fault.trainer COORDINATOR [RANK STORE SIZE MAX_SENDERS]``: each line "push
VALUE TIMEOUT" of its standard input is one push; it answers one line of JSON. With RANK it is
one of SIZE, which meet in the file STORE and hold an equal part of each tensor.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.doubles.replica_weights import BUCKET_BYTES, model
from trainer_side import Publisher
from weft.contract.errors import WeftError


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


def push(publisher: Publisher, value: float, timeout_seconds: float) -> dict[str, Any]:
    """One push; how it ended."""
    began = time.time()
    weights = sharded(model(value)) if dist.is_initialized() else model(value)
    try:
        version = publisher.push_base(weights, timeout_seconds=timeout_seconds)
        outcome: dict[str, Any] = {"version": version.version}
    except WeftError as error:
        outcome = {"error": error.reason, "message": error.message}
    return {**outcome, "began": began, "ended": time.time()}


def main() -> None:
    """Serve until standard input closes."""
    coordinator, *ranked = sys.argv[1:]
    max_senders = None
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
        print("ready", flush=True)
        for line in sys.stdin:
            _, value, timeout_seconds = line.split()
            print(json.dumps(push(publisher, float(value), float(timeout_seconds))), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
