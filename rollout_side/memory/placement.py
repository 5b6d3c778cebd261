"""Where a worker puts the bytes of versions, on the host or beside the engine; and the bounds
of that memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rollout_side.config import Staging
from rollout_side.memory.segment import DeviceSegment, HostSegment, Segment
from weft.contract.capabilities import NCCL, ONE_SIDED
from weft.contract.errors import CapacityError
from weft.contract.names import PolicyVersion
from weft.transport.group import CPU, Speak, silent

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


@dataclass
class Usage:
    """Bytes a worker holds for Weft; on the host, but for bases staged on a device."""

    adapter_bytes: int = 0
    staging_bytes: int = 0
    """Staged or retained; retained copies give way to a push."""
    free_bytes: int = 0
    pinned_bytes: int = 0
    """Memory of the retained copies that no push may take."""
    transfer_ids: tuple[str, ...] = ()
    """Transfers of which bytes are staged, whole or in part, or loaded in place."""


def check_adapter_room(
    num_bytes: int, capacity: int, held: Mapping[PolicyVersion, int], waiting: int
) -> None:
    """Refuse an adapter that the store has no room for.

    Args:
        held: Bytes of each adapter that can be served.
        waiting: Bytes that wait for their commit.

    Raises:
        CapacityError: Says what holds the memory.
    """
    in_use = sum(held.values())
    if in_use + waiting + num_bytes > capacity:
        names = ", ".join(map(str, sorted(held)))
        raise CapacityError(
            f"the adapter store holds {in_use:,} of {capacity:,} bytes "
            f"({names or 'nothing'}) and {waiting:,} wait for their commit: no room for "
            f"{num_bytes:,} more; retire versions or start the replica with a larger "
            "--adapter-memory-gib"
        )


def check_base_room(
    num_bytes: int, capacity: int, in_use: int, pinned: Sequence[PolicyVersion]
) -> None:
    """Refuse a base that there is no room to stage.

    Args:
        in_use: Bytes that are staged or retained.
        pinned: Versions among them that no push may take.

    Raises:
        CapacityError: Says what holds the memory.
    """
    if in_use + num_bytes > capacity:
        names = ", ".join(sorted(map(str, pinned)))
        text = f", {names} pinned" if names else ""
        raise CapacityError(
            f"staging holds {in_use:,} of {capacity:,} bytes{text}: no room for {num_bytes:,} "
            "more; start the replica with a larger --staging-memory-gib"
        )


class Reservations:
    """What each transfer was promised, until it is staged or over.

    Args:
        lock: ``WorkerStore``'s, which guards them.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._ended = threading.Condition(lock)
        self._num_bytes: dict[str, int] = {}
        self._clones: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Memory that is promised to all."""
        return sum(self._num_bytes.values())

    @property
    def has_clones(self) -> bool:
        """Whether memory is promised to what another replica sends."""
        return bool(self._clones)

    def add(self, transfer_id: str, num_bytes: int, *, clone: bool) -> None:
        """Promise memory to a transfer."""
        self._num_bytes[transfer_id] = num_bytes
        if clone:
            self._clones.add(transfer_id)

    def end(self, *transfer_ids: str) -> None:
        """Promise transfers nothing any more; succeeds for those that were promised nothing."""
        for transfer_id in transfer_ids:
            self._num_bytes.pop(transfer_id, None)
            self._clones.discard(transfer_id)
        self._ended.notify_all()

    def wait_end(self, timeout_seconds: float) -> bool:
        """Let go of the lock until ``end`` was called; False if it was not in time."""
        return self._ended.wait(timeout_seconds)
