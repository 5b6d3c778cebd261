"""Where a worker puts the bytes of versions: on the host, or beside the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_side.config import Staging
from rollout_side.memory.segment import DeviceSegment, HostSegment, Segment
from weft.contract.capabilities import NCCL, ONE_SIDED
from weft.transport.group import CPU
from weft.transport.speaking import Speak, silent

#: Left to the engine as it runs: activations, NCCL's buffers.
MARGIN_BYTES = 2 * 2**30
# Twice the largest bucket: a layer's tensors and what it becomes.
_SPARE_BUFFERS = 2


@dataclass(frozen=True)
class Memory:
    """Makes segments; one a worker.

    Args:
        device: The engine's; where NCCL receives.
        base_on_device: Whether bases are staged there. Adapters never are: their store
            is host memory, which the engine loads from again after it evicted one.
        in_place: Whether bases that come over a side group are not staged at all, but
            loaded from the few buffers that they are received in.
    """

    device: torch.device = CPU
    base_on_device: bool = False
    in_place: bool = False

    def place(self, *, adapter: bool) -> torch.device:
        """Where a version's bytes are put."""
        return self.device if self.base_on_device and not adapter else CPU

    def allocate(self, num_bytes: int, *, adapter: bool, speak: Speak = silent) -> Segment:
        """Memory that was never handed out; blocks for its page faults on the host
        (about 0.3 s a GiB).

        Args:
            speak: Called often meanwhile.

        Raises:
            CapacityError: The accelerator has no room.
        """
        place = self.place(adapter=adapter)
        if place.type != "cpu":
            return DeviceSegment.allocate(num_bytes, place)
        return HostSegment.allocate(num_bytes, pinned=self.device.type == "cuda", speak=speak)

    def room_for(
        self, num_bytes: int, device: torch.device, bound_bytes: int, num_needed: int
    ) -> int:
        """How many buffers of that size the accelerator has room for beside those that a
        transfer needs anyhow; 0 on the host.

        Left alone are what the engine needs as it runs, and what the largest of its
        layers takes while it is made anew.

        Args:
            bound_bytes: What all of a transfer's buffers may take, if it needs no more.
            num_needed: Buffers that it needs anyhow.
        """
        if device.type != "cuda":
            return 0
        free_bytes, _ = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = (free_bytes + own - MARGIN_BYTES) // num_bytes - num_needed - _SPARE_BUFFERS
        return max(0, min(room, bound_bytes // num_bytes - num_needed))

    def device_of(self, backend: str) -> torch.device:
        """Where a side group of this backend receives."""
        return self.device if backend in (NCCL, ONE_SIDED) else CPU


def stage_on_device(
    staging: Staging, device: torch.device, model_bytes: int, free_bytes: int
) -> bool:
    """Whether bases are staged on the engine's device.

    Args:
        model_bytes: Of one copy of the base.
        free_bytes: What the device has free once the engine has taken its part.
    """
    if device.type == "cpu" or staging in ("host", "in-place"):
        return False
    return staging == "device" or model_bytes + MARGIN_BYTES <= free_bytes
