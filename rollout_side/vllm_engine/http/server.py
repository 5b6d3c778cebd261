"""Server of vLLM's OpenAI application, on the event loop of the replica."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from itertools import islice
from typing import Any

import uvicorn

from rollout_side.waits import seconds_to_tick
from weft_rl.contract.errors import InvalidRequestError, PeerUnavailableError
from weft_rl.descriptors import bounded

_POLL_SECONDS = 0.01
#: Connections that wait to be taken, as uvicorn has it.
_BACKLOG = 2048
#: Connections of a replica; fewer where the process may not open so many files.
MAX_CONNECTIONS = 16_384
# Those that are looked at for one that asks for nothing.
_MAX_LOOKED_AT = 64


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that no other process can take its port.

    Port 0 takes a free one. A client that connects waits until it is served. A socket that is only
    bound could share its port with another process's, until one of the two listened.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(
            f"cannot listen on {host}:{port} for HTTP: {why}; give another --http-port (0 takes a "
            "free one)"
        ) from error
    return sock


class _Server(uvicorn.Server):
    """Uvicorn server without signal handlers, which belong to the process, and without polling for
    its end ten times a second."""

    def __init__(self, config: Any) -> None:
        self._ending = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """True if the server is to end, which it does at once; set on its event loop."""
        return self._ending.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._ending.set()
        else:
            self._ending.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, of which there are never too many."""
        protocol = _bounded_protocol(self.config.http_protocol_class, bounded(MAX_CONNECTIONS, 2))
        self.config.http_protocol_class = protocol
        await super().startup(sockets)

    async def main_loop(self) -> None:
        """Run Uvicorn's ticks once a second, though it counts tenths of a second."""
        tenths = 0
        while not await self.on_tick(tenths):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick()):
                    await self._ending.wait()
            tenths += 10

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _bounded_protocol(protocol: Any, most: int) -> Any:
    """Return a protocol of Uvicorn's for at most so many connections: of more, the oldest ends that
    asks for nothing, or the newest if all are at work."""
    connected: dict[Any, None] = {}

    def make_room(newest: Any) -> None:
        for each in list(islice(connected, _MAX_LOOKED_AT)):
            del connected[each]
            if each.cycle is None or each.cycle.response_complete:
                each.transport.abort()
                return
            connected[each] = None  # at work: looked at again after the others
        newest.transport.abort()

    class BoundedConnection(protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(connected) >= most:
                make_room(self)
            connected[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            connected.pop(self, None)
            super().connection_lost(exc)

    return BoundedConnection


class OpenAiServer:
    """An ASGI application on a socket."""

    def __init__(
        self, app: Any, sock: socket.socket, *, tls: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        config = uvicorn.Config(app, **tls, **settings)
        self.server: uvicorn.Server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port that was bound."""
        return int(self._sock.getsockname()[1])

    async def start(self, timeout_seconds: float = 30.0) -> None:
        """Start to serve; return once connections are accepted, at once if they are already."""
        if self._task is None:
            self._task = asyncio.create_task(self.server.serve(sockets=[self._sock]))
        end = asyncio.get_running_loop().time() + timeout_seconds
        while not self.server.started:
            if self._task.done() or asyncio.get_running_loop().time() > end:
                raise PeerUnavailableError(f"vLLM's HTTP application did not start{self._why()}")
            await asyncio.sleep(_POLL_SECONDS)

    def _why(self) -> str:
        """Return the end of an error message: what has ended the server, if that is known."""
        task = self._task
        if task is None or not task.done() or task.cancelled() or task.exception() is None:
            return "; its log gives the cause"
        return f": {task.exception()!r}"

    async def stopped(self, timeout_seconds: float) -> bool:
        """Wait for the server to stop, for whatever reason; return whether it has."""
        if self._task is None:
            return True
        done, _ = await asyncio.wait({self._task}, timeout=timeout_seconds)
        return bool(done)

    async def stop(self, timeout_seconds: float) -> None:
        """Stop listening, let running requests end, cut them at the deadline."""
        self.server.should_exit = True
        if self._task is not None:
            _, pending = await asyncio.wait({self._task}, timeout=timeout_seconds)
            if pending:
                self.server.force_exit = True
                _, pending = await asyncio.wait({self._task}, timeout=1.0)
            if pending:
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=1.0)
        self._sock.close()
