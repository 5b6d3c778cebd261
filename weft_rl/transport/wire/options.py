"""How a bucket is to travel, and how it has arrived, beside the buffers at its two ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class BucketOptions(NamedTuple):
    """How a bucket is sent or received; by default whole, from buffer to buffer."""

    borrows: bool = False
    """Of a receive: whether the bytes may stay in the sender's memory, to be read there."""
    tail_bytes: int = 0
    """How many of the last bytes are sent from the host, and wanted there."""
    tail: bytes = b""
    """Of a send: how these begin; they are not in the buffer yet. Whoever knows them has waited for
    all before them, as the digest in them asks for: a backend that carries them beside the buffer
    waits for nothing more."""
    on_kept: Callable[[], None] | None = None
    """Of a send: called, by whichever thread, once every receiver has said that it keeps the
    bucket, where a backend carries that (``Operation.is_kept``)."""


WHOLE = BucketOptions()


class Arrived(NamedTuple):
    """How a bucket has arrived; by default whole, in its buffer."""

    lent: torch.Tensor | None = None
    """Its bytes, in the sender's memory, where they are to be read: they are not in the buffer.
    Until they are given back. Without its tail, where that came beside them."""
    tail: bytes | None = None
    """Its last bytes, those that were asked for, or what was sent of them; None where they are in
    the buffer, unread."""


IN_ITS_BUFFER = Arrived()


def write_tail(buffer: torch.Tensor, options: BucketOptions) -> None:
    """Write how the last bytes of a buffer begin; on a GPU the thread waits for its turn there."""
    if tail := options.tail:
        begin = buffer.numel() - options.tail_bytes
        buffer[begin : begin + len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
