"""Memory of the host that is copied to and from a GPU."""

from __future__ import annotations

import logging
from functools import cache

import torch

_log = logging.getLogger(__name__)


def host_buffer(num_bytes: int, *, locked: bool) -> torch.Tensor:
    """Return host memory, uint8, not zeroed.

    Args:
        locked: Lock its pages: a GPU copies to and from them at the speed of the bus, and while
            this process goes on. torch rounds it up to a power of two, and keeps it for the next
            that asks. Where the system locks no more, it is plain memory: copies are then slower.
    """
    if locked:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # CUDA's own: of memory, or of a driver that cannot
            _warn_once(str(error).partition("\n")[0])
    return torch.empty(num_bytes, dtype=torch.uint8)


@cache
def _warn_once(reason: str) -> None:
    _log.warning(
        "host memory for weights cannot be locked, so copies to and from the GPU are slower: %s",
        reason,
    )
