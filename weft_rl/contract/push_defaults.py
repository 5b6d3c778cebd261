"""Defaults of a push: alike for a ``Publisher`` and ``weft push``.

Here, and not in ``trainer_side``, since the command line shows its help without torch.
"""

from __future__ import annotations

from typing import Final, Literal

#: Which replicas must hold a version before it is committed: at least so many, whoever they
#: are, or all that are ready when the push begins.
Require = Literal["all"] | int

#: Whoever remains: the loss of a replica ends nobody's training.
DEFAULT_REQUIRE: Final = 1
#: Longest time of a push, waiting for replicas included.
DEFAULT_TIMEOUT_SECONDS = 600.0
#: Longest wait for a coordinator that was never reached.
DEFAULT_CONNECT_SECONDS = 5.0
#: Base of an adapter: found out, and a remark where the pool serves another.
DEFAULT_BASE: Final = "auto"
