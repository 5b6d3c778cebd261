"""Fetching of a little of a GPU's memory to the host, while the GPU goes on."""

from __future__ import annotations

from functools import lru_cache

import torch


class HostCopy:
    """A tensor on its way to the host; there at once where it lies there already.

    The host's memory is locked: into other memory a copy blocks the thread that asks for it until
    the GPU has come to it.

    Args:
        tensor: Not written to before it is there.
        arrived: True if its content is there already, whatever the calling thread's current
            stream was given before: then nothing of that is waited for.
    """

    def __init__(self, tensor: torch.Tensor, *, arrived: bool = False) -> None:
        self._tensor, self._event = tensor, None
        if not tensor.is_cuda:
            return
        stream = _aside(tensor.device) if arrived else torch.cuda.current_stream(tensor.device)
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            self._tensor.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> torch.Tensor:
        """Block until the tensor is on the host, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


@lru_cache(maxsize=16)
def _aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
