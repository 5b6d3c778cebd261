"""Memory of this host, as a process may use it."""

from __future__ import annotations

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
#: Memory that copies of weights leave to everything else.
_RESERVE_BYTES = 2**30


def why_no_room(num_bytes: int, held_bytes: int = 0) -> str:
    """Return the reason why weights cannot be copied to the host's memory; empty if there is room.

    Args:
        num_bytes: Bytes of the copy; where ranks share a host and ask at the same time, of all.
        held_bytes: Bytes that were allocated for it already.
    """
    available, where = available_memory()
    if max(0, num_bytes - held_bytes) <= max(0, available - _RESERVE_BYTES):
        return ""
    return f"its copy would take {num_bytes:,} bytes, and the {where} has {available:,} left"


def available_memory() -> tuple[int, str]:
    """Return the bytes available to this process, and what limits them: the machine or its
    container."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((_GROUP / limit).read_text()) - int((_GROUP / used).read_text())
        except (OSError, ValueError):  # another version of cgroups, or no limit ("max")
            continue
        if left < available:
            return max(0, left), "memory of this container"
    return available, "memory of this machine"
