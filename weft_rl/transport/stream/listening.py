"""The listener of a process's stream lanes: one port for all of them."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from weft_rl.ipc.connection import PeerError
from weft_rl.ipc.listener import Listener
from weft_rl.transport.stream.lane import HELLO_BYTES, Lane
from weft_rl.transport.stream.messages import LaneHello, StreamError

_log = logging.getLogger(__name__)

#: First port to listen on. Processes of one host take the following ones. Where it is not set, the
#: system chooses.
PORT_VARIABLE: Final = "WEFT_STREAM_PORT"
#: Ports that are tried from there on.
_NUM_PORTS: Final = 64
_LAST_PORT: Final = 65_535
# Connections that have said nothing (yet).
_MAX_SILENT: Final = 256

#: Takes over a connection that has said which lane it wants; returns soon, never raises.
Admit = Callable[[Lane, LaneHello], None]


class LaneListener:
    """Listener of one address, from the first lane there to the last."""

    def __init__(self, host: str) -> None:
        self._admit: dict[bytes, Admit] = {}
        self._lock = threading.Lock()
        listening = _listening_socket(host)
        #: Port that it listens on.
        self.port: int = listening.getsockname()[1]
        self._listener = Listener(
            listening, self._serve, name="weft-lanes", max_silent=_MAX_SILENT,
            hello_bytes=HELLO_BYTES,
        )  # fmt: skip

    def open(self, key: bytes, admit: Admit) -> None:
        """Pass connections to a lane on."""
        with self._lock:
            self._admit[key] = admit

    def shut(self, key: bytes) -> bool:
        """Pass no more on to a lane; return whether there is no other."""
        with self._lock:
            self._admit.pop(key, None)
            return not self._admit

    def close(self) -> None:
        """End the thread."""
        self._listener.close()

    def _serve(self, connected: socket.socket) -> None:
        try:
            lane = Lane(connected, f"the process at {_address(connected)}")
        except PeerError as error:
            _log.debug("refused on the port of lanes: %s", error)
            return
        try:
            lane.set_deadline(time.monotonic())  # all of it has come
            hello = lane.hear(LaneHello)
            with self._lock:
                admit = self._admit.get(hello.key)
            if admit is None:
                raise StreamError(f"{lane.peer} asks for a lane that is not here")
        except PeerError as error:
            _log.debug("refused on the port of lanes: %s", error)
            lane.close()
            return
        admit(lane, hello)


_LISTENERS: dict[str, LaneListener] = {}
_lock = threading.Lock()


def why_unavailable() -> str:
    """Return why this process cannot take part; empty if it can."""
    if sys.platform != "linux":
        return "it is made for Linux"
    given = os.environ.get(PORT_VARIABLE) or "0"
    if not (given.isascii() and given.isdecimal() and int(given) <= _LAST_PORT - _NUM_PORTS):
        most = _LAST_PORT - _NUM_PORTS
        return f"{PORT_VARIABLE}={given[:40]!r} is no port from 1 to {most:,}"
    return ""


def open_lane(host: str, key: bytes, admit: Admit) -> int:
    """Listen for connections to a lane at an address of this machine; return the port.

    Raises:
        StreamError: Nothing can listen there.
    """
    with _lock:
        listener = _LISTENERS.get(host)
        if listener is None:
            try:
                listener = _LISTENERS[host] = LaneListener(host)
            except (OSError, RuntimeError, ValueError) as error:
                raise StreamError(f"no lane can be listened for at {host}: {error}") from error
        listener.open(key, admit)
        return listener.port


def shut_lane(host: str, key: bytes) -> None:
    """Listen no more for connections to a lane."""
    with _lock:
        listener = _LISTENERS.get(host)
        if listener is not None and listener.shut(key):
            del _LISTENERS[host]
            listener.close()


def _listening_socket(host: str) -> socket.socket:
    """Listen at an address of this machine. Where no interface has it, a router translates it: then
    at all addresses of its family."""
    if why := why_unavailable():
        raise StreamError(why)
    first = int(os.environ.get(PORT_VARIABLE) or 0)
    family, _, _, _, (address, _, *rest) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    for port in range(first, first + _NUM_PORTS) if first else (0,):
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((address, port, *rest))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                listening.bind(("", port))
                _log.info("no interface has %s: lanes are listened for at all of them", host)
            listening.listen(socket.SOMAXCONN)
        except OSError as error:
            listening.close()
            if not first or port == first + _NUM_PORTS - 1:
                raise
            _log.debug("port %d is taken: %s", port, error)
        else:
            return listening
    raise AssertionError("the last port returns or raises")


def address_of(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family of a member's address, and the address that a socket connects to.

    Raises:
        OSError: The name is not known.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address


def _address(connected: socket.socket) -> str:
    try:
        host, port = connected.getpeername()[:2]
    except OSError:
        return "an address that is gone"
    return f"{host}:{port}"


def _forget() -> None:
    _LISTENERS.clear()  # their threads are the parent's


os.register_at_fork(after_in_child=_forget)
