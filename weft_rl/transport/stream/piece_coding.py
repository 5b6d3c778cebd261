"""Lossless coding of pieces of weights for slow links: a third fewer bytes of bfloat16.

The upper byte of a 16-bit float, its sign and the most of its exponent, holds less than 3 bits in
weights: it is written in Huffman's code, the lower byte as it is (the observation of DFloat11 and
ZipNN). Any other bytes come out the same, and are sent as they are where that is shorter.

Source: docs/protocol.md, Streams.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

#: A link that carries fewer bytes a second gains by it: one core codes 0.42 GB/s, and decodes
#: 0.71 (``benchmarks.compression``).
SLOW_BYTES_PER_SECOND: Final = 160e6
#: A coded piece is sent if it has at most this share of the piece's bytes.
_MOST_SHARE: Final = 0.9
_RAW_DEFLATE: Final = -15


def encode_piece(piece: memoryview) -> bytes | None:
    """Code a piece.

    Returns:
        Its lower bytes, and behind them its upper bytes in raw DEFLATE; None where that is not
        shorter by a tenth.
    """
    if len(piece) % 2 or not piece:
        return None
    words = np.frombuffer(piece, "<u2")
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, 9, zlib.Z_HUFFMAN_ONLY)
    upper = coder.compress((words >> 8).astype(np.uint8).tobytes()) + coder.flush()
    if len(piece) // 2 + len(upper) > _MOST_SHARE * len(piece):
        return None
    return words.astype(np.uint8).tobytes() + upper


def decode_piece(coded: bytes | bytearray, piece: memoryview) -> bool:
    """Write a piece that was coded; return whether it could be: else it holds anything.

    Args:
        piece: Memory of the piece, of its size.
    """
    size = len(piece) // 2
    if not size or len(piece) % 2 or len(coded) < size:
        return False
    coder = zlib.decompressobj(_RAW_DEFLATE)
    try:
        upper = coder.decompress(memoryview(coded)[size:], size + 1)
    except zlib.error:
        return False
    if len(upper) != size or not coder.eof or coder.unused_data:
        return False
    words = np.frombuffer(upper, np.uint8).astype("<u2")
    words <<= 8
    words |= np.frombuffer(coded, np.uint8, size)
    # At once: a piece that is here already, and is being passed on, stays as it is.
    np.frombuffer(piece, "<u2")[:] = words
    return True
