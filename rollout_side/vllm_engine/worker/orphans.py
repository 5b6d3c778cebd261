"""Watch that ends the engine's processes when the replica's own process has been killed.

vLLM's engine process does not notice that the process which serves its API is gone,
and its workers only watch the engine's. Killed by SIGKILL (or for memory), a replica
would leave both behind, with all their device memory. The next one could not start
beside them. So each worker watches the replica's process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from pathlib import Path


def end_with(replica_pid: int) -> None:
    """Let this worker, and the engine's process above it, end when ``replica_pid`` has.

    Returns at once; the watch is a thread. Processes are held by descriptors, so a
    pid that is used again is never mistaken for the old one.

    Raises:
        OSError: There is no such process.
    """
    replica = os.pidfd_open(replica_pid)
    parent = os.getppid()
    # With one worker and no executor's processes, the parent is the replica itself.
    engine = os.pidfd_open(parent) if parent_of(parent) == replica_pid else None
    threading.Thread(
        target=_watch, args=(replica, engine), name="weft-watch-replica", daemon=True
    ).start()


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent.

    Raises:
        OSError: There is no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def _watch(replica: int, engine: int | None) -> None:
    poll = select.poll()
    poll.register(replica, select.POLLIN)
    poll.poll()
    if engine is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine, signal.SIGKILL)
    os._exit(1)  # nothing is left to tell, and nobody to tell it to
