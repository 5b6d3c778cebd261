"""Files of this process that have changed and are not used: their former content stays in force.

They are kept for the whole process, as its environment is: servers and channels share them.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path
from typing import Final

from weft_rl.contract.errors import InvalidRequestError

_log = logging.getLogger(__name__)

#: Of one file of certificates, tokens or rules.
MAX_FILE_BYTES: Final = 1 << 20


class UnusedFiles:
    """Files that are not used, each with the reason; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}

    def put(self, path: str, reason: str) -> None:
        """Note that a file is not used; logged once for each reason."""
        with self._lock:
            is_known = self._reasons.get(path) == reason
            self._reasons[path] = reason
        if not is_known:
            _log.error("%s is not used, what it said before is: %s", path, reason)

    def drop(self, path: str) -> None:
        """Note that a file is used as it stands."""
        with self._lock:
            was_there = self._reasons.pop(path, None) is not None
        if was_there:
            _log.info("%s can be used again, and is", path)

    def list(self) -> list[str]:
        """Return lines for messages, one a file."""
        with self._lock:
            return [f"{path}: {reason}" for path, reason in sorted(self._reasons.items())]


UNUSED_FILES: Final = UnusedFiles()


def stamp_of(path: str | Path) -> tuple[int, int, int]:
    """Return a stamp that changes when a file is replaced; cheap. Zeros where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)


def read_file(path: str | Path) -> bytes:
    """Read a regular file of at most ``MAX_FILE_BYTES``.

    Raises:
        InvalidRequestError: It cannot be read, is no regular file (a device or a pipe has no
            end), or is larger.
    """
    try:
        # A pipe that nobody writes to would not be opened without this.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidRequestError("it is no regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"it has more than {MAX_FILE_BYTES} bytes")
    return data
