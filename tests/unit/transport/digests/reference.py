"""WSUM64 as its definition reads, word by word."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

MASK = 2**64 - 1
ROW = 4096


@lru_cache(maxsize=2**17)
def mix(n: int) -> int:
    """Output ``n`` of SplitMix64 seeded with 0."""
    z = (n + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def by_definition(words: list[int], places: Sequence[int] | None = None) -> int:
    """The comment of ``DIGEST_ALGORITHM_WSUM64``, word by word.

    Args:
        places: Where each word lies in its tensor, if not one behind the other from the first.
    """
    total = 0
    for i, word in zip(range(len(words)) if places is None else places, words, strict=True):
        weight = 2 * mix(i // ROW) + 2 * mix(2**32 + i % ROW) + 1
        total += word * weight
    return total & MASK
