"""Coding of changed elements on the host's processor, in C; ``change_coding`` specifies it.

Operations of torch read and write memory a hundred times for each change: a delta of a hundredth
of a model would take as long as all of it over 3 Gbit/s. ``changes.c`` is compiled by the machine's
C compiler once a process, as torch and Triton compile theirs; without one, torch serves.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise, repeat
from pathlib import Path
from typing import Final, TypeVar

import torch

from weft_rl.contract.manifest import Run, align_up
from weft_rl.interrupts import side_by_side
from weft_rl.transport.digests.weights import HOST, column_weights
from weft_rl.transport.wire.change_coding import (
    BLOCK_ELEMENTS,
    EncodedChanges,
    RunPlace,
    head_bytes,
    malformed,
    max_changes_bytes,
    not_the_base,
    packed_places,
)

_log = logging.getLogger(__name__)

_COMPILER: Final = ("cc", "-O3", "-shared", "-fPIC")
_COMPILE_SECONDS = 60.0
#: What ``changes.c`` finds wrong with a payload, by number.
_WRONG: Final = (
    "",
    "it is too short",
    "a block's numbers do not fit it",
    "it has another length",
    "a block has another length",
    "a gap does not end",
    "an element is none of its block",
    "a step has no meaning",
    "a block gives another number of elements",
    "an element comes twice",
    "it is not filled up with zeros",
)
#: Blocks, of 16,384 elements, that are worth a thread of their own: they take some 0.3 ms.
_LEAST_BLOCKS: Final = 32
_lock = threading.Lock()
_T = TypeVar("_T")


def works() -> bool:
    """Return whether this process has the coder. Blocks for half a second the first time, while it
    is compiled; a message says why not."""
    with _lock:
        return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    source = Path(__file__).with_name("changes.c")
    try:
        # In a folder of this process's own: nobody else can put another library there.
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            made = Path(folder) / "changes.so"
            subprocess.run(
                [*_COMPILER, "-o", str(made), str(source)],
                check=True,
                capture_output=True,
                text=True,
                timeout=_COMPILE_SECONDS,
            )
            library = ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        _log.info("deltas are coded by torch, for there is no C compiler that works: %s", why)
        return None
    library.weft_encode.restype = library.weft_scratch_bytes.restype = ctypes.c_int64
    library.weft_write.restype = None
    return library


def encode(
    old: torch.Tensor,
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    *,
    overwrites: bool = False,
) -> EncodedChanges:
    """Compare two versions of a bucket, and code what differs; see ``encode_changes``.

    Args:
        overwrites: Write the new elements over the old ones meanwhile.
    """
    library = _library()
    assert library is not None, "it works"
    places = packed_places(runs, itemsizes)
    if isinstance(new, torch.Tensor):
        addresses = [new.data_ptr() + place.at for place in places]
    else:
        addresses = [tensor.data_ptr() for tensor in new]
    # Each is named: what a pointer alone is left of is freed.
    table = _table(runs, itemsizes, places, addresses)
    head = head_bytes(runs)
    heads = torch.empty(head // 8 - len(runs), dtype=torch.int64)
    most_bytes = max_changes_bytes(runs, itemsizes) - head

    def share(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        block_bytes = BLOCK_ELEMENTS * max(itemsizes) + 4
        bodies = torch.empty(min(most_bytes, (end - first) * block_bytes), dtype=torch.uint8)
        sums = torch.zeros(2, len(runs), dtype=torch.int64)
        num_changes, scratch = ctypes.c_int64(), _scratch(library)
        used = library.weft_encode(
            _at(old),
            ctypes.c_int(overwrites),
            _at(table),
            ctypes.c_int64(len(runs)),
            _at(column_weights(HOST)),
            ctypes.c_int64(first),
            ctypes.c_int64(end),
            _at(heads[first:]),
            _at(bodies),
            _at(sums[0]),
            _at(sums[1]),
            ctypes.byref(num_changes),
            _at(scratch),
        )
        return bodies[:used], sums, num_changes.value

    shares = _by_threads(share, len(heads))
    old_sums, totals = torch.stack([sums for _, sums, _ in shares]).sum(0)
    used = head + sum(len(bodies) for bodies, _, _ in shares)
    payload = torch.cat(
        [
            old_sums.view(torch.uint8),
            heads.view(torch.uint8),
            *(bodies for bodies, _, _ in shares),
            torch.zeros(align_up(used) - used, dtype=torch.uint8),
        ]
    )
    num_changes = sum(num for _, _, num in shares)
    return EncodedChanges(payload, num_changes, _unsigned(totals), head, used)


def apply(
    payload: torch.Tensor,
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    data: torch.Tensor,
    places: Sequence[RunPlace],
) -> list[int]:
    """Overwrite elements once all old ones were found to be there; see ``apply_changes``."""
    for run, size, place in zip(runs, itemsizes, places, strict=True):
        rows = (run.num_elements - 1) // place.row * (place.stride - place.row) * bool(place.stride)
        end = place.at + (rows + run.num_elements) * size
        assert 0 <= place.at <= end <= data.numel(), "a run lies beside its memory"
    _checked_ends(payload, runs, itemsizes)
    found = [_apply(payload, runs, itemsizes, data, places, writes) for writes in (False, True)]
    return found[0]


class HostChanges:
    """Changes of a bucket that were read from a payload, beside what they would change.

    Args:
        runs, itemsizes: Runs of the bucket.
        data: Memory that the places begin from.
        places: Place of each run there; once more for each time that they lie there.
        at: Places in their runs, uint32 in the memory of an int32.
        olds, news: Bits, uint8; of each run from a multiple of 8 bytes on.
        ends: Of each run, the end of its changes; int64.
        sums: Number that the digest of each run changes by, modulo 2**64.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        itemsizes: Sequence[int],
        data: torch.Tensor,
        places: Sequence[Sequence[RunPlace]],
        at: torch.Tensor,
        olds: torch.Tensor,
        news: torch.Tensor,
        ends: torch.Tensor,
        sums: list[int],
    ) -> None:
        self._tables = [_table(runs, itemsizes, each) for each in places]
        self._data, self._at, self._olds, self._news, self._ends = data, at, olds, news, ends
        self.sums = sums
        self.num_bytes = at.nbytes + olds.nbytes + news.nbytes
        """Memory of the lists, kept as long as this is."""

    def apply(self) -> None:
        """Write the new values; blocks."""
        self._write(self._news)

    def undo(self) -> None:
        """Write the former values where the new ones were written; blocks."""
        self._write(self._olds)

    def _write(self, values: torch.Tensor) -> None:
        library = _library()
        assert library is not None, "it works"
        for table in self._tables:
            library.weft_write(
                _at(table),
                ctypes.c_int64(len(table)),
                _at(self._at),
                _at(values),
                _at(self._ends),
                _at(self._data),
            )


def read(
    payload: torch.Tensor,
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    data: torch.Tensor,
    places: Sequence[Sequence[RunPlace]],
) -> HostChanges:
    """Read changes, and the elements that they change; write nothing.

    Args:
        data: Memory that the places begin from, which may end before they do. Kept.
        places: Places of the runs there, of less than 2**32 elements each; once more for each time
            that they lie there.

    Raises:
        DigestMismatchError: See ``apply_changes``.
    """
    ends = _checked_ends(payload, runs, itemsizes)
    num = int(ends[-1])
    at = torch.empty(num, dtype=torch.int32)
    olds, news = torch.empty(2, num * max(itemsizes) + 8 * len(runs), dtype=torch.uint8)
    lists = (at, olds, news, ends)
    sums = _apply(payload, runs, itemsizes, data, places[0], False, lists)
    return HostChanges(runs, itemsizes, data, places, *lists, sums)


def _checked_ends(
    payload: torch.Tensor, runs: Sequence[Run], itemsizes: Sequence[int]
) -> torch.Tensor:
    """Check the lengths in a payload; return where each run's changes end among all, int64.

    Raises:
        DigestMismatchError: It is malformed.
    """
    library = _library()
    assert library is not None, "it works"
    table, ends = _table(runs, itemsizes), torch.zeros(len(runs), dtype=torch.int64)
    wrong = library.weft_check(
        _at(payload),
        ctypes.c_int64(payload.numel()),
        _at(table),
        ctypes.c_int64(len(runs)),
        _at(ends),
    )
    if wrong:
        raise malformed(_WRONG[wrong])
    return ends


def _apply(
    payload: torch.Tensor,
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    data: torch.Tensor,
    places: Sequence[RunPlace],
    writes: bool,
    lists: Sequence[torch.Tensor] | None = None,
) -> list[int]:
    """Read a payload whose lengths were checked; write, or list, what it changes."""
    library = _library()
    assert library is not None, "it works"
    table = _table(runs, itemsizes, places)
    listed = [None] * 4 if lists is None else [_at(each) for each in lists]

    def share(first: int, end: int) -> tuple[int, torch.Tensor]:
        sums, scratch = torch.zeros(2, len(runs), dtype=torch.int64), _scratch(library)
        wrong = library.weft_apply(
            _at(payload),
            _at(table),
            ctypes.c_int64(len(runs)),
            _at(column_weights(HOST)),
            _at(data),
            ctypes.c_int(writes),
            ctypes.c_int64(first),
            ctypes.c_int64(end),
            _at(sums[0]),
            _at(sums[1]),
            *listed,
            _at(scratch),
        )
        return wrong, sums

    shares = _by_threads(share, head_bytes(runs) // 8 - len(runs))
    for wrong, _ in shares:
        if wrong:
            raise malformed(_WRONG[wrong])
    old_sums, changes = torch.stack([sums for _, sums in shares]).sum(0)
    differ = (old_sums != payload[: 8 * len(runs)].view(torch.int64)).nonzero().view(-1).tolist()
    if differ and not writes:
        raise not_the_base(runs[differ[0]])
    return _unsigned(changes)


def _by_threads(share: Callable[[int, int], _T], num_blocks: int) -> list[_T]:
    """Call a function with the first block and the end of each of some shares, on as many threads
    as torch computes with; C runs beside Python."""
    num = max(1, min(torch.get_num_threads(), num_blocks // _LEAST_BLOCKS))
    edges = pairwise(num_blocks * nth // num for nth in range(num + 1))
    return side_by_side([partial(share, *each) for each in edges])


def _unsigned(sums: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in sums.tolist()]


def _table(
    runs: Sequence[Run],
    itemsizes: Sequence[int],
    places: Sequence[RunPlace] | None = None,
    addresses: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the runs as ``changes.c`` has them: where in memory, and where else."""
    shapes = [
        (run.num_elements, size, run.first, run.count, run.stride)
        for run, size in zip(runs, itemsizes, strict=True)
    ]
    places = places or packed_places(runs, itemsizes)
    rows = [
        (place.at, address, *shape, place.row, place.stride)
        for shape, place, address in zip(shapes, places, addresses or repeat(0), strict=False)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def _scratch(library: ctypes.CDLL) -> torch.Tensor:
    return torch.empty(library.weft_scratch_bytes(), dtype=torch.uint8)


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
