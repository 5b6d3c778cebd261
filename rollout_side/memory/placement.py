"""Placement of versions' bytes in a worker: on the host, or beside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rollout_side.config import Staging
from rollout_side.memory.segment import DeviceSegment, HostSegment, Segment
from weft_rl.contract.capabilities import NCCL, ONE_SIDED
from weft_rl.contract.errors import CapacityError
from weft_rl.transport.group import CPU
from weft_rl.transport.progress import Speak, silent

#: Left to the engine as it runs: activations, NCCL's buffers.
MARGIN_BYTES = 2 * 2**30
# Twice the largest bucket: a layer's tensors and what it becomes.
_SPARE_BUFFERS = 2
_GIB = 2**30


@dataclass
class Memory:
    """Allocator of segments, one per worker.

    While the engine sleeps, the memory that it gave back is not Weft's to take. It belongs to
    another process, and what the weights need to wake must be free when a base is to be loaded.

    Args:
        device: Device of the engine, on which NCCL receives.
        base_on_device: Whether bases are staged there. Adapters never are: their store is host
            memory, which the engine loads from again after it evicted one.
        in_place: Whether bases that come over a side group are not staged at all, but loaded from
            the few buffers that they are received in.
    """

    device: torch.device = CPU
    base_on_device: bool = False
    in_place: bool = False
    sleeping_bytes: int | None = field(default=None, init=False)
    """Accelerator bytes that the engine's sleeping weights need to wake: 0 once they are awake,
    None once the engine is."""

    @property
    def is_asleep(self) -> bool:
        """True if the engine has given memory back, and not all of it is there again."""
        return self.sleeping_bytes is not None

    def fall_asleep(self, weights_bytes: int) -> None:
        """Note that the engine is about to give its memory back, ``weights_bytes`` of it
        weights."""
        self.sleeping_bytes = weights_bytes

    def wake_weights(self) -> None:
        """Note that the weights are there again, but not the KV cache; does nothing if awake."""
        if self.is_asleep:
            self.sleeping_bytes = 0

    def wake_up(self) -> None:
        """Note that all of the engine's memory is there again."""
        self.sleeping_bytes = None

    def keeps_free(self, segment: Segment) -> bool:
        """Return whether to keep a segment that nothing needs any more, for reuse."""
        return not self.is_asleep or segment.data.device.type == "cpu"

    def give_back(self) -> None:
        """Give torch's cached accelerator memory back to the system, if the engine sleeps."""
        if self.is_asleep and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def place(self, *, adapter: bool) -> torch.device:
        """Return the device that a version's bytes are put on."""
        return self.device if self.base_on_device and not adapter else CPU

    def allocate(self, num_bytes: int, *, adapter: bool, speak: Speak = silent) -> Segment:
        """Allocate memory that was never handed out. Blocks for its page faults on the host (about
        0.3 s a GiB).

        Args:
            speak: Called often meanwhile.

        Raises:
            CapacityError: The accelerator has no room, or none beside weights that sleep.
        """
        place = self.place(adapter=adapter)
        if place.type != "cpu":
            self._check_beside_sleeping(num_bytes, place)
            return DeviceSegment.allocate(num_bytes, place)
        return HostSegment.allocate(num_bytes, pinned=self.device.type == "cuda", speak=speak)

    def room_for(
        self, num_bytes: int, device: torch.device, bound_bytes: int, num_needed: int
    ) -> int:
        """Return how many buffers of that size fit beside those that a transfer needs; 0 on the
        host.

        Leaves free what the engine needs as it runs, and what its largest layer takes while it is
        loaded. 0 while the engine sleeps: it generates nothing whose pause more buffers could
        delay.

        Args:
            bound_bytes: Bound of all of a transfer's buffers, if it needs no more.
            num_needed: Buffers that the transfer needs anyhow.

        Raises:
            CapacityError: Not even the needed buffers fit beside weights that sleep.
        """
        if device.type != "cuda":
            return 0
        self._check_beside_sleeping(num_needed * num_bytes, device)
        if self.is_asleep:
            return 0
        free_bytes, _ = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = (free_bytes + own - MARGIN_BYTES) // num_bytes - num_needed - _SPARE_BUFFERS
        return max(0, min(room, bound_bytes // num_bytes - num_needed))

    def _check_beside_sleeping(self, num_bytes: int, device: torch.device) -> None:
        """Refuse to take memory that the engine's weights need to wake: they would be lost."""
        if not self.sleeping_bytes:
            return
        self.give_back()  # vLLM's allocator cannot use what torch keeps
        free_bytes, _ = torch.cuda.mem_get_info(device)
        if free_bytes < self.sleeping_bytes + num_bytes:
            raise CapacityError(
                f"{device} has {free_bytes / _GIB:.1f} GiB free: no room for the "
                f"{self.sleeping_bytes / _GIB:.1f} GiB of weights that sleep and "
                f"{num_bytes / _GIB:.1f} GiB to receive the push in; free some (the trainer on "
                "this GPU, say), or wake the replica before"
            )

    def device_of(self, backend: str) -> torch.device:
        """Return the device on which a side group of this backend receives."""
        return self.device if backend in (NCCL, ONE_SIDED) else CPU


def stage_on_device(
    staging: Staging, device: torch.device, model_bytes: int, free_bytes: int
) -> bool:
    """Return whether bases are staged on the engine's device.

    Args:
        model_bytes: Bytes of one copy of the base.
        free_bytes: Bytes that the device has free once the engine has taken its part.
    """
    if device.type == "cpu" or staging in ("host", "in-place"):
        return False
    return staging == "device" or model_bytes + MARGIN_BYTES <= free_bytes
