"""Connections that have begun to speak; those that stay silent delay nobody."""

from __future__ import annotations

import select
import socket
from collections import OrderedDict
from typing import Final

from weft_rl.ipc.sockets import close_in_children

#: Connections accepted in one turn, so that others are heard between two.
_MAX_ACCEPTED: Final = 512


class Arrivals:
    """Connections to a listening socket, from ``accept`` until their first bytes.

    Whoever connects to Weft's sockets speaks at once. A connection that stays silent is kept, but
    no more of them than ``max_silent``: the oldest make room. Used by one thread.

    Args:
        listener: Listening Unix socket; it is made non-blocking, and stays its owner's.
        max_silent: Silent connections that are kept.
    """

    def __init__(self, listener: socket.socket, max_silent: int) -> None:
        listener.setblocking(False)
        self._listener, self._max_silent = listener, max_silent
        self._silent: OrderedDict[int, socket.socket] = OrderedDict()
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``take`` has something to do, for
        ``selectors``."""
        return self._epoll.fileno()

    def take(self, timeout_seconds: float | None = 0.0) -> list[socket.socket]:
        """Return connections that have begun to speak, blocking sockets that are the caller's.

        Args:
            timeout_seconds: Longest wait for anything to do; None waits without limit.

        Raises:
            OSError: No connection can be accepted: no descriptor is free, say, or the listener was
                shut down.
        """
        events = dict(self._epoll.poll(timeout_seconds))
        listening = events.pop(self._listener.fileno(), 0)
        if listening & select.EPOLLHUP:
            raise ConnectionAbortedError("the listener was shut down")
        speaking = []
        for number in events:
            self._epoll.unregister(number)
            speaking.append(self._silent.pop(number))
        if listening:
            self._accept(speaking)
        return speaking

    def close(self) -> None:
        """Close the silent connections; the listener stays open."""
        self._epoll.close()
        for sock in self._silent.values():
            sock.close()
        self._silent.clear()

    def _accept(self, speaking: list[socket.socket]) -> None:
        """Accept connections; add those to ``speaking`` that have spoken."""
        for _ in range(_MAX_ACCEPTED):
            try:
                connected, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                if speaking:  # it is raised again by the next call
                    return
                raise
            connected.setblocking(True)
            if _has_spoken(connected):
                speaking.append(connected)
                continue
            close_in_children(connected)
            self._silent[connected.fileno()] = connected
            self._epoll.register(connected, select.EPOLLIN)
            if len(self._silent) > self._max_silent:
                number, oldest = self._silent.popitem(last=False)
                self._epoll.unregister(number)
                oldest.close()


def _has_spoken(connected: socket.socket) -> bool:
    """Return whether the peer has said something, or has gone."""
    try:
        connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # its reader finds out
        return True
    return True
