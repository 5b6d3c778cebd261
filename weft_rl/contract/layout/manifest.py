"""The layout of one version: which tensor lies where in which bucket, and how it is planned.

A manifest says nothing about content, so pushes of the same model share one, and
it travels once: everything after names it by its ``layout_digest``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from weft_rl.contract.errors import CapacityError, DigestMismatchError, InvalidManifestError
from weft_rl.contract.tensors import TensorMeta, shape_text

#: Every tensor starts on a multiple of this: any dtype can view it, and vector loads are
#: aligned. It costs 0.4 % of space in a 7B model.
ALIGN_BYTES = 256
#: Trailer that follows each bucket's payload.
TRAILER_BYTES = 32
#: A manifest of more tensors is refused at its header. This is ten times the largest
#: checkpoint that we know of (a 1T mixture of experts, unstacked).
MAX_TENSORS = 1_000_000
MAX_NAME_CHARS = 512
#: Bound of all names of one manifest: 128 characters for each of a million tensors.
MAX_NAMES_CHARS = 128 * 2**20
MAX_DIMS = 8
#: Bound of a tensor, a bucket, or all of them: a pebibyte.
MAX_TOTAL_BYTES = 2**50

#: Algorithm by which tensors are digested; its number in ``weft.v1.DigestAlgorithm``.
WSUM64 = 2
#: Size of a ``ContentDigest``.
DIGEST_BYTES = 8

_TRAILER = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor and its place: bucket index, offset in bytes within the bucket."""

    meta: TensorMeta
    bucket: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Contiguous bytes that are sent and verified as one."""

    payload_bytes: int
    num_tensors: int

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire: payload and trailer, padded to ``ALIGN_BYTES``."""
        return align_up(self.payload_bytes + TRAILER_BYTES)


@dataclass(frozen=True)
class Manifest:
    """Ordered tensors and their buckets. Build it with ``make_manifest``."""

    tensors: tuple[TensorSlot, ...]
    buckets: tuple[Bucket, ...]
    digest_algorithm: int
    layout_digest: bytes

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all buckets."""
        return sum(b.payload_bytes for b in self.buckets)

    @property
    def wire_bytes(self) -> int:
        """Bytes of all buckets as they travel and are staged."""
        return sum(b.wire_bytes for b in self.buckets)

    @cached_property
    def tensors_by_bucket(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the tensors of each bucket, by offset."""
        found: list[list[int]] = [[] for _ in self.buckets]
        for index, slot in enumerate(self.tensors):
            found[slot.bucket].append(index)
        return tuple(map(tuple, found))


def align_up(num_bytes: int) -> int:
    """Round up to the next multiple of ``ALIGN_BYTES``."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def make_manifest(
    tensors: Iterable[TensorSlot], buckets: Iterable[Bucket], digest_algorithm: int = WSUM64
) -> Manifest:
    """Check a layout and seal it with its digest.

    Raises:
        InvalidManifestError: Names the first tensor or bucket that is wrong.
        CapacityError: More than ``MAX_TENSORS``.
    """
    tensors, buckets = tuple(tensors), tuple(buckets)
    check_num_tensors(len(tensors))
    _check_layout(tensors, buckets, digest_algorithm)
    return Manifest(
        tensors, buckets, digest_algorithm, _layout_digest(tensors, buckets, digest_algorithm)
    )


def check_num_tensors(num_tensors: int) -> None:
    """Refuse a manifest by its count alone, before its list is read."""
    if num_tensors > MAX_TENSORS:
        raise CapacityError(
            f"a manifest of {num_tensors:,} tensors is larger than the {MAX_TENSORS:,} allowed",
            reason="MANIFEST_TOO_LARGE",
        )
    if num_tensors == 0:
        raise InvalidManifestError("a manifest of no tensors: there is nothing to push")


def check_metas(metas: Sequence[TensorMeta]) -> None:
    """Refuse names or shapes that no manifest may have; names the first.

    Raises:
        InvalidManifestError, CapacityError: As ``make_manifest``.
    """
    check_num_tensors(len(metas))
    seen: set[str] = set()
    for meta in metas:
        check_meta(meta)
        if meta.name in seen:
            raise InvalidManifestError(f"two tensors are named {meta.name!r}")
        seen.add(meta.name)


def check_meta(meta: TensorMeta) -> None:
    """Refuse a name or a shape that no tensor of a manifest may have, by itself.

    Raises:
        InvalidManifestError: Names it.
    """
    if not 1 <= len(meta.name) <= MAX_NAME_CHARS or not meta.name.isprintable():
        raise InvalidManifestError(
            f"tensor name {meta.name[:80]!r} is not 1 to {MAX_NAME_CHARS} printable characters"
        )
    if len(meta.shape) > MAX_DIMS or any(dim < 1 for dim in meta.shape):
        raise InvalidManifestError(
            f"tensor {meta.name!r} has shape ({shape_text(meta.shape[: MAX_DIMS + 1])}): every "
            f"dim must be at least 1, and there are at most {MAX_DIMS}. Gather a sharded or "
            "emptied parameter first"
        )
    if meta.num_bytes > MAX_TOTAL_BYTES:
        raise InvalidManifestError(
            f"tensor {meta.name!r} has {meta.num_bytes} bytes; at most {MAX_TOTAL_BYTES} are taken"
        )


def check_names(num_chars: int) -> None:
    """Refuse a manifest by the characters of all its names, before the rest is read."""
    if num_chars > MAX_NAMES_CHARS:
        raise CapacityError(
            f"the names of a manifest's tensors have more than {MAX_NAMES_CHARS:,} characters",
            reason="MANIFEST_TOO_LARGE",
        )


def _check_layout(
    tensors: tuple[TensorSlot, ...], buckets: tuple[Bucket, ...], digest_algorithm: int
) -> None:
    if digest_algorithm != WSUM64:
        raise InvalidManifestError(f"digest algorithm {digest_algorithm} is not wsum64 ({WSUM64})")
    check_metas([slot.meta for slot in tensors])
    if sum(bucket.payload_bytes for bucket in buckets) > MAX_TOTAL_BYTES:
        raise InvalidManifestError(f"the buckets have more than {MAX_TOTAL_BYTES} bytes in all")
    counts = [0] * len(buckets)
    ends = [0] * len(buckets)
    for slot in tensors:
        name = slot.meta.name
        if not 0 <= slot.bucket < len(buckets):
            raise InvalidManifestError(
                f"tensor {name!r} lies in bucket {slot.bucket}, which is not"
            )
        if slot.offset_bytes % ALIGN_BYTES:
            raise InvalidManifestError(
                f"tensor {name!r} starts at byte {slot.offset_bytes}, which is not a multiple of "
                f"{ALIGN_BYTES}"
            )
        if slot.offset_bytes < ends[slot.bucket]:
            raise InvalidManifestError(
                f"tensor {name!r} starts at byte {slot.offset_bytes} of bucket {slot.bucket} and "
                "overlaps the one before it (tensors of a bucket are listed by offset)"
            )
        ends[slot.bucket] = slot.offset_bytes + slot.meta.num_bytes
        counts[slot.bucket] += 1
    for index, bucket in enumerate(buckets):
        if bucket.payload_bytes % ALIGN_BYTES or bucket.payload_bytes < ends[index]:
            raise InvalidManifestError(
                f"bucket {index} has {bucket.payload_bytes} payload bytes: need a multiple of "
                f"{ALIGN_BYTES} that holds its {ends[index]} bytes of tensors"
            )
        if bucket.payload_bytes > align_up(ends[index]):
            raise InvalidManifestError(f"bucket {index} is longer than what it holds")
        if bucket.num_tensors != counts[index] or not counts[index]:
            raise InvalidManifestError(
                f"bucket {index} says it holds {bucket.num_tensors} tensors; "
                f"{counts[index]} lie there"
            )


def _layout_digest(
    tensors: tuple[TensorSlot, ...], buckets: tuple[Bucket, ...], digest_algorithm: int
) -> bytes:
    """Compute the SHA-256 of the text defined at ``weft.v1.ManifestHeader.layout_digest``."""
    lines = [f"{digest_algorithm}\n"]
    lines += [f"{b.payload_bytes} {b.num_tensors}\n" for b in buckets]
    lines += [
        f"{s.meta.name} {int(s.meta.dtype)} {shape_text(s.meta.shape)} "
        f"{s.bucket} {s.offset_bytes}\n"
        for s in tensors
    ]
    return hashlib.sha256("".join(lines).encode()).digest()


def pack_trailer(digest: int, nonce: int, bucket: int, payload_bytes: int) -> bytes:
    """Pack the 32 bytes that follow a bucket's payload.

    Source: protos/weft/v1/types.proto, Bucket.
    """
    return _TRAILER.pack(digest, nonce, bucket, payload_bytes)


def check_trailer(
    trailer: bytes | memoryview, *, digest: int, nonce: int, bucket: int, payload_bytes: int
) -> None:
    """Compare a received trailer with what this side computed and expects.

    Raises:
        DigestMismatchError: Says which field differs.
    """
    got = _TRAILER.unpack(trailer)
    want = (digest, nonce, bucket, payload_bytes)
    for field, have, expected in zip(
        ("digest", "transfer nonce", "bucket index", "payload size"), got, want, strict=True
    ):
        if have != expected:
            raise DigestMismatchError(
                f"bucket {bucket}: the trailer's {field} is {have:#x}, expected {expected:#x}; "
                "the bytes that arrived are not those that were sent"
            )


#: Gloo on CPU is as fast as it gets from 16 MiB on. At 64 MiB two more things hide behind the
#: sending of the next bucket: a bucket's release (a round trip over the coordinator) and packing.
DEFAULT_BUCKET_BYTES = 64 * 2**20


def layer_of(name: str) -> str:
    """Return the layer a tensor belongs to: its name up to the first numeric component.

    ``model.layers.3.mlp.up_proj.weight`` gives ``model.layers.3``; a name without
    a number is its own layer's module, ``lm_head.weight`` gives ``lm_head``.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def plan_buckets(
    metas: Sequence[TensorMeta], capacity_bytes: int = DEFAULT_BUCKET_BYTES
) -> Manifest:
    """Cut tensors into buckets without reordering or splitting a tensor.

    A layer that fits in one bucket is never spread over two: a receiver that loads bucket by
    bucket sees whole layers. A larger layer is cut between its tensors. A tensor larger than a
    bucket travels in one of its own.

    Args:
        metas: In the order of sending; full shapes.
        capacity_bytes: Largest payload of a bucket, padding included.

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
    return make_manifest(slots, buckets)
