"""Detection of what SQLite would silently drop from a catalog's write-ahead log.

A coordinator that was killed leaves its newest transactions in the file CATALOG-wal. SQLite
reads them up to the first that is not whole: the last one is not, when power was lost while
it was written. SQLite takes a damaged one for that end, and drops all that came after it.

Source: https://www.sqlite.org/fileformat2.html, section 4, The Write-Ahead Log.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_MAGIC: Final = (0x377F0682, 0x377F0683)  # words are little-endian, and big-endian
_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_SUMMED_OF_FRAME: Final = 8


class Dropped(NamedTuple):
    """Part of a log that SQLite would drop."""

    transactions: int
    """Number of transactions that ended after the first damage."""
    header: bool = False
    """True if the damage is in the header, so that nothing can be read."""

    @property
    def is_torn_end(self) -> bool:
        """True if it may be the end of a log whose last write a power cut interrupted.

        Nobody was told that such a write had succeeded.
        """
        return not self.header and self.transactions <= 1


def find_dropped(catalog: Path) -> Dropped:
    """Find damage in a catalog's log before SQLite reads it; O(its size), a second per 30 MB."""
    try:
        data = Path(f"{catalog}-wal").read_bytes()
    except FileNotFoundError:
        return Dropped(0)
    if len(data) <= _HEADER.size:
        return Dropped(0)  # no frame was ever written
    magic, _, page_bytes, _, salt_1, salt_2, *checksum = _HEADER.unpack_from(data)
    order = "<" if magic == _MAGIC[0] else ">"
    total = _sum(data[: _HEADER.size - 8], order, (0, 0))
    if magic not in _MAGIC or total != tuple(checksum) or page_bytes < 512:
        return Dropped(0, header=True)
    whole, dropped = True, 0
    for frame in _frames(data, page_bytes):
        _, ends_transaction, *salts, sum_1, sum_2 = _FRAME.unpack_from(frame)
        if whole:
            total = _sum(frame[:_SUMMED_OF_FRAME] + frame[_FRAME.size :], order, total)
            whole = salts == [salt_1, salt_2] and total == (sum_1, sum_2)
        # What is left of the log's former round has other salts.
        if not whole and salts == [salt_1, salt_2] and ends_transaction:
            dropped += 1
    return Dropped(dropped)


def _frames(data: bytes, page_bytes: int) -> Iterator[bytes]:
    size = _FRAME.size + page_bytes
    for first in range(_HEADER.size, len(data) - size + 1, size):
        yield data[first : first + size]


def _sum(data: bytes, order: str, total: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's checksum, two sums of 32 bits, continued from ``total``."""
    words = array("I", data)
    if (struct.pack("=I", 1) == struct.pack("<I", 1)) != (order == "<"):
        words.byteswap()
    first, second = total
    for i in range(0, len(words), 2):
        first = (first + words[i] + second) & 0xFFFFFFFF
        second = (second + words[i + 1] + first) & 0xFFFFFFFF
    return first, second
