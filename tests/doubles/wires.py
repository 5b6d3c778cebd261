"""Cables between processes of a test: TCP connections that can be listened to, stopped and cut."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_SECONDS = 5.0


class Cable:
    """A connection that goes through a thread of the test.

    Args:
        near: The end of whoever connected.
        far: Connection to whom it wanted.
    """

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self._ends = (near, far)
        self.to_near = bytearray()
        """All that has come back to who connected."""
        self.from_near = bytearray()
        """First words of who connected."""
        self._is_open = threading.Event()
        self._is_open.set()
        self.is_cut = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End both directions at once."""
        self.is_cut = True
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._is_open.set()

    def stop(self) -> None:
        """Carry nothing more, and tell nobody."""
        self._is_open.clear()

    def go_on(self) -> None:
        """Carry again."""
        self._is_open.set()

    def close(self) -> None:
        """Cut it, and wait for the thread."""
        self.cut()
        self._thread.join(5.0)
        for end in self._ends:
            end.close()

    def _carry(self) -> None:
        near, far = self._ends
        with contextlib.suppress(OSError):
            while not self.is_cut:
                readable, _, _ = select.select([near, far], [], [], 0.05)
                for end in readable:
                    content = end.recv(2**16)
                    self._is_open.wait()
                    if not content or self.is_cut:
                        self.cut()
                        return
                    if end is far:
                        self.to_near += content
                    elif not self.from_near:
                        self.from_near += content
                    (far if end is near else near).sendall(content)


class Wires:
    """Cables that are laid as members connect; by the host that was wanted.

    Args:
        address_of: Function that finds a member's address, which ``address_of`` takes the place of.
    """

    def __init__(self, address_of: Callable[[str, int], tuple[Any, Any]]) -> None:
        self._address_of = address_of
        self._laying: list[threading.Thread] = []
        self.cables: dict[str, list[Cable]] = defaultdict(list)
        self.refuses: set[str] = set()
        """Hosts that cannot be reached."""

    def address_of(self, host: str, port: int) -> tuple[Any, Any]:
        """Return the address of a fresh cable to a member, or one where nobody listens."""
        server = socket.create_server(("127.0.0.1", 0))
        near = server.family, server.getsockname()
        if host in self.refuses:
            server.close()
            return near
        lay = threading.Thread(target=self._lay, args=(server, host, port), daemon=True)
        self._laying.append(lay)
        lay.start()
        return near

    def _lay(self, server: socket.socket, host: str, port: int) -> None:
        server.settimeout(_SECONDS)
        with server, contextlib.suppress(OSError):
            accepted, _ = server.accept()
            family, address = self._address_of(host, port)
            far = socket.socket(family, socket.SOCK_STREAM)
            # Little is on its way where nobody reads.
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
            far.settimeout(_SECONDS)
            try:
                far.connect(address)
            except OSError:
                far.close()
                accepted.close()
                return
            self.cables[host].append(Cable(accepted, far))

    def close(self) -> None:
        """Cut all of them."""
        for lay in self._laying:
            lay.join(_SECONDS)
        for cables in self.cables.values():
            for cable in cables:
                cable.close()
