"""Options of a bucket's travel and the way of its arrival, beside the buffers at its two ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class BucketOptions(NamedTuple):
    """Options of sending or receiving a bucket; by default whole, from buffer to buffer."""

    borrows: bool = False
    """True if the bytes of a receive may stay in the sender's memory, to be read there."""
    tail_bytes: int = 0
    """Number of last bytes that are sent from the host, and wanted there."""
    tail: bytes = b""
    """Beginning of these last bytes in a send; they are not in the buffer yet. Whoever knows them
    has waited for all before them, as the digest in them asks for. So a backend that carries them
    beside the buffer waits for nothing more."""
    on_kept: Callable[[], None] | None = None
    """Callback of a send, on any thread, once every receiver has said that it keeps the bucket,
    where a backend carries that (``Operation.is_kept``)."""


WHOLE = BucketOptions()


class ArrivedBucket(NamedTuple):
    """Way in which a bucket has arrived; by default whole, in its buffer."""

    lent: torch.Tensor | None = None
    """Its bytes in the sender's memory, to be read there until they are given back; they are not in
    the buffer. Without its tail, where that came beside them."""
    tail: bytes | None = None
    """Its last bytes that were asked for, or those of them that were sent; None where they are in
    the buffer, unread."""


IN_ITS_BUFFER = ArrivedBucket()


def write_tail(buffer: torch.Tensor, options: BucketOptions) -> None:
    """Write the beginning of a buffer's last bytes; on a GPU the thread waits for its turn
    there."""
    if tail := options.tail:
        begin = buffer.numel() - options.tail_bytes
        buffer[begin : begin + len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
