"""What a push does where its caller says nothing: alike for a ``Publisher`` and ``weft push``.

Here, and not in ``trainer_side``, since the command line shows its help without torch.
"""

from __future__ import annotations

from typing import Final, Literal

#: Which replicas must hold a version before it is committed: all that are ready when the
#: push begins, or at least so many.
Require = Literal["all"] | int
#: What becomes of an adapter that would be served over another base than its own.
OnBaseChange = Literal["warn", "refuse", "ignore"]

DEFAULT_REQUIRE: Final = "all"
#: Longest time of a push, waiting for replicas included.
DEFAULT_TIMEOUT_SECONDS = 600.0
#: Longest wait for a coordinator that was never reached.
DEFAULT_CONNECT_SECONDS = 5.0
DEFAULT_ON_BASE_CHANGE: Final = "warn"
