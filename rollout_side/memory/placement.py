"""Where a worker puts the bytes of versions: on the host, or beside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rollout_side.config import Staging
from rollout_side.memory.segment import DeviceSegment, HostSegment, Segment
from weft_rl.contract.capabilities import NCCL, ONE_SIDED
from weft_rl.contract.errors import CapacityError
from weft_rl.transport.group import CPU
from weft_rl.transport.speaking import Speak, silent

#: Left to the engine as it runs: activations, NCCL's buffers.
MARGIN_BYTES = 2 * 2**30
# Twice the largest bucket: a layer's tensors and what it becomes.
_SPARE_BUFFERS = 2
_GIB = 2**30


@dataclass
class Memory:
    """Makes segments; one a worker.

    While the engine sleeps, what it gave back is not Weft's to take: it is another process's,
    and what its weights need to wake must be free when a base is to be loaded.

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
    sleeping_bytes: int | None = field(default=None, init=False)
    """Set while the engine sleeps: what its weights take of the accelerator as they wake, 0 once
    they have."""

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has given memory back, of which all is not there again."""
        return self.sleeping_bytes is not None

    def fall_asleep(self, weights_bytes: int) -> None:
        """The engine is about to give its memory back, so much of it its weights'."""
        self.sleeping_bytes = weights_bytes

    def wake_weights(self) -> None:
        """The weights are there again, the KV cache is not; nothing changes awake."""
        if self.is_asleep:
            self.sleeping_bytes = 0

    def wake_up(self) -> None:
        """All of the engine's memory is there again."""
        self.sleeping_bytes = None

    def keeps_free(self, segment: Segment) -> bool:
        """Whether memory that nothing needs any more is kept, to be used again."""
        return not self.is_asleep or segment.data.device.type == "cpu"

    def give_back(self) -> None:
        """Where the engine sleeps, give the system what torch keeps of the accelerator."""
        if self.is_asleep and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def place(self, *, adapter: bool) -> torch.device:
        """Where a version's bytes are put."""
        return self.device if self.base_on_device and not adapter else CPU

    def allocate(self, num_bytes: int, *, adapter: bool, speak: Speak = silent) -> Segment:
        """Memory that was never handed out; blocks for its page faults on the host
        (about 0.3 s a GiB).

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
        """How many buffers of that size the accelerator has room for beside those that a
        transfer needs anyhow; 0 on the host.

        Left alone are what the engine needs as it runs, and what the largest of its
        layers takes while it is made anew. None while it sleeps: nothing is generated, that
        could be paused later.

        Args:
            bound_bytes: What all of a transfer's buffers may take, if it needs no more.
            num_needed: Buffers that it needs anyhow.

        Raises:
            CapacityError: Beside weights that sleep there is no room for those either.
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
        """Refuse to take what the engine's weights need to wake: they would be lost."""
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
