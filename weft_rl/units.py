"""Quantities as people read them."""

from __future__ import annotations


def shown_bytes(number: float) -> str:
    """Format a number of bytes in a fitting unit, in three digits: ``16.4 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:
            value = number / size
            return f"{value:.{max(0, 2 - (value >= 9.995) - (value >= 99.95))}f} {unit}"
    return f"{number:.0f} B"


def shown_seconds(seconds: float) -> str:
    """Format a duration: ``42 s``, ``3 min``."""
    return f"{seconds:.0f} s" if seconds < 119.5 else f"{seconds / 60:.0f} min"
