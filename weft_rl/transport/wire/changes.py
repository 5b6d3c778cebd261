"""Changed elements of a wire bucket: coded, and applied, by what is fastest where they lie.

Source: docs/protocol.md, A bucket of changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft_rl.contract.manifest import Run
from weft_rl.transport.wire import change_coding, host_changes
from weft_rl.transport.wire.change_coding import (
    DecodedRun,
    EncodedChanges,
    RunPlace,
    decode_changes,
    packed_places,
    run_sum,
)

__all__ = [
    "DecodedRun",
    "EncodedChanges",
    "RunPlace",
    "apply_changes",
    "decode_changes",
    "encode_changes",
    "packed_places",
    "run_sum",
    "warm",
]


def warm() -> None:
    """Make ready what changes are coded by, before a push waits for it; returns at once."""
    host_changes.warm()


def encode_changes(
    old: torch.Tensor, new: torch.Tensor, runs: Sequence[Run], itemsizes: Sequence[int]
) -> EncodedChanges:
    """Compare two versions of a bucket, and code what differs. Blocks for one reading of both.

    Args:
        old, new: Payloads of all elements of these runs: uint8, 1-D, contiguous, on one device.
        runs: Runs that lie in them.
        itemsizes: Bytes of an element of each run.
    """
    if old.device.type == "cpu" and host_changes.works():
        return host_changes.encode(old, new, runs, itemsizes)
    return change_coding.encode_changes(old, new, runs, itemsizes)


def apply_changes(
    payload: torch.Tensor,
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    data: torch.Tensor,
    places: Sequence[RunPlace],
) -> None:
    """Overwrite elements with their new values, once all old ones were found to be there. Blocks.

    Args:
        payload: Coded changes, on the device of ``data``.
        data: uint8, 1-D, contiguous: memory that holds the old elements. Written.
        places: Place of each run there.

    Raises:
        DigestMismatchError: The payload is malformed, or other elements are there than were
            changed; nothing was written.
    """
    if data.device.type == "cpu" and host_changes.works():
        host_changes.apply(payload, runs, itemsizes, data, places)
    else:
        change_coding.apply_changes(payload, runs, itemsizes, data, places)
