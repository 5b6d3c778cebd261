"""Changed elements of a wire bucket: coded, and applied, by what is fastest where they lie.

Source: docs/protocol.md, A bucket of changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from weft_rl.contract.manifest import Run, align_up
from weft_rl.interrupts import report_while
from weft_rl.transport.wire import change_coding, change_kernels, host_changes
from weft_rl.transport.wire.change_coding import (
    DecodedRun,
    EncodedChanges,
    RunPlace,
    decode_changes,
    grouped,
    join_changes,
    join_encoded,
    joined_bytes,
    packed_places,
    run_elements,
    run_sum,
)

__all__ = [
    "DecodedRun",
    "EncodedChanges",
    "RunPlace",
    "apply_changes",
    "are_comparable",
    "decode_changes",
    "encode_changes",
    "encode_over",
    "grouped",
    "has_host_coder",
    "has_kernels",
    "join_changes",
    "join_encoded",
    "joined_bytes",
    "packed_places",
    "run_elements",
    "run_sum",
    "start_applying",
    "start_encoding",
    "start_encoding_several",
    "warm",
]

#: Memory that a GPU codes a bucket in is this part of the bucket: of 5 % of changes.
_USUAL_SHARE = 16


_compiling = threading.Lock()


@cache
def warm(device: torch.device) -> threading.Thread:
    """Compile what codes the changes of tensors on a device, before a push waits for it; return the
    thread that does, at once. Done once a process."""
    works = has_kernels if device.type == "cuda" else has_host_coder
    own = torch.empty(0, device=device).device  # its number, which tensors there have
    # The process's end waits for it: a thread that is ended inside of a compiler ends all by
    # SIGABRT.
    compiling = threading.Thread(target=works, args=(own,), name="weft-warm-changes", daemon=False)
    compiling.start()
    return compiling


def await_warm(device: torch.device, on_progress: Callable[[], None]) -> None:
    """Block until ``warm`` has compiled: it may take longer than a member may be silent.

    Args:
        on_progress: See ``report_while``.
    """
    if (compiling := warm(device)).is_alive():
        report_while(compiling.join, on_progress)


def has_kernels(device: torch.device) -> bool:
    """Return whether a device is a GPU that runs our kernels. Blocks for seconds the first time,
    while they are compiled."""
    if device.type != "cuda":
        return False
    with _compiling:
        return change_kernels.works(device)


def has_host_coder(device: torch.device) -> bool:
    """Return whether a device is the host's processor, and the coder in C works there. Blocks for
    half a second the first time, while that is compiled."""
    return device.type == "cpu" and host_changes.works()


def encode_changes(
    old: torch.Tensor,
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
) -> EncodedChanges:
    """Compare two versions of a bucket, and code what differs; as ``start_encoding``, but blocks
    until it is done."""
    return start_encoding(old, new, runs, itemsizes)()


def encode_over(old: torch.Tensor, new: torch.Tensor, run: Run, itemsize: int) -> EncodedChanges:
    """Compare two versions of one run, code what differs, and write the new one over the old one:
    one reading, on a host that ``has_host_coder``; blocks.

    Args:
        old: Payload of the run, uint8. Written.
        new: Its elements, 1-D, contiguous; not written to.
    """
    return host_changes.encode(old, [new], [run], [itemsize], overwrites=True)


def start_encoding(
    old: torch.Tensor,
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
) -> Callable[[], EncodedChanges]:
    """Begin to compare two versions of a bucket, and to code what differs; return a function that
    blocks until that is done. One reading of both: here on the host, meanwhile on a GPU, on the
    calling thread's current stream.

    Args:
        old: Payload of all elements of these runs: uint8, 1-D, contiguous.
        new: The same, on the same device; or the elements of each run where they lie
            (``are_comparable``). Not written to before the returned function has ended.
        runs: Runs that lie in them.
        itemsizes: Bytes of an element of each run.
    """
    if has_host_coder(old.device):
        coded = host_changes.encode(old, new, runs, itemsizes)
        return lambda: coded
    if has_kernels(old.device):
        return _start_on_gpu(old, new, tuple(runs), tuple(itemsizes))
    assert isinstance(new, torch.Tensor), "it is packed where it is not compared in place"
    made = change_coding.encode_changes(old, new, runs, itemsizes)
    return lambda: made


def _start_on_gpu(
    old: torch.Tensor,
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
) -> Callable[[], EncodedChanges]:
    """Begin to code with kernels, in memory for a delta of the usual size; again where it is
    larger."""
    room = _usual_room(old.numel(), runs)
    out = torch.empty(room, dtype=torch.uint8, device=old.device)
    begun = change_kernels.start_encode(old, new, runs, itemsizes, out)

    def end() -> EncodedChanges:
        coded, payload = begun(), out
        if coded.num_bytes > room:
            payload = torch.empty(coded.num_bytes, dtype=torch.uint8, device=old.device)
            coded = change_kernels.encode(old, new, runs, itemsizes, payload)
        return _encoded(coded, payload)

    return end


def start_encoding_several(
    olds: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
) -> Callable[[], EncodedChanges | None]:
    """Begin to compare two versions of several wire buckets at once, as ``start_encoding`` does
    each, on a GPU that ``has_kernels``. To begin with a bucket may take longer than to compare it.

    Args:
        olds: Payload of each.
        new: Elements of each run where they lie.
        runs, itemsizes: Runs of all buckets.

    Returns:
        Function that returns their changes, or None where they are so many that each bucket is to
        be coded by itself.
    """
    room = _usual_room(sum(old.numel() for old in olds), runs)
    out = torch.empty(room, dtype=torch.uint8, device=olds[0].device)
    begun = change_kernels.start_encode(olds, new, tuple(runs), tuple(itemsizes), out)

    def end() -> EncodedChanges | None:
        coded = begun()
        if coded.num_bytes > room:
            return None
        return _encoded(coded, out)._replace(num_buckets=len(olds))

    return end


def _usual_room(payload_bytes: int, runs: Sequence[Run]) -> int:
    """Return the bytes that changes of buckets usually take."""
    return align_up(payload_bytes // _USUAL_SHARE + change_coding.head_bytes(runs))


def _encoded(coded: change_kernels.CodedChanges, out: torch.Tensor) -> EncodedChanges:
    """Return what was coded into memory, in memory of its own size."""
    payload = out[: coded.num_bytes].clone()
    return EncodedChanges(
        payload, coded.num_changes, coded.sums, coded.head_bytes, coded.used_bytes
    )


def are_comparable(
    old: torch.Tensor,
    new: Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
) -> bool:
    """Return whether elements of runs need not be packed to be compared with a payload of them."""
    if any(own.device != old.device or not own.is_contiguous() for own in new):
        return False
    if has_kernels(old.device):
        return change_kernels.are_aligned(old, new, runs, itemsizes)
    return has_host_coder(old.device)


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
    return start_applying(payload, runs, itemsizes, data, places)()


def start_applying(
    payload: torch.Tensor,
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    data: torch.Tensor,
    places: Sequence[RunPlace],
    num_bytes: int | None = None,
) -> Callable[[], list[int]]:
    """Begin to do what ``apply_changes`` does; return a function that does the rest. Nothing is
    written before. A GPU reads meanwhile, on the calling thread's current stream.

    Args:
        num_bytes: See ``change_kernels.decode``; None without kernels.
    """
    if not has_kernels(data.device):
        apply = change_coding.apply_changes
        apply = host_changes.apply if has_host_coder(data.device) else apply
        return partial(apply, payload, runs, itemsizes, data, places)
    decoded = change_kernels.decode(
        payload, tuple(runs), tuple(itemsizes), data, tuple(places), num_bytes
    )

    def end() -> list[int]:
        decoded.check()
        decoded.apply()
        return decoded.sums()

    return end
