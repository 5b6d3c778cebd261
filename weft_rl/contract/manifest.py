"""The layout of one version: tensors, buckets, the runs that a bucket carries, and who sends them.

A manifest says which tensor lies where in which bucket, and nothing about content: pushes of the
same model share one, and it travels once. Everything after names it by its ``layout_digest``.

A manifest lays a version out as whole tensors, whoever sent it. A sender may hold parts of
tensors, or choose their order as it packs. Its buckets then list their runs behind their
trailers, and a receiver puts each run where it belongs in the layout. The staged version is the
same as one that came whole and in the manifest's own order.

*Wire buckets* travel, each of which carries runs of the version's tensors. Sender and receivers
have the same send plan before the first byte: the sizes of the wire buckets, and their order.
Receivers verify and report them in this order, and a transfer that resumes counts in it. The runs
are known with the plan, or announced with each bucket (``Listing``).

A *mixed* plan has two parts, one after the other: a delta's wire buckets, then those of all
elements. A receiver is told which part is its own, and lets the buckets of the other part pass.

One file: a plan is checked against the manifest whose tensors it cuts into runs.

Source: docs/protocol.md, A bucket that lists runs.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from weft_rl.contract.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidManifestError,
    InvalidRequestError,
)
from weft_rl.contract.group import MAX_SENDERS
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

#: First bytes, lengths and strides of slices are multiples of this: of the words of the digest.
SLICE_ALIGN_BYTES = 8
#: Wire buckets of one transfer.
MAX_WIRE_BUCKETS: Final = 65_536
#: Gloo on CPU is as fast as it gets from 16 MiB on. At 64 MiB two more things hide behind the
#: sending of the next bucket: a bucket's release (a round trip over the coordinator) and packing.
DEFAULT_BUCKET_BYTES = 64 * 2**20

_TRAILER = struct.Struct("<QQQQ")
_NUM_RUNS = struct.Struct("<Q")
_RUN = struct.Struct("<QQQQQ")
# Bytes that a run's first and last block may hold beside it.
_MAX_LOST_BYTES: Final = 2 * ALIGN_BYTES


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
            raise InvalidManifestError(f"bucket {index} is longer than its tensors")
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


class Run(NamedTuple):
    """Elements of one tensor, row-major: contiguous, or a regular slice of several rows."""

    tensor: int
    """Index in the manifest."""
    first: int
    """The first element."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """Elements of each row."""
    stride: int = 0
    """Elements from the beginning of one row to that of the next; 0 where there is but one."""
    repeats: int = 1
    """Rows."""

    @property
    def num_elements(self) -> int:
        """Elements of all rows."""
        return self.count * self.repeats

    @property
    def end(self) -> int:
        """The element behind the last one."""
        return self.first + self.stride * (self.repeats - 1) + self.count

    def payload_bytes(self, itemsize: int) -> int:
        """Return the bytes that it occupies in a payload, a multiple of ``ALIGN_BYTES``.

        A contiguous run keeps its place within the tensor's blocks of that size: it occupies
        those that it touches. A slice is packed row behind row.
        """
        if self.repeats > 1:
            return align_up(self.num_elements * itemsize)
        return align_up(self.end * itemsize) - self.begin_bytes(itemsize)

    def begin_bytes(self, itemsize: int) -> int:
        """Return the first byte in its tensor of what it occupies in a payload: its first block's,
        or that of the slice itself."""
        first = self.first * itemsize
        return first if self.repeats > 1 else first - first % ALIGN_BYTES


class WireSize(NamedTuple):
    """Size of a bucket as it travels."""

    payload_bytes: int
    num_runs: int
    """Runs that it has room to list; 0 where no list travels."""
    wire_bytes: int


def wire_size(payload_bytes: int, num_runs: int) -> WireSize:
    """Compute the size of a bucket with room for a list of ``num_runs`` runs; without a list for
    none."""
    table = _NUM_RUNS.size + _RUN.size * num_runs if num_runs else 0
    return WireSize(payload_bytes, num_runs, align_up(payload_bytes + TRAILER_BYTES + table))


def carried_sizes(manifest: Manifest) -> tuple[WireSize, ...]:
    """List the sizes of the buckets of a transfer that carries whole tensors in an order of its
    own; O(tensors).

    There are as many as the manifest has, of the same payloads. Each has room for the runs of as
    many of the layout's smallest tensors as fit, and for one that is cut at either end.
    """
    smallest = sorted(align_up(slot.meta.num_bytes) for slot in manifest.tensors)
    ends = list(accumulate(smallest))
    return tuple(
        wire_size(bucket.payload_bytes, bisect_right(ends, bucket.payload_bytes) + 2)
        for bucket in manifest.buckets
    )


def check_gapless(manifest: Manifest) -> None:
    """Refuse a layout that runs cannot fill; O(tensors).

    Raises:
        InvalidManifestError: Something lies in its payloads beside tensors and their padding.
    """
    if manifest.total_bytes != sum(align_up(s.meta.num_bytes) for s in manifest.tensors):
        raise InvalidManifestError("buckets that list runs need a layout without gaps")


def pack_runs(runs: Sequence[Run]) -> bytes:
    """Pack the list that follows a bucket's trailer: how many, then five numbers each."""
    return _NUM_RUNS.pack(len(runs)) + b"".join([_RUN.pack(*run) for run in runs])


def unpack_runs(
    table: bytes | memoryview, manifest: Manifest, payload_bytes: int | None, bucket: int
) -> list[Run]:
    """Unpack the runs of a bucket that has arrived, if they can be its.

    Args:
        table: Bytes that follow the trailer; may be longer than the list.
        manifest: The layout that they belong in.
        payload_bytes: Bytes that they must occupy; None where only their changes came.
        bucket: Index in the transfer, for error messages.

    Raises:
        DigestMismatchError: They are not as long as the payload, or lie elsewhere than in
            the layout.
    """
    count = _NUM_RUNS.unpack_from(table)[0]
    room = (len(table) - _NUM_RUNS.size) // _RUN.size
    if not 1 <= count <= room:
        raise DigestMismatchError(f"bucket {bucket} lists {count} runs; it has room for {room}")
    end = _NUM_RUNS.size + count * _RUN.size
    runs = [Run._make(fields) for fields in _RUN.iter_unpack(table[_NUM_RUNS.size : end])]
    given = 0
    for run in runs:
        if run.tensor >= len(manifest.tensors):
            why = f"of {len(manifest.tensors)} tensors"
        else:
            meta = manifest.tensors[run.tensor].meta
            why = why_not(run, meta)
            given += run.payload_bytes(meta.dtype.itemsize_bytes)
        if why:
            raise DigestMismatchError(
                f"bucket {bucket} lists {run}, which is not of its layout: {why}"
            )
    if payload_bytes is not None and given != payload_bytes:
        raise DigestMismatchError(
            f"bucket {bucket} lists runs of {given} bytes; its payload has {payload_bytes}"
        )
    return runs


def why_not(run: Run, meta: TensorMeta) -> str:
    """Say why a run is none of this tensor; empty if it is one."""
    size = meta.dtype.itemsize_bytes
    if run.count < 1 or run.repeats < 1 or run.first < 0 or run.end * size > meta.num_bytes:
        return f"{meta.name!r} has {meta.num_bytes // size} elements"
    if run.repeats == 1:
        return "" if not run.stride else "a single row has stride 0"
    if run.stride <= run.count:
        return "its rows touch: list it as a contiguous run"
    if any(n * size % SLICE_ALIGN_BYTES for n in (run.first, run.count, run.stride)):
        return f"slices begin, last and repeat in multiples of {SLICE_ALIGN_BYTES} bytes"
    return ""


def check_coverage(metas: Sequence[TensorMeta], runs: Iterable[Run]) -> None:
    """Check that runs cover every element of every tensor exactly once.

    Slices are compared as they are, never row by row: O(n log n) for n runs.

    Args:
        metas: All tensors, in the manifest's order.
        runs: Runs of all buckets, in any order; each is one of its tensor (``why_not``). All
            slices of one tensor have one stride.

    Raises:
        InvalidManifestError: Names the first place that came twice or did not come.
    """
    due = 0
    for tensor, group in groupby(sorted(runs), key=lambda run: run.tensor):
        if tensor != due:
            raise _wrong_coverage(metas[due], 0, is_twice=False)
        meta, own = metas[tensor], list(group)
        num_elements = meta.num_bytes // meta.dtype.itemsize_bytes
        strides = {run.stride for run in own} - {0}
        if len(strides) > 1:
            raise InvalidManifestError(
                f"tensor {meta.name!r} came in slices of strides {min(strides)} and {max(strides)}"
            )
        if strides:
            _check_slices(meta, num_elements, own, strides.pop())
        else:
            _check_contiguous(meta, num_elements, own)
        due += 1
    if due < len(metas):
        raise _wrong_coverage(metas[due], 0, is_twice=False)


def _check_contiguous(meta: TensorMeta, num_elements: int, runs: list[Run]) -> None:
    end = 0
    for run in runs:
        if run.first != end:
            raise _wrong_coverage(meta, min(run.first, end), is_twice=run.first < end)
        end = run.end
    if end != num_elements:
        raise _wrong_coverage(meta, end, is_twice=False)


class _Rectangle(NamedTuple):
    """Rows and columns of a tensor that is thought of as rows as long as a stride."""

    row: int
    column: int
    end_row: int
    end_column: int


def _check_slices(meta: TensorMeta, num_elements: int, runs: list[Run], width: int) -> None:
    """Check that runs, as rectangles, tile a table as wide as the slices' stride, row by row."""
    last, rest = divmod(num_elements, width)
    cells = [cell for run in runs for cell in _rectangles(run, width)]
    if rest:  # what the last row lacks, as if it had come
        cells.append(_Rectangle(last, rest, last + 1, width))
        last += 1
    cells.sort()
    begins = {row: list(group) for row, group in groupby(cells, key=lambda cell: cell.row)}
    rows = sorted({*begins, *(cell.end_row for cell in cells), 0, last})
    active: list[tuple[int, int, int]] = []  # first column, end, end row; disjoint, sorted
    ends: dict[int, list[tuple[int, int, int]]] = {}
    covered = 0
    for row in rows:
        for gone in ends.pop(row, ()):
            del active[bisect_left(active, gone)]
            covered -= gone[1] - gone[0]
        for cell in begins.get(row, ()):
            new = (cell.column, cell.end_column, cell.end_row)
            at = bisect_left(active, new)
            if at and active[at - 1][1] > cell.column:
                raise _wrong_coverage(meta, row * width + cell.column, is_twice=True)
            if at < len(active) and active[at][0] < cell.end_column:
                raise _wrong_coverage(meta, row * width + active[at][0], is_twice=True)
            active.insert(at, new)
            ends.setdefault(cell.end_row, []).append(new)
            covered += cell.end_column - cell.column
        if covered != width and row < last:
            column = 0
            for first, end, _ in active:
                if first != column:
                    break
                column = end
            raise _wrong_coverage(meta, row * width + column, is_twice=False)


def _rectangles(run: Run, width: int) -> Iterator[_Rectangle]:
    """Yield a run's first row, whole rows and last row, as rectangles."""
    row, column = divmod(run.first, width)
    if run.repeats > 1:
        end = column + run.count
        yield _Rectangle(row, column, row + run.repeats, min(end, width))
        if end > width:
            yield _Rectangle(row + 1, 0, row + 1 + run.repeats, end - width)
        return
    end_row, end_column = divmod(run.end, width)
    if row == end_row:
        yield _Rectangle(row, column, row + 1, end_column)
        return
    if column:
        yield _Rectangle(row, column, row + 1, width)
        row += 1
    if row < end_row:
        yield _Rectangle(row, 0, end_row, width)
    if end_column:
        yield _Rectangle(end_row, 0, end_row + 1, end_column)


def _wrong_coverage(meta: TensorMeta, element: int, *, is_twice: bool) -> InvalidManifestError:
    what = "came twice" if is_twice else "did not come"
    return InvalidManifestError(f"element {element} of tensor {meta.name!r} {what}")


class Listing(Enum):
    """Way in which a receiver learns the runs of a wire bucket."""

    NONE = "none"
    """From the manifest: a wire bucket is a bucket of the layout, and no list travels."""
    WITHIN_BUCKET = "within bucket"
    """From the wire bucket, which lists them; they lie in its bucket of the layout."""
    ANYWHERE = "anywhere"
    """From the wire bucket, which lists them; they may lie anywhere in the layout."""


@dataclass(frozen=True, slots=True)
class WireBucket:
    """Part of one bucket of the layout that one sender holds."""

    sender: int
    """Rank of the sender."""
    bucket: int
    """Index of the bucket in the layout."""
    payload_bytes: int
    """Bytes of its runs and their padding, a multiple of ``ALIGN_BYTES``."""
    num_runs: int
    """Runs that it has room to list; 0 where no list travels."""

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire: payload, trailer and list of runs, up to ``ALIGN_BYTES``."""
        return wire_size(self.payload_bytes, self.num_runs).wire_bytes


@dataclass(frozen=True)
class SendPlan:
    """Wire buckets of a transfer in their order: by bucket of the layout, then by sender."""

    num_senders: int
    """Number of senders, ranks 0 and up of the side group; each sends something."""
    buckets: tuple[WireBucket, ...]
    listing: Listing = Listing.WITHIN_BUCKET
    delta_from: bytes = b""
    """Content digest of the base that a delta changes, in the same layout: its wire buckets carry
    the changes of their runs. Empty where they carry all elements."""
    num_whole: int = 0
    """Wire buckets, the last ones, that carry all elements beside a delta; see ``part``. 0 unless
    the plan is mixed."""

    @property
    def num_changes(self) -> int:
        """Number of wire buckets, the first ones, that carry changes; 0 where none do."""
        return len(self.buckets) - self.num_whole if self.delta_from else 0

    def part(self, *, takes_whole: bool) -> SendPlan:
        """Return the plan of a receiver's own part of a mixed plan; of any other plan, itself.

        Indices in it begin at 0: those of all elements come ``num_changes`` later in the order of
        all buckets.
        """
        return self.parts[-1 if takes_whole else 0]

    @cached_property
    def parts(self) -> tuple[SendPlan, ...]:
        """The parts of a mixed plan, the changes first; of any other plan, itself alone."""
        if not self.num_whole:
            return (self,)
        changes, whole = self.buckets[: -self.num_whole], self.buckets[-self.num_whole :]
        lists_runs = any(wire.num_runs for wire in whole)
        listing = Listing.WITHIN_BUCKET if lists_runs else Listing.NONE
        return (
            SendPlan(self.num_senders, changes, delta_from=self.delta_from),
            SendPlan(self.num_senders, whole, listing),
        )

    @property
    def lists_runs(self) -> bool:
        """True if each wire bucket lists the runs that it carries."""
        return self.listing is not Listing.NONE

    def wire_bytes(self, index: int) -> int:
        """Return the bytes on the wire of a wire bucket, by its place in the order."""
        return self.buckets[index].wire_bytes

    def begin_of(self, bucket: int) -> int:
        """Return the index of the first wire bucket of a bucket of the layout: how many come before
        it."""
        return bisect_left(self.buckets, bucket, key=lambda wire: wire.bucket)

    def sent_by(self, sender: int) -> tuple[int, ...]:
        """List the wire buckets of one sender, ascending."""
        return self._by_sender[sender]

    @cached_property
    def _by_sender(self) -> tuple[tuple[int, ...], ...]:
        indices: list[list[int]] = [[] for _ in range(self.num_senders)]
        for index, wire in enumerate(self.buckets):
            indices[wire.sender].append(index)
        return tuple(map(tuple, indices))


def whole_plan(manifest: Manifest) -> SendPlan:
    """Plan a transfer in which one rank sends the buckets of the layout as they are."""
    wires = [WireBucket(0, i, b.payload_bytes, 0) for i, b in enumerate(manifest.buckets)]
    return SendPlan(1, tuple(wires), Listing.NONE)


def whole_runs(manifest: Manifest) -> tuple[tuple[Run, ...], ...]:
    """List the runs of each wire bucket of a ``whole_plan``: its tensors; O(tensors)."""
    return tuple(
        tuple([Run(i, 0, manifest.tensors[i].meta.num_elements) for i in tensors])
        for tensors in manifest.tensors_by_bucket
    )


def announced_plan(manifest: Manifest) -> SendPlan:
    """Plan a transfer in which one rank sends whole tensors in an order that it announces bucket
    by bucket; O(tensors)."""
    wires = [
        WireBucket(0, index, size.payload_bytes, size.num_runs)
        for index, size in enumerate(carried_sizes(manifest))
    ]
    return SendPlan(1, tuple(wires), Listing.ANYWHERE)


def transfer_plan(manifest: Manifest, divided: SendPlan | None, *, carries_runs: bool) -> SendPlan:
    """Return the plan that a transfer was begun with, as a receiver is told of it.

    Args:
        divided: Division among senders that travelled with the transfer; None for one sender.
        carries_runs: True if the sender announces the runs of its buckets.

    Raises:
        InvalidRequestError: As ``check_send_plan``.
    """
    if divided is not None:
        check_send_plan(divided, manifest)
        return divided
    return announced_plan(manifest) if carries_runs else whole_plan(manifest)


def mixed_plan(delta: SendPlan, whole: SendPlan) -> SendPlan:
    """Plan a transfer of a delta to some receivers and of all elements to the others.

    Args:
        delta, whole: Plans of the same senders for the same version.

    Raises:
        InvalidRequestError: They have too many wire buckets together.
    """
    buckets = (*delta.buckets, *whole.buckets)
    return make_send_plan(delta.num_senders, buckets, delta.delta_from, len(whole.buckets))


def make_send_plan(
    num_senders: int, buckets: Iterable[WireBucket], delta_from: bytes = b"", num_whole: int = 0
) -> SendPlan:
    """Check wire buckets, which may be anybody's claim, and plan a division among senders with
    them.

    Args:
        delta_from, num_whole: See ``SendPlan``.

    Raises:
        InvalidRequestError: Names the first that is out of bounds or out of order.
    """
    buckets = tuple(buckets)
    if len(delta_from) not in (0, DIGEST_BYTES):
        raise InvalidRequestError(
            f"a send plan's delta_from has {len(delta_from)} bytes; a content digest has "
            f"{DIGEST_BYTES}"
        )
    if num_whole and not (delta_from and 0 < num_whole < len(buckets)):
        raise InvalidRequestError(
            f"a send plan of {len(buckets)} wire buckets, {num_whole} of all elements: a mixed "
            "plan has some of each kind, and a delta_from"
        )
    plan = SendPlan(num_senders, buckets, delta_from=delta_from, num_whole=num_whole)
    for part in plan.parts:
        _check_order(part)
    return plan


def _check_order(plan: SendPlan) -> None:
    """Refuse wire buckets of one part of a plan that are out of bounds or out of order."""
    num_senders, buckets = plan.num_senders, plan.buckets
    if not 1 <= num_senders <= MAX_SENDERS:
        raise InvalidRequestError(
            f"a send plan of {num_senders} senders; there are 1 to {MAX_SENDERS}"
        )
    if len(buckets) > MAX_WIRE_BUCKETS:
        raise InvalidRequestError(
            f"a send plan of {len(buckets)} wire buckets; at most {MAX_WIRE_BUCKETS} are taken"
        )
    last = (-1, -1)
    for index, wire in enumerate(buckets):
        if not 0 <= wire.sender < num_senders:
            raise InvalidRequestError(
                f"wire bucket {index} is sent by rank {wire.sender}; there are {num_senders} "
                "senders"
            )
        if (wire.bucket, wire.sender) <= last:
            raise InvalidRequestError(
                f"wire bucket {index} comes after one of a later bucket or sender; they are "
                "listed by bucket of the layout, then by sender"
            )
        last = (wire.bucket, wire.sender)
        if wire.payload_bytes <= 0 or wire.payload_bytes % ALIGN_BYTES:
            raise InvalidRequestError(
                f"wire bucket {index} has {wire.payload_bytes} payload bytes; they must be "
                f"a multiple of {ALIGN_BYTES}"
            )
        if plan.lists_runs and (
            wire.num_runs < 1
            or not (plan.delta_from or wire.num_runs <= wire.payload_bytes // ALIGN_BYTES)
        ):
            raise InvalidRequestError(
                f"wire bucket {index} of {wire.payload_bytes} payload bytes cannot list "
                f"{wire.num_runs} runs: each has at least one block of {ALIGN_BYTES} bytes"
            )
    idle = set(range(num_senders)) - {wire.sender for wire in buckets}
    if idle:
        raise InvalidRequestError(f"sender {min(idle)} of a send plan has nothing to send")


def check_send_plan(plan: SendPlan, manifest: Manifest) -> None:
    """Refuse a plan whose wire buckets cannot hold a layout; O(buckets).

    Raises:
        InvalidRequestError: Names the first bucket of the layout that they cannot hold.
    """
    for part in plan.parts:
        _check_part(part, manifest)


def _check_part(plan: SendPlan, manifest: Manifest) -> None:
    if not plan.lists_runs:
        if plan.buckets != whole_plan(manifest).buckets:
            raise InvalidRequestError(
                "the send plan lists no runs for all elements: these wire buckets must be those of "
                "the layout, from one sender"
            )
        return
    payloads = [0] * len(manifest.buckets)
    runs = [0] * len(manifest.buckets)
    for wire in plan.buckets:
        if wire.bucket >= len(manifest.buckets):
            raise InvalidRequestError(
                f"the send plan names bucket {wire.bucket}; the layout has {len(manifest.buckets)}"
            )
        payloads[wire.bucket] += wire.payload_bytes
        runs[wire.bucket] += wire.num_runs
    if plan.delta_from:
        _check_delta(manifest, sum(payloads), sum(runs))
        return
    for index, bucket in enumerate(manifest.buckets):
        most = bucket.payload_bytes + _MAX_LOST_BYTES * runs[index]
        if not bucket.payload_bytes <= payloads[index] <= most:
            raise InvalidRequestError(
                f"bucket {index} has {bucket.payload_bytes} payload bytes; the send plan has "
                f"{payloads[index]} for it, in {runs[index]} runs"
            )


def _check_delta(manifest: Manifest, payload_bytes: int, num_runs: int) -> None:
    """Refuse changes that are longer than the layout with what each run adds."""
    all_bytes = sum(bucket.payload_bytes for bucket in manifest.buckets)
    # Blocks that are sent whole, and what precedes them.
    most = all_bytes + all_bytes // 1024 + _MAX_LOST_BYTES * num_runs
    if num_runs > all_bytes // ALIGN_BYTES or payload_bytes > most:
        raise InvalidRequestError(
            f"the layout has {all_bytes} payload bytes; the send plan has {payload_bytes} of "
            f"changes for it, in {num_runs} runs"
        )
