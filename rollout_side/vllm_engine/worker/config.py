"""Configuration of a worker at its start, and what the worker decides by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rollout_side.config import Staging
from rollout_side.memory.placement import MARGIN_BYTES, Memory, stage_on_device
from weft_rl.contract.capabilities import BackendChoice
from weft_rl.contract.errors import UnsupportedError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.transport.backends import available_backends


@dataclass(frozen=True, kw_only=True)
class OpenConfig:
    """Configuration that a worker starts with; sent as a plain dict."""

    staging_memory_bytes: int
    adapter_memory_bytes: int
    retain_base: int
    receiver_factory: str
    """Dotted path ``module:name`` of a callable from a ``WorkerStore`` and a ``Tracer`` to a
    receiver."""
    staging: Staging
    backend: BackendChoice
    replica_pid: int
    """Pid of the process that the engine belongs to and ends with."""
    holdings_path: str
    """Path at which that process reads what the receiving rank holds: ``HoldingsPage.path``."""
    ranks_secret: str
    """Secret by which the replica's ranks find the receiving one, and know each other.

    Used where they load in place.
    """
    architecture: str
    tensors: Sequence[tuple[str, int, Sequence[int]]] = field(default=())
    """Name, ``DataType`` and shape of everything a base must hold."""
    spill: Mapping[str, Any] | None = None
    """``SpillSettings`` of the replica's spill directory, which exists."""
    traced_as: str = ""
    """Replica that this worker's spans are said to be of; empty where it makes none."""

    def reference(self) -> Reference:
        """Return the tensors as contract values."""
        metas = (TensorMeta(n, DataType(d), tuple(s)) for n, d, s in self.tensors)
        return Reference(self.architecture, tuple(metas))


def decide_memory(
    device: torch.device, reference: Reference, settings: OpenConfig
) -> tuple[Memory, int]:
    """Decide where versions are put, and the bound of staged bases there in bytes."""
    bound = settings.staging_memory_bytes
    in_place = settings.staging == "in-place"
    if device.type != "cuda":
        return Memory(in_place=in_place), bound
    free_bytes, _ = torch.cuda.mem_get_info(device)
    model_bytes = sum(meta.num_bytes for meta in reference.tensors)
    on_device = stage_on_device(settings.staging, device, model_bytes, free_bytes)
    if on_device:
        bound = min(bound, max(0, free_bytes - MARGIN_BYTES))
    return Memory(device, on_device, in_place), bound


def usable_backends(device: torch.device, choice: BackendChoice) -> tuple[str, ...]:
    """Return the backends that this worker offers, best first.

    Raises:
        UnsupportedError: It cannot use the one that was chosen.
    """
    have = available_backends(device)
    offered = tuple(name for name in have if choice in ("auto", name))
    if not offered:
        raise UnsupportedError(
            f"--backend {choice}: a worker on {device.type} has {', '.join(have)} here; leave it "
            "out, or name one of these"
        )
    return offered
