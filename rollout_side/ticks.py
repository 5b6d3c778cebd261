"""One beat for what a process does each second.

Each wake-up of an idle process costs more than what is done at it, so those of one process
wake together: at whole seconds of the monotonic clock.
"""

from __future__ import annotations

import time


def seconds_to_tick() -> float:
    """How long it is to the next whole second."""
    return 1.0 - time.monotonic() % 1.0
