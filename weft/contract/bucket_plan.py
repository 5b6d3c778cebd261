"""Cut tensors into buckets: pure arithmetic, no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from weft.contract.manifest import (
    XXH3_64,
    Bucket,
    Manifest,
    TensorSlot,
    align_up,
    check_metas,
    make_manifest,
)
from weft.contract.tensors import TensorMeta

#: Gloo on CPU is as fast as it gets from 16 MiB on; at 64 MiB a bucket's release (a
#: round trip over the coordinator) and packing hide behind the sending of the next.
DEFAULT_BUCKET_BYTES = 64 * 2**20


def layer_of(name: str) -> str:
    """The layer a tensor belongs to: its name up to the first numeric component.

    ``model.layers.3.mlp.up_proj.weight`` gives ``model.layers.3``; a name without
    a number is its own layer's module, ``lm_head.weight`` gives ``lm_head``.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def plan_buckets(
    metas: Sequence[TensorMeta],
    capacity_bytes: int = DEFAULT_BUCKET_BYTES,
    digest_algorithm: int = XXH3_64,
) -> Manifest:
    """Cut tensors into buckets without reordering or splitting a tensor.

    A layer that fits in one bucket is never spread over two, so that a receiver
    that loads bucket by bucket sees whole layers; a larger layer is cut between
    its tensors, and a tensor larger than a bucket travels in one of its own.

    Args:
        metas: In the order of sending; full shapes.
        capacity_bytes: Largest payload of a bucket, padding included.
        digest_algorithm: Of every bucket.

    Returns:
        A sealed manifest whose tensors are ``metas`` in order.

    Raises:
        InvalidManifestError: A name or shape is wrong; names it.
        CapacityError: Too many tensors.
    """
    check_metas(metas)
    slots: list[TensorSlot] = []
    buckets: list[Bucket] = []
    used = count = 0

    def close() -> None:
        nonlocal used, count
        if count:
            buckets.append(Bucket(used, count))
        used = count = 0

    for _, group in groupby(metas, key=lambda m: layer_of(m.name)):
        layer = list(group)
        layer_bytes = sum(align_up(m.num_bytes) for m in layer)
        if used + layer_bytes > capacity_bytes and layer_bytes <= capacity_bytes:
            close()
        for meta in layer:
            size = align_up(meta.num_bytes)
            if used + size > capacity_bytes:
                close()
            slots.append(TensorSlot(meta, len(buckets), used))
            used += size
            count += 1
    close()
    return make_manifest(slots, buckets, digest_algorithm)
