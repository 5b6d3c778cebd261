"""Changes of a base's elements that are applied to a copy of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_side.memory.versions import BucketContents, bucket_starts
from weft_rl.contract.manifest import Manifest, Run
from weft_rl.transport.wire.changes import RunPlace, apply_changes


def apply_to_copy(
    contents: BucketContents, manifest: Manifest, data: torch.Tensor, digests: list[int]
) -> None:
    """Overwrite the changed elements of a copy, and bring the digests of its tensors up to date.

    Args:
        contents: Bucket of a delta.
        manifest: Layout of the copy.
        data: Bytes of the copy: uint8, 1-D, contiguous. Written.
        digests: Digests of the tensors, in the manifest's order. Written.

    Raises:
        DigestMismatchError: The changes are malformed, or other elements are there than were
            changed; nothing was written.
    """
    assert contents.changes is not None, "it came in a delta's bucket"
    sizes = [manifest.tensors[run.tensor].meta.dtype.itemsize_bytes for run in contents.runs]
    starts = bucket_starts(manifest)
    places = [
        _place(manifest, run, size, starts) for run, size in zip(contents.runs, sizes, strict=True)
    ]
    coded = contents.changes.to(data.device)
    changes = apply_changes(coded, contents.runs, sizes, data, places)
    for run, change in zip(contents.runs, changes, strict=True):
        digests[run.tensor] = (digests[run.tensor] + change) % 2**64


def _place(manifest: Manifest, run: Run, itemsize: int, starts: Sequence[int]) -> RunPlace:
    """Return the place of a run in memory where the layout's buckets begin at ``starts``."""
    slot = manifest.tensors[run.tensor]
    at = starts[slot.bucket] + slot.offset_bytes + run.first * itemsize
    return RunPlace(at, run.count, run.stride)
