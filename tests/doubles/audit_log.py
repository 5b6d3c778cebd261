"""What servers of this process write to the audit log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from weft_rl.rpc.security import guard


@contextmanager
def audit_lines() -> Iterator[list[dict[str, str]]]:
    """The lines that are written meanwhile, parsed; the list grows as they come."""
    lines: list[dict[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(record.getMessage()))

    handler, level = Keep(), guard.audit_log.level
    guard.audit_log.addHandler(handler)
    guard.audit_log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        guard.audit_log.removeHandler(handler)
        guard.audit_log.setLevel(level)
