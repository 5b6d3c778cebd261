"""WSUM64 as its definition reads, word by word."""

from __future__ import annotations

MASK = 2**64 - 1
ROW = 4096


def mix(n: int) -> int:
    """Output ``n`` of SplitMix64 seeded with 0."""
    z = (n + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def by_definition(words: list[int]) -> int:
    """The comment of ``DIGEST_ALGORITHM_WSUM64``, word by word."""
    total = 0
    for i, word in enumerate(words):
        weight = 2 * mix(i // ROW) + 2 * mix(2**32 + i % ROW) + 1
        total += word * weight
    return total & MASK
