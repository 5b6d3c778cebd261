"""Copies on the host that are digested in the same reading.

A copy is digested piece by piece, while each piece is still in the core's cache: memory is read
once and written once, where copying all and then digesting reads it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from weft_rl.transport.digests.wsum64 import Part, filled_digest, part_digests

#: Of so much, or more, a part is copied in pieces; what is smaller is copied together with its
#: neighbours, up to as much.
PIECE_BYTES = 2**19


def copy_digesting(payload: torch.Tensor, parts: Sequence[Part], target: torch.Tensor) -> list[int]:
    """Copy a payload, and digest each part of the copy at its place in its tensor.

    Args:
        payload: uint8, 1-D, contiguous; read once, so that whoever may still write to it changes
            the copy and its digest alike.
        parts: Ascending; contiguous ones, which cover the payload.
        target: Memory of the same size and alignment.
    """
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
