"""Copies that are digested in the same reading, on a GPU and on the host.

Two processes that share a GPU take turns on it, and each has the whole of its memory's bandwidth
in its turn: what reads memory once less there is faster by as much. On the host a copy is digested
piece by piece, while each piece is in the core's cache: memory is read once and written once, where
copying all and then digesting reads it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from weft_rl.interrupts import side_by_side
from weft_rl.transport.digests import kernel, wsum64
from weft_rl.transport.digests.wsum64 import Digests, Part, filled_digest, part_digests

#: A part of so many bytes or more is copied in pieces on the host; smaller ones are copied
#: together, up to as many.
PIECE_BYTES = 2**19


class PlacedRange(NamedTuple):
    """Place of a tensor's bytes in a payload or a target; in bytes."""

    at: int
    """Position of the tensor's first byte, were it there."""
    begin: int
    """First byte of the tensor that is there."""
    end: int
    """Byte of the tensor behind the last that is there."""


def copied_words(
    parts: Sequence[Part], places: Sequence[PlacedRange]
) -> tuple[kernel.CopiedWords, ...] | None:
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
            kernel.CopiedWords(*[n // 8 for n in (*part[:3], *place)])
            for part, place in zip(parts, places, strict=True)
        ]
    )


def copy_words(
    payload: torch.Tensor, words: tuple[kernel.CopiedWords, ...] | None, target: torch.Tensor
) -> Digests | None:
    """Copy parts to their places and begin to digest them in the same reading, as
    ``start_digests``. Return None, with nothing done, where that is not possible.

    Args:
        words: Result of ``copied_words``.
        target: uint8, 1-D, contiguous.
    """
    if words is None or target.device != payload.device or not wsum64.has_kernels(payload.device):
        return None
    return _digests(payload, words, target)


def pack_tensors(
    tensors: Sequence[torch.Tensor], places: Sequence[PlacedRange], payload: torch.Tensor
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
    if not all(t.device == device and t.is_contiguous() for t in tensors):
        return None
    if not wsum64.has_kernels(device):
        return None
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    words = _packed_words(addresses, tuple(places), payload.data_ptr())
    return None if words is None else _digests(payload, words, payload)


# The next push packs what lies where it lay.
@lru_cache(maxsize=128)
def _packed_words(
    addresses: tuple[int, ...], places: tuple[PlacedRange, ...], base: int
) -> tuple[kernel.CopiedWords, ...] | None:
    """Return the words to copy of tensors at these addresses, as ``copied_words``. They count from
    a payload's first word on, for all of a GPU's memory has one address space."""
    if any(address % 8 for address in addresses) or _is_odd(places):
        return None
    return tuple(
        [
            kernel.CopiedWords(
                (address - base) // 8, (end - begin) // 8, begin // 8,
                at // 8, begin // 8, end // 8,
            )
            for address, (at, begin, end) in zip(addresses, places, strict=True)
        ]
    )  # fmt: skip


def _is_odd(places: Sequence[PlacedRange]) -> bool:
    return any((at | begin | end) % 8 for at, begin, end in places)


def _digests(
    payload: torch.Tensor, words: tuple[kernel.CopiedWords, ...], target: torch.Tensor
) -> Digests:
    own = target[: target.numel() // 8 * 8].view(torch.int64)
    found = kernel.sums(payload[: payload.numel() // 8 * 8].view(torch.int64), words, own)
    return Digests(found)


# -- on the host ---------------------------------------------------------------------------------


def copy_digesting(
    payload: torch.Tensor, parts: Sequence[Part], target: torch.Tensor, num_threads: int = 1
) -> list[int]:
    """Copy a payload, and digest each part of the copy at its place in its tensor.

    Args:
        payload: uint8, 1-D, contiguous; read once, so that whoever may still write to it changes
            the copy and its digest alike.
        parts: Ascending; contiguous ones, which cover the payload.
        target: Memory of the same size and alignment.
        num_threads: Threads that share the work: one copies a few GB a second.
    """
    pieces = -(-payload.numel() // PIECE_BYTES)
    edges = [pieces * nth // num_threads * PIECE_BYTES for nth in range(num_threads)]
    spans = [*pairwise([*edges, payload.numel()])]
    shares = [_within(parts, *span) for span in spans]
    found = side_by_side(
        [
            partial(_copy_digesting, payload[begin:end], [*own.values()], target[begin:end])
            for (begin, end), own in zip(spans, shares, strict=True)
        ]
    )
    digests = [0] * len(parts)
    for own, sums in zip(shares, found, strict=True):
        for index, digest in zip(own, sums, strict=True):
            digests[index] = (digests[index] + digest) % 2**64
    return digests


def _within(parts: Sequence[Part], begin: int, end: int) -> dict[int, Part]:
    """Return what lies in some bytes of a payload, from their beginning, by the part's index."""
    found = {}
    for index, (at, num_bytes, first_byte, *_) in enumerate(parts):
        first, last = max(begin, at), min(end, at + num_bytes)
        if first < last:
            found[index] = Part(first - begin, last - first, first_byte + first - at)
    return found


def _copy_digesting(
    payload: torch.Tensor, parts: Sequence[Part], target: torch.Tensor
) -> list[int]:
    source, copy, size = payload.numpy(), target.numpy(), payload.numel()
    copied = 0

    def up_to(at: int, begin: int, end: int) -> None:
        nonlocal copied
        if copied < at + end:
            end = min(max(at + end, copied + PIECE_BYTES), size)
            np.copyto(copy[copied:end], source[copied:end])
            copied = end

    return [
        filled_digest(target[at : at + num_bytes], first_byte, partial(up_to, at))
        for at, num_bytes, first_byte, *_ in parts
    ]


def pack_digesting(
    tensors: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
    payload: torch.Tensor,
    parts: Sequence[Part],
) -> list[int] | None:
    """Copy tensors, or runs of tensors, into a payload, and digest each part of it at its place in
    its tensor. Return None, with nothing done, where not all are contiguous on the host.

    Args:
        tensors: Tensors as they travel, by reference.
        views: Views of the payload that the tensors are copied to.
        payload: uint8, 1-D, contiguous; what lies in its parts beside the views is there already.
        parts: Part of each tensor, a contiguous one.
    """
    if not all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
        return None
    digests: list[int] = []
    small, waiting = 0, 0  # the first that is not copied yet, and the bytes from there on
    with torch.no_grad():
        for nth, part in enumerate(parts):
            is_large = part.num_bytes >= PIECE_BYTES
            if is_large or waiting + part.num_bytes > PIECE_BYTES:
                digests += _together(tensors, views, payload, parts, slice(small, nth))
                small, waiting = nth, 0
            if is_large:
                digests.append(_in_pieces(tensors[nth], views[nth], payload, part))
                small = nth + 1
            else:
                waiting += part.num_bytes
        return digests + _together(tensors, views, payload, parts, slice(small, len(parts)))


def _together(
    tensors: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
    payload: torch.Tensor,
    parts: Sequence[Part],
    some: slice,
) -> list[int]:
    if some.start == some.stop:
        return []
    torch._foreach_copy_(list(views[some]), list(tensors[some]))
    return part_digests(payload, parts[some])


def _in_pieces(tensor: torch.Tensor, view: torch.Tensor, payload: torch.Tensor, part: Part) -> int:
    own = payload[part.at : part.at + part.num_bytes]
    # The first block may begin before the tensor does.
    skipped = view.data_ptr() - own.data_ptr()
    source, copy = _bytes(tensor), _bytes(view)

    def fill(begin: int, end: int) -> None:
        wanted = slice(max(0, begin - skipped), max(0, end - skipped))
        np.copyto(copy[wanted], source[wanted])

    return filled_digest(own, part.first_byte, fill)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
