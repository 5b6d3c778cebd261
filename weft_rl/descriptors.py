"""Open files of this process: how many it may have, and how they are shared out.

Whoever connects takes one. So what a server accepts is bounded by the process's own limit, less
what it needs itself: nothing that the process does must fail because others connect.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

#: Open files that a server may need: each connection of a coordinator (see ``weft_rl.rpc.server``)
#: and each version of a replica has one, each trainer's side group eight.
WANTED: Final = 65_536
#: Errors of a process, and of a machine, that has no descriptor left.
SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE})
# Least that a bound is, however low the limit.
_LEAST: Final = 8


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files, which is 1024 in most shells, as far as the
    hard limit allows. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bounded(most: int, eighths: int) -> int:
    """Return ``most``, or so many eighths of the open files that this process may have, if these
    are fewer.

    The bounds of what one process accepts add up to six eighths at most. The rest is for its own
    files, and for connections that it makes.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    return min(most, max(_LEAST, limit * eighths // 8))


def is_shortage(error: OSError) -> bool:
    """Return whether an error is that of a process without a free descriptor."""
    return error.errno in SHORTAGES


def is_short() -> bool:
    """Return whether this process has no free descriptor now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return is_shortage(error)
    return False
