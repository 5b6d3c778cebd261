"""Exchange of every rank's bytes with all, on the GPUs of one host.

Each rank puts its bytes into memory that the others have mapped, and they copy them from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch

from trainer_side.ranks.ranks import Ranks
from weft_rl.contract.errors import CapacityError
from weft_rl.ipc.connection import PeerError
from weft_rl.transport.one_sided.memory import (
    DeviceMapping,
    allocate_block,
    export_of,
    record_event,
    synchronize,
)
from weft_rl.transport.one_sided.messages import MESSAGES, ExportDevice, OneSidedError

_log = logging.getLogger(__name__)

# Said in an offer's place by a rank that can make none.
_OFFER, _NO_OFFER = MESSAGES.encode(ExportDevice(0, 0, b"", b""))
_CANNOT = 1


class ExchangeMemory:
    """Memory for exchanges, mapped once and used again by every push.

    Args:
        link: Ranks, which agree and exchange their offers over the host.
    """

    def __init__(self, link: Ranks) -> None:
        self._link = link
        self._room = [0] * link.size
        self._own: torch.Tensor | None = None
        self._mappings: dict[int, DeviceMapping] = {}

    def bring(
        self, sizes: Sequence[int], fill: Callable[[torch.Tensor], None], device: torch.device
    ) -> list[torch.Tensor] | None:
        """See ``Ranks.bring``; return None, on every rank, if one cannot map another's memory."""
        own, can = self._link.rank, True
        if any(size > room for size, room in zip(sizes, self._room, strict=True)):
            can = self._make_room(sizes, device)
        if can and sizes[own]:
            assert self._own is not None
            fill(self._own[: sizes[own]])
            synchronize(device)
        # From here on all have filled theirs; nobody fills it again before all have come to the
        # next agreement, which is after their copies.
        if self._link.agree(flags=0 if can else _CANNOT):
            self.close()
            return None
        messages = []
        for rank, size in enumerate(sizes):
            if rank == own and self._own is not None:
                messages.append(self._own[:size])
                continue
            messages.append(torch.empty(size, dtype=torch.uint8, device=device))
            if size:
                self._mappings[rank].copy(0, messages[-1], lambda: None, record_event(device))
        return messages

    def close(self) -> None:
        """Unmap the others' memory, and free this rank's."""
        for mapping in self._mappings.values():
            with contextlib.suppress(OneSidedError):
                mapping.close()
        self._mappings, self._own, self._room = {}, None, [0] * self._link.size

    def _make_room(self, sizes: Sequence[int], device: torch.device) -> bool:
        """Allocate and map memory anew; return whether this rank could."""
        former = self._own  # freed once nobody has it mapped any more
        self.close()
        offer = _NO_OFFER
        try:
            if not is_gpu(device):
                raise OneSidedError(f"what it has lies on {device}")
            if sizes[self._link.rank]:
                self._own = allocate_block(sizes[self._link.rank], device)
                synchronize(device)
                _, offer = MESSAGES.encode(export_of(self._own)[0].offer()[0])
        except (OneSidedError, CapacityError, OSError) as error:
            _log.info("this rank can map no memory to others: %s", error)
        offers = [torch.zeros(len(offer), dtype=torch.uint8) for _ in range(self._link.size)]
        offers[self._link.rank] = torch.frombuffer(bytearray(offer), dtype=torch.uint8)
        self._link.exchange(offers)
        del former
        self._room = list(sizes)
        if (sizes[self._link.rank] and offer == _NO_OFFER) or not is_gpu(device):
            return False
        try:
            for rank, (size, each) in enumerate(zip(sizes, offers, strict=True)):
                if rank != self._link.rank and size:
                    self._mappings[rank] = DeviceMapping(_export(each, f"rank {rank}"), device)
        except PeerError as error:
            _log.info("this rank cannot map another's memory: %s", error)
            return False
        return True


def _export(offer: torch.Tensor, peer: str) -> ExportDevice:
    export = MESSAGES.decode(_OFFER, bytes(offer.numpy()), peer=peer)
    if not isinstance(export, ExportDevice) or not export.num_bytes:
        raise OneSidedError(f"{peer} offers none")
    return export


def is_gpu(device: torch.device) -> bool:
    """Return whether CUDA's IPC can map the device's memory."""
    return device.type == "cuda"
