"""Cables between processes of a test: TCP connections that can be listened to, stopped and cut."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import defaultdict
from collections.abc import Callable


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
        """What who connected has said at first."""
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
        connect: ``socket.create_connection``, which ``connect`` takes the place of.
    """

    def __init__(self, connect: Callable[..., socket.socket]) -> None:
        self._connect = connect
        self.cables: dict[str, list[Cable]] = defaultdict(list)
        self.refuses: set[str] = set()
        """Hosts that cannot be reached."""

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        """Connect to an address by a cable."""
        if address[0] in self.refuses:
            raise ConnectionRefusedError(f"{address[0]} is cut off")
        far = socket.socket()
        # Little is on its way where nobody reads.
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        far.settimeout(timeout)
        try:
            far.connect(address)
        except OSError:
            far.close()
            raise
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = self._connect(server.getsockname(), timeout)
            accepted, _ = server.accept()
        self.cables[address[0]].append(Cable(accepted, far))
        return near

    def close(self) -> None:
        """Cut all of them."""
        for cables in self.cables.values():
            for cable in cables:
                cable.close()
