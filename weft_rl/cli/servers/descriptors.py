"""Limit on the files that a server may have open."""

from __future__ import annotations

import resource
from typing import Final

#: For all connections that a coordinator takes (see ``weft_rl.rpc.server``), and for a replica of
#: thousands of versions: each has one descriptor, each trainer's side group eight.
WANTED: Final = 65_536


def allow_descriptors() -> None:
    """Raise this process's soft limit of open files, which is 1024 in most shells, as far as it
    may. The processes that it starts inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
