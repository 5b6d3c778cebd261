"""What is known of a bucket that has arrived, beside the buffer that it was received in."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Arrived(NamedTuple):
    """How a bucket has arrived; by default whole, in its buffer."""

    lent: torch.Tensor | None = None
    """Its bytes, in the sender's memory on this GPU, where they are to be read: they are not in the
    buffer. Until they are given back."""
    tail: bytes | None = None
    """Its last bytes, as many as were asked for; None where nobody has read them yet."""


IN_ITS_BUFFER = Arrived()
