"""Copies on a GPU that are digested in the same reading.

Two processes that share a GPU take turns on it, and each has the whole of its memory's bandwidth
in its turn: what reads memory once less there is faster by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from weft_rl.transport.digests import kernel
from weft_rl.transport.digests.wsum64 import Digests, Part


class Place(NamedTuple):
    """Place that bytes of a tensor are copied to, or lie at; in bytes."""

    at: int
    """Position of the tensor's first byte, were it there."""
    begin: int
    """First byte of the tensor that is there."""
    end: int
    """Byte of the tensor behind the last that is there."""


def copied_words(parts: Sequence[Part], places: Sequence[Place]) -> tuple[kernel.Words, ...] | None:
    """Return the words that ``copy_words`` is to copy; None where it cannot, for it copies whole
    words that follow one another.

    Args:
        parts: Parts of a payload.
        places: Place of each part.
    """
    if any(part.row_bytes for part in parts) or _is_odd(places):
        return None
    return tuple(
        [
            kernel.Words(*[n // 8 for n in (*part[:3], *place)])
            for part, place in zip(parts, places, strict=True)
        ]
    )


def copy_words(
    payload: torch.Tensor, words: tuple[kernel.Words, ...] | None, target: torch.Tensor
) -> Digests | None:
    """Copy parts to their places and begin to digest them in the same reading, as
    ``start_digests``. Return None, with nothing done, where that is not possible.

    Args:
        words: Result of ``copied_words``.
        target: uint8, 1-D, contiguous.
    """
    if words is None or target.device != payload.device or not _has_kernel(payload.device):
        return None
    return _digests(payload, words, target)


def pack_tensors(
    tensors: Sequence[torch.Tensor], places: Sequence[Place], payload: torch.Tensor
) -> Digests | None:
    """Copy tensors, or runs of tensors, into a payload, and begin to digest each in the same
    reading, at its place in its tensor. Return None, with nothing done, where that is not possible.

    Does not block: it runs on the calling thread's current stream. The zeros that fill up the last
    block of a part add nothing to its digest, and are for the caller to write.

    Args:
        tensors: Tensors as they travel, by reference; contiguous.
        places: Place of each in the payload.
        payload: uint8, 1-D, contiguous.
    """
    device = payload.device
    if any(t.device != device or not t.is_contiguous() for t in tensors) or not _has_kernel(device):
        return None
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    words = _packed_words(addresses, tuple(places), payload.data_ptr())
    return None if words is None else _digests(payload, words, payload)


# The next push packs what lies where it lay.
@lru_cache(maxsize=128)
def _packed_words(
    addresses: tuple[int, ...], places: tuple[Place, ...], base: int
) -> tuple[kernel.Words, ...] | None:
    """Return the words to copy of tensors at these addresses, as ``copied_words``. They count from
    a payload's first word on, for all of a GPU's memory has one address space."""
    if any(address % 8 for address in addresses) or _is_odd(places):
        return None
    return tuple(
        [
            kernel.Words(
                (address - base) // 8, (end - begin) // 8, begin // 8,
                at // 8, begin // 8, end // 8,
            )
            for address, (at, begin, end) in zip(addresses, places, strict=True)
        ]
    )  # fmt: skip


def _has_kernel(device: torch.device) -> bool:
    return device.type != "cpu" and kernel.works(device)


def _is_odd(places: Sequence[Place]) -> bool:
    return any((at | begin | end) % 8 for at, begin, end in places)


def _digests(
    payload: torch.Tensor, words: tuple[kernel.Words, ...], target: torch.Tensor
) -> Digests:
    own = target[: target.numel() // 8 * 8].view(torch.int64)
    found = kernel.sums(payload[: payload.numel() // 8 * 8].view(torch.int64), words, own)
    return Digests([0] * len(words), range(len(words)), found)
