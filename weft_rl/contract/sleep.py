"""Levels and times of sleep, alike for trainers, coordinator and replicas."""

from __future__ import annotations

from typing import Final, Literal

#: vLLM's levels: 1 moves the weights to host memory, 2 discards them.
SleepLevel = Literal[1, 2]
#: The level at which weights are discarded.
DISCARDS: Final = 2
#: What becomes of requests that run when a replica falls asleep.
WhenRunning = Literal["finish", "abort"]
#: What those may take to end where a caller says nothing.
DEFAULT_REQUESTS_SECONDS: Final = 60.0
#: What an engine may take to fall asleep once its requests have ended, and to wake.
SWITCH_SECONDS: Final = 180.0
