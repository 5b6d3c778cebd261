"""What a process holds, read from /proc."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.waits import until

# As /proc shows a segment of rollout_side.memory.segment.
_SEGMENT = re.compile(r"/memfd:weft\b")


@dataclass(frozen=True)
class Holding:
    """What one process holds at one moment."""

    threads: int
    descriptors: int
    segments: int
    """Shared memory segments that it has mapped or open."""
    memory_bytes: int
    """Its proportional share of resident memory (PSS), but of mapped files, whose pages other
    processes come to share and leave."""


def members(session: int) -> list[int]:
    """Pids of the processes of a session, which a ``Process`` leads; ascending."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return sorted(found)


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def await_ended(pids: Iterable[int], seconds: float, of: str) -> None:
    """Wait until processes have ended; the error says whose they were."""

    def left() -> list[int]:
        return [pid for pid in pids if is_running(pid)]

    until(lambda: not left(), seconds, why=lambda: f"{of} left processes {left()} behind")


def title(pid: int) -> str:
    """What a process calls itself; empty when it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return b" ".join(words).decode(errors="replace").strip()


def holding(pid: int) -> Holding:
    """What a process holds now.

    Raises:
        OSError: It has ended.
    """
    root = Path(f"/proc/{pid}")
    maps = (root / "maps").read_text().splitlines()
    mapped = {line.split()[4] for line in maps if _SEGMENT.search(line)}
    descriptors, opened = _descriptors(root / "fd")
    return Holding(
        threads=len(list((root / "task").iterdir())),
        descriptors=descriptors,
        segments=len(mapped | opened),
        memory_bytes=_pss(root),
    )


def least(holdings: Iterable[Holding]) -> Holding:
    """The least of each figure: what was there at every look, not what came and went."""
    seen = list(holdings)
    return Holding(
        threads=min(h.threads for h in seen),
        descriptors=min(h.descriptors for h in seen),
        segments=min(h.segments for h in seen),
        memory_bytes=min(h.memory_bytes for h in seen),
    )


def _descriptors(directory: Path) -> tuple[int, set[str]]:
    """How many are open, and the inodes of those that are segments."""
    count, segments = 0, set()
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += 1
            if _SEGMENT.search(os.readlink(entry)):
                segments.add(str(entry.stat().st_ino))
    return count, segments


def _pss(root: Path) -> int:
    lines = (root / "smaps_rollup").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines[1:])}
    return 1024 * (sizes["Pss"] - sizes.get("Pss_File", 0))
