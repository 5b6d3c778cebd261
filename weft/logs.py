"""How Weft's processes log."""

from __future__ import annotations

import logging
import os

#: Environment variable that says from which level on; child processes inherit it.
LEVEL_VARIABLE = "WEFT_LOG_LEVEL"
_NAMES = ("weft", "rollout_side", "trainer_side")


def configure(level: str) -> None:
    """Write our own lines, from ``level`` on, to the standard error. Idempotent.

    By a handler of our own: libraries configure the root logger, or find that another
    one has.

    Raises:
        ValueError: There is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"there is no log level {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in _NAMES:
        logger = logging.getLogger(name)
        logger.setLevel(number)
        logger.handlers[:] = [handler]
        logger.propagate = False


def configure_as_parent() -> None:
    """Log as ``weft``, which started this process, told it to."""
    configure(os.environ.get(LEVEL_VARIABLE, "warning"))
