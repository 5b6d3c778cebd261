"""How Weft's processes log."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Literal, get_args

#: Environment variable that says from which level on; child processes inherit it.
LEVEL_VARIABLE = "WEFT_LOG_LEVEL"
#: Environment variable that says how lines are written; child processes inherit it.
FORMAT_VARIABLE = "WEFT_LOG_FORMAT"
LogFormat = Literal["text", "json"]
_NAMES = ("weft", "rollout_side", "trainer_side")
#: Its lines are JSON objects already.
_AUDIT = "weft.audit"


class JsonFormatter(logging.Formatter):
    """Writes a record as one line, a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, log_format: str = "text") -> None:
    """Write our own lines, from ``level`` on, to the standard error. Idempotent.

    By a handler of our own: libraries configure the root logger, or find that another
    one has. The audit log has one JSON object a line in either format.

    Raises:
        ValueError: There is no such level, or no such format.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"there is no log level {level!r}")
    if log_format not in get_args(LogFormat):
        raise ValueError(f"there is no log format {log_format!r}")
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    formatter = JsonFormatter() if log_format == "json" else text
    for name in _NAMES:
        _write(name, formatter).setLevel(number)
    _write(_AUDIT, logging.Formatter("%(message)s"))


def _write(name: str, formatter: logging.Formatter) -> logging.Logger:
    """Have a logger write to the standard error, and nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.propagate = False
    return logger


def configure_as_parent() -> None:
    """Log as ``weft``, which started this process, told it to."""
    level = os.environ.get(LEVEL_VARIABLE, "warning")
    configure(level, os.environ.get(FORMAT_VARIABLE, "text"))
