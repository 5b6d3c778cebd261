"""Sockets that forked children must not keep.

A peer finds out that a process has died when its sockets close. A child that it forked (a worker
that loads data, say) has a copy of each, and would keep them open.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import Final

_SOCKETS: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Close a socket in each child that this process forks from now on, which takes nothing from
    this process."""
    _SOCKETS.add(sock)


def _close_inherited() -> None:
    for sock in _SOCKETS:
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
