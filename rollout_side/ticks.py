"""Shared one-second beat for the periodic work of a process.

Each wake-up of an idle process costs more than the work done at it. So those of one process wake
together, at whole seconds of the monotonic clock.
"""

from __future__ import annotations

import time


def seconds_to_tick() -> float:
    """Return the seconds until the next whole second."""
    return 1.0 - time.monotonic() % 1.0
