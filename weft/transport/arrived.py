"""What is known of a bucket that has arrived, beside the buffer that it was received in; and what
goes beside the buffer that it is sent from."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Arrived(NamedTuple):
    """How a bucket has arrived; by default whole, in its buffer."""

    lent: torch.Tensor | None = None
    """Its bytes, in the sender's memory, where they are to be read: they are not in the buffer.
    Until they are given back. Without its tail, where that came beside them."""
    tail: bytes | None = None
    """Its last bytes, those that were asked for, or what was sent of them; None where they are in
    the buffer, unread."""


IN_ITS_BUFFER = Arrived()


def write_tail(buffer: torch.Tensor, tail_bytes: int, tail: bytes) -> None:
    """Write how the last bytes of a buffer begin; on a GPU the thread waits for its turn there."""
    if tail:
        begin = buffer.numel() - tail_bytes
        buffer[begin : begin + len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
