"""Rival process of the same trainer that holds a lease: wait, take over, or give up.

A restarted trainer must wait for the lease of its former process, which nobody released. Two
trainers that were started with one name by mistake must be told at once. They are told apart by
whether the holder shows a sign of life after the other one asked, or is known to have ended on this
machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft_rl.rpc.codec import timestamp_to_proto
from weft_rl.v1 import publish_pb2 as pb

# Start times are computed from the clock of the boot, which adjustments move a little.
_SAME_START_SECONDS = 2.0
_PROC = Path("/proc")


def this_process() -> pb.TrainerProcess:
    """Describe the calling process to other processes of its trainer."""
    pid = os.getpid()
    return pb.TrainerProcess(
        host=socket.gethostname()[:128],
        host_key=host_key(),
        pid=pid,
        start_time=timestamp_to_proto(_start_time(pid) or 0.0),
    )


def has_ended(holder: Mapping[str, str]) -> bool:
    """Return whether a process is known to be gone; false where that cannot be known.

    Args:
        holder: ``host_key``, ``pid`` and ``start_time``, the metadata of POLICY_OWNED.
    """
    pid = int(holder.get("pid") or 0)
    if not pid or not host_key() or holder.get("host_key") != host_key():
        return False
    started = _start_time(pid)
    return started is None or abs(started - float(holder["start_time"])) > _SAME_START_SECONDS


def is_this_process(holder: Mapping[str, str]) -> bool:
    """Return whether the holder of a lease is the calling process itself."""
    return holder.get("host_key") == host_key() != "" and holder.get("pid") == str(os.getpid())


@cache
def host_key() -> str:
    """Return a key of this boot of the machine and its namespace of process ids.

    Containers that share a host's name do not share their processes. Empty where /proc is not
    there.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat(_PROC / 'self/ns/pid').st_ino}"
    except OSError:
        return ""


def _start_time(pid: int) -> float | None:
    """Return the start time of a process, in seconds since 1970; None if it has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
        boot = next(
            float(line.split()[1])
            for line in (_PROC / "stat").read_text().splitlines()
            if line.startswith("btime ")
        )
    except (OSError, StopIteration):
        return None
    # The command's name may hold anything; what follows its last ")" has fixed columns
    # (proc_pid_stat(5): 3 is the state, 22 the start in clock ticks since the boot).
    columns = stat.rpartition(")")[2].split()
    if columns[0] in "ZX":
        return None
    return boot + int(columns[19]) / os.sysconf("SC_CLK_TCK")


@dataclass
class Rival:
    """Knowledge of a lease's holder from successive refusals of one acquisition.

    Args:
        takeover: True if the holder is to be displaced even if it lives.
    """

    takeover: bool
    _first: tuple[str, str] | None = None

    def displaced_token(self, holder: Mapping[str, str]) -> int:
        """Return the token of the lease to take over now; 0 to wait.

        Args:
            holder: Metadata of the last refusal (POLICY_OWNED).
        """
        token = int(holder.get("fencing_token") or 0)
        return token if self.takeover or has_ended(holder) else 0

    def is_alive(self, holder: Mapping[str, str]) -> bool:
        """Return whether the lease was renewed, or taken by another process, since the first
        refusal."""
        seen = holder.get("fencing_token", ""), holder.get("num_renewals", "")
        if self._first is None:
            self._first = seen
        return seen != self._first


def describe(trainer_id: str, policy: str, holder: Mapping[str, str], text: str) -> str:
    """Return why a push is refused whose policy is held by a living process of this trainer.

    Args:
        text: The refusal's own message, which names the process.
    """
    own = is_this_process(holder)
    who = "another Publisher of this very process" if own else "another process"
    return (
        f"{who} runs as trainer {trainer_id!r} and renews its lease of {policy!r}: {text}. Give "
        "each trainer an id of its own, end the other one, or take its policies over with "
        "Publisher(takeover=True)"
    )
