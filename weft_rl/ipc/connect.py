"""Connecting to a Unix socket within a time."""

from __future__ import annotations

import socket
import time
from typing import Final

# Between two attempts to connect to who has not accepted yet.
_RETRY_SECONDS: Final = 0.005


def connect_unix(connecting: socket.socket, address: str, timeout_seconds: float) -> None:
    """Connect a socket, which has that timeout from now on; blocks while the backlog of who
    listens is full. The kernel waits for that only where a socket has no timeout.

    Raises:
        BlockingIOError: It was full for as long.
        OSError: Nobody listens.
    """
    deadline = time.monotonic() + timeout_seconds
    connecting.settimeout(timeout_seconds)
    while True:
        try:
            connecting.connect(address)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return
