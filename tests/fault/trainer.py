"""A trainer process for the kill matrix: pushes the base as often as it is told.

``python -m tests.fault.trainer COORDINATOR [RANK STORE SIZE MAX_SENDERS]``: each line "push
VALUE TIMEOUT" of its standard input is one push; it answers one line of JSON. "sleep" puts the
replicas on its GPU to sleep until "wake". With RANK it is
one of SIZE, which meet in the file STORE and hold an equal part of each tensor. With --adapter
[POLICY] it is another trainer, which pushes an adapter ("math" by default) to whoever is there.

The first SIGINT while a push runs interrupts it as Ctrl-C does; at other times it is ignored. Where
the environment names a file in WEFT_TEST_ACKNOWLEDGED, each push that has returned adds a line to
it: policy, version and the digest of what was pushed.

With DELTAS of ``pool`` in the environment the base is pushed by deltas: models differ at every 64th
element. An answer then names the digest that the rank's copy is of, and the value that is in the
copy, null where it holds several.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.doubles.replica_weights import BUCKET_BYTES, STRIDE, model
from tests.fault.pool import DELTAS
from trainer_side import Publisher, rollout_sleep
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest, digests_of

_ACKNOWLEDGED = "WEFT_TEST_ACKNOWLEDGED"


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


def write_adapter(directory: Path, value: float = 1.0) -> Path:
    """An adapter of the double's only layer that may have one."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.layers.0.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.full((4, 64), value),
        f"{prefix}.lora_B.weight": torch.ones(64, 4),
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


class Interrupts:
    """Handler of SIGINT, which interrupts what runs inside the ``with``, once."""

    def __init__(self) -> None:
        self._is_inside = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        is_inside, self._is_inside = self._is_inside, False
        if is_inside:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._is_inside = True

    def __exit__(self, *raised: object) -> None:
        self._is_inside = False


def push(
    publisher: Publisher,
    value: float,
    timeout_seconds: float,
    adapter: Path | None = None,
    policy: str = "math",
) -> dict[str, Any]:
    """One push; how it ended."""
    began = time.time()
    try:
        if adapter is not None:
            write_adapter(adapter, value)
            version = publisher.push_adapter(
                adapter, policy, timeout_seconds=timeout_seconds
            ).version
        else:
            whole = model(value, STRIDE if DELTAS in os.environ else 1)
            weights = sharded(whole) if dist.is_initialized() else whole
            version, report = publisher.push_base(weights, timeout_seconds=timeout_seconds)
            delta = report.delta
        _acknowledge(version, value, adapter)
        outcome: dict[str, Any] = {"version": version.version}
        if adapter is None:
            outcome |= {"delta": delta.is_delta, "why": delta.whole_reason}
    except WeftError as error:
        outcome = {"error": error.reason, "message": error.message}
    ended = time.time()
    return {**outcome, **copy_of(publisher), "began": began, "ended": ended}


def copy_of(publisher: Publisher) -> dict[str, Any]:
    """Return what a rank's copy says that it is of, and what it is of; nothing without one."""
    copy = publisher._pushing._deltas._copy
    if copy is None or not copy.is_valid:
        return {}
    payloads = [copy.payload(nth).view(torch.float32) for nth in range(len(copy._payloads))]
    value = payloads[0][0]
    is_one = all(bool(((each == value) | (each == 1)).all()) for each in payloads)
    return {"copy": copy.content_digest.hex(), "copied": float(value) if is_one else None}


def _acknowledge(version: PolicyVersion, value: float, adapter: Path | None) -> None:
    """Write down that the push of a version has returned, where a file is named for that."""
    if _ACKNOWLEDGED not in os.environ:
        return
    if adapter is None:
        tensors = [parameter.detach() for parameter in model(value).parameters()]
    else:
        tensors = list(load_file(adapter / "adapter_model.safetensors").values())
    digest = content_digest(digests_of(tensors)).hex()
    file = os.open(os.environ[_ACKNOWLEDGED], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{version.policy} {version.version} {digest}\n".encode())
    os.fsync(file)
    os.close(file)


def main() -> None:
    """Serve until standard input closes, or has said "end"."""
    rollout_sleep.used_gpus = lambda: ["GPU-a"]
    coordinator, *ranked = sys.argv[1:]
    max_senders = None
    if ranked[:1] == ["--adapter"]:
        policy = ranked[1] if len(ranked) > 1 else "math"
        name = "trainer-b" if policy == "math" else f"trainer-of-{policy}"
        with (
            tempfile.TemporaryDirectory() as directory,
            Publisher(coordinator, trainer_id=name, require=1, progress=None) as publisher,
        ):
            _serve(publisher, Path(directory), policy)
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
        delta="always" if DELTAS in os.environ else "never",
    ) as publisher:
        _serve(publisher)
    sys.stdout.flush()


def _serve(publisher: Publisher, adapter: Path | None = None, policy: str = "base") -> None:
    interrupts = Interrupts()
    print("ready", flush=True)
    asleep = contextlib.ExitStack()
    for line in sys.stdin:
        if line == "end\n":
            return
        what, value, timeout_seconds = line.split()
        if what == "sleep":
            names = asleep.enter_context(publisher.rollouts_asleep())
            outcome: dict[str, Any] = {"asleep": names, "ended": time.time()}
        elif what == "wake":
            asleep.close()
            outcome = {"asleep": (), "ended": time.time()}
        else:
            try:
                with interrupts:
                    outcome = push(publisher, float(value), float(timeout_seconds), adapter, policy)
            except KeyboardInterrupt:
                outcome = {"error": "KeyboardInterrupt", "ended": time.time()}
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
