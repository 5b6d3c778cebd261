"""Listeners, which hear only connections that speak; those that stay silent delay nobody."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from weft_rl.descriptors import bounded, is_shortage
from weft_rl.ipc.connection import close_in_children

_log = logging.getLogger(__name__)

#: Connections accepted in one turn, so that others are heard between two.
_MAX_ACCEPTED: Final = 512
#: Peers that say nothing, or not enough, and then are gone.
_HUNG_UP: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
# After an error that is not the listener's end.
_RETRY_SECONDS: Final = 0.1


class NewConnections:
    """Connections to a listening socket, from ``accept`` until they have said hello.

    Whoever connects to Weft's sockets speaks at once. A connection that stays silent is kept, but
    no more of them than ``max_silent``, or where the process has no descriptor for another: the
    oldest make room. Used by one thread.

    Args:
        listener: Listening socket; it is made non-blocking, and stays its owner's.
        max_silent: Silent connections that are kept; fewer where the process may open few files.
        hello_bytes: Bytes that a connection says before it is no longer silent.
    """

    def __init__(self, listener: socket.socket, max_silent: int, hello_bytes: int = 1) -> None:
        listener.setblocking(False)
        self._listener, self._hello_bytes = listener, hello_bytes
        self._max_silent = bounded(max_silent, 1)
        self._silent: OrderedDict[int, socket.socket] = OrderedDict()
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``take`` has something to do, for
        ``selectors``."""
        return self._epoll.fileno()

    def take(self, timeout_seconds: float | None = 0.0) -> list[socket.socket]:
        """Return connections that have said hello, or are gone, as blocking sockets that are the
        caller's.

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
        for number, event in events.items():
            if event & _HUNG_UP or self._has_spoken(self._silent[number]):
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
            except ConnectionAbortedError:  # it has gone again
                continue
            except OSError as error:
                if is_shortage(error) and self._silent:
                    self._drop_oldest()
                    continue
                if speaking:  # it is raised again by the next call
                    return
                raise
            connected.setblocking(True)
            if self._has_spoken(connected):
                speaking.append(connected)
                continue
            close_in_children(connected)
            self._silent[connected.fileno()] = connected
            # Told of each arrival once: part of a hello must not wake anybody again and again.
            self._epoll.register(connected, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
            if len(self._silent) > self._max_silent:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        number, oldest = self._silent.popitem(last=False)
        self._epoll.unregister(number)
        oldest.close()

    def _has_spoken(self, connected: socket.socket) -> bool:
        """Return whether the peer has said hello, or has gone without a word."""
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        try:
            said = connected.recv(self._hello_bytes, flags)
        except BlockingIOError:
            return False
        except OSError:  # its reader finds out
            return True
        return not said or len(said) >= self._hello_bytes


class Listener:
    """Thread that passes connections which have said hello to a function, until it is closed.

    Args:
        listening: Listening socket, owned from now on.
        serve: Function that is given each of them, a blocking socket that is its own; returns soon,
            never raises.
        name: Name of the thread.
        max_silent: See ``NewConnections``.
        hello_bytes: See ``NewConnections``.

    Raises:
        OSError: No descriptor is free; the socket is closed.
    """

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[socket.socket], None],
        *,
        name: str,
        max_silent: int,
        hello_bytes: int = 1,
    ) -> None:
        self._listening, self._serve, self._is_closed = listening, serve, False
        close_in_children(listening)
        with contextlib.ExitStack() as unused:
            unused.callback(listening.close)
            self._arrivals = NewConnections(listening, max_silent, hello_bytes)
            unused.callback(self._arrivals.close)
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
            unused.pop_all()

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Accept no further connection; blocks for ``serve``, at most ``timeout_seconds``. A second
        call does nothing."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            # Whoever waits for arrivals is woken by this, not by ``close``.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                try:
                    arrived = self._arrivals.take(None)
                except OSError as error:
                    if not self._is_closed:
                        _log.warning("%s accepts no connection: %s", self._thread.name, error)
                        time.sleep(_RETRY_SECONDS)
                    continue
                for connected in arrived:
                    self._serve(connected)
        finally:
            self._arrivals.close()
            self._listening.close()
