"""Runs: the elements of tensors that a bucket carries.

A manifest lays a version out as whole tensors, whoever sent it. A sender may hold parts of
tensors, or choose their order as it packs. Its buckets then list their runs behind their
trailers, and a receiver puts each run where it belongs in the layout. The staged version is the
same as one that came whole and in the manifest's own order.

Source: docs/protocol.md, A bucket that lists runs.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from weft_rl.contract.errors import DigestMismatchError, InvalidManifestError
from weft_rl.contract.layout.manifest import ALIGN_BYTES, TRAILER_BYTES, Manifest, align_up
from weft_rl.contract.tensors import TensorMeta

#: First bytes, lengths and strides of slices are multiples of this: of the words of the digest.
SLICE_ALIGN_BYTES = 8

_COUNT = struct.Struct("<Q")
_RUN = struct.Struct("<QQQQQ")


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
    table = _COUNT.size + _RUN.size * num_runs if num_runs else 0
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


def check_layout(manifest: Manifest) -> None:
    """Refuse a layout that runs cannot fill; O(tensors).

    Raises:
        InvalidManifestError: Something lies in its payloads beside tensors and their padding.
    """
    if manifest.total_bytes != sum(align_up(s.meta.num_bytes) for s in manifest.tensors):
        raise InvalidManifestError("buckets that list runs need a layout without gaps")


def pack_runs(runs: Sequence[Run]) -> bytes:
    """Pack the list that follows a bucket's trailer: how many, then five numbers each."""
    return _COUNT.pack(len(runs)) + b"".join([_RUN.pack(*run) for run in runs])


def unpack_runs(
    table: bytes | memoryview, manifest: Manifest, payload_bytes: int, bucket: int
) -> list[Run]:
    """Unpack the runs of a bucket that has arrived, if they can be its.

    Args:
        table: Bytes that follow the trailer; may be longer than the list.
        manifest: The layout that they belong in.
        payload_bytes: Bytes that they must occupy.
        bucket: Index in the transfer, for error messages.

    Raises:
        DigestMismatchError: They are not as long as the payload, or lie elsewhere than in
            the layout.
    """
    count = _COUNT.unpack_from(table)[0]
    room = (len(table) - _COUNT.size) // _RUN.size
    if not 1 <= count <= room:
        raise DigestMismatchError(f"bucket {bucket} lists {count} runs; it has room for {room}")
    end = _COUNT.size + count * _RUN.size
    runs = [Run._make(fields) for fields in _RUN.iter_unpack(table[_COUNT.size : end])]
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
    if given != payload_bytes:
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
        return "" if not run.stride else "one row has no stride"
    if run.stride <= run.count:
        return "its rows touch: it is contiguous"
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
            raise _wrong(metas[due], 0, is_twice=False)
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
        raise _wrong(metas[due], 0, is_twice=False)


def _check_contiguous(meta: TensorMeta, num_elements: int, runs: list[Run]) -> None:
    end = 0
    for run in runs:
        if run.first != end:
            raise _wrong(meta, min(run.first, end), is_twice=run.first < end)
        end = run.end
    if end != num_elements:
        raise _wrong(meta, end, is_twice=False)


class _Rectangle(NamedTuple):
    """Rows and columns of a tensor that is thought of as rows as long as a stride."""

    row: int
    column: int
    end_row: int
    end_column: int


def _check_slices(meta: TensorMeta, num_elements: int, runs: list[Run], width: int) -> None:
    """Check that runs, as rectangles, tile a table as wide as the slices' stride.

    It goes from row to row where any begins or ends: those that end make room for those that begin.
    """
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
                raise _wrong(meta, row * width + cell.column, is_twice=True)
            if at < len(active) and active[at][0] < cell.end_column:
                raise _wrong(meta, row * width + active[at][0], is_twice=True)
            active.insert(at, new)
            ends.setdefault(cell.end_row, []).append(new)
            covered += cell.end_column - cell.column
        if covered != width and row < last:
            column = 0
            for first, end, _ in active:
                if first != column:
                    break
                column = end
            raise _wrong(meta, row * width + column, is_twice=False)


def _rectangles(run: Run, width: int) -> Iterator[_Rectangle]:
    """Yield a run's rectangles, at most three.

    A contiguous run has a first row, whole rows and a last row. The rows of a slice may each
    reach into the next.
    """
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


def _wrong(meta: TensorMeta, element: int, *, is_twice: bool) -> InvalidManifestError:
    what = "came twice" if is_twice else "did not come"
    return InvalidManifestError(f"element {element} of tensor {meta.name!r} {what}")
