"""Changed elements of a wire bucket: coded, and applied, by what is fastest where they lie.

Source: docs/protocol.md, A bucket of changes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from weft_rl.contract.manifest import Run, align_up
from weft_rl.transport.wire import change_coding, change_kernels, host_changes
from weft_rl.transport.wire.change_coding import (
    DecodedRun,
    EncodedChanges,
    RunPlace,
    decode_changes,
    packed_places,
    run_elements,
    run_sum,
)

__all__ = [
    "DecodedRun",
    "EncodedChanges",
    "RunPlace",
    "apply_changes",
    "compares_in_place",
    "decode_changes",
    "encode_changes",
    "has_kernels",
    "packed_places",
    "run_elements",
    "run_sum",
    "warm",
]

#: Memory that a GPU codes a bucket in is this part of the bucket: of 5 % of changes.
_USUAL_SHARE = 16


_compiling = threading.Lock()


def warm(device: torch.device) -> None:
    """Compile what codes the changes of tensors on a device, before a push waits for it; returns at
    once."""
    works = has_kernels if device.type == "cuda" else _has_host_coder
    own = torch.empty(0, device=device).device  # its number, which tensors there have
    threading.Thread(target=works, args=(own,), name="weft-warm-changes", daemon=True).start()


def has_kernels(device: torch.device) -> bool:
    """Return whether a device is a GPU that runs our kernels. Blocks for seconds the first time,
    while they are compiled."""
    if device.type != "cuda":
        return False
    with _compiling:
        return change_kernels.works(device)


def _has_host_coder(device: torch.device) -> bool:
    return device.type == "cpu" and host_changes.works()


def encode_changes(
    old: torch.Tensor,
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
) -> EncodedChanges:
    """Compare two versions of a bucket, and code what differs. Blocks for one reading of both.

    Args:
        old: Payload of all elements of these runs: uint8, 1-D, contiguous.
        new: The same, on the same device; or the elements of each run where they lie, contiguous
            in the order of the run (``compares_in_place``).
        runs: Runs that lie in them.
        itemsizes: Bytes of an element of each run.
    """
    if compares_in_place(old.device):
        return host_changes.encode(old, new, runs, itemsizes)
    assert isinstance(new, torch.Tensor), "it is packed where it is not compared in place"
    if has_kernels(old.device):
        return _encode_on_gpu(old, new, tuple(runs), tuple(itemsizes))
    return change_coding.encode_changes(old, new, runs, itemsizes)


def _encode_on_gpu(
    old: torch.Tensor, new: torch.Tensor, runs: tuple[Run, ...], itemsizes: tuple[int, ...]
) -> EncodedChanges:
    """Code with kernels, in memory for a delta of the usual size; again where it is larger."""
    room = align_up(old.numel() // _USUAL_SHARE + 8 * len(runs))
    while True:
        out = torch.empty(room, dtype=torch.uint8, device=old.device)
        coded = change_kernels.encode(old, new, runs, itemsizes, out)
        if coded.num_bytes <= room:
            return EncodedChanges(out[: coded.num_bytes].clone(), *coded[1:])
        room = coded.num_bytes


def compares_in_place(device: torch.device) -> bool:
    """Return whether new elements on a device need not be packed to be compared."""
    return _has_host_coder(device)


def apply_changes(
    payload: torch.Tensor,
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    data: torch.Tensor,
    places: Sequence[RunPlace],
) -> list[int]:
    """Overwrite elements with their new values, once all old ones were found to be there. Blocks.

    Args:
        payload: Coded changes, on the device of ``data``.
        data: uint8, 1-D, contiguous: memory that holds the old elements. Written.
        places: Place of each run there.

    Returns:
        Number that the digest of each run changes by, modulo 2**64.

    Raises:
        DigestMismatchError: The payload is malformed, or other elements are there than were
            changed; nothing was written.
    """
    if _has_host_coder(data.device):
        return host_changes.apply(payload, runs, itemsizes, data, places)
    if has_kernels(data.device):
        decoded = change_kernels.decode(payload, tuple(runs), tuple(itemsizes), data, tuple(places))
        decoded.check()
        decoded.apply()
        return decoded.sums()
    return change_coding.apply_changes(payload, runs, itemsizes, data, places)
