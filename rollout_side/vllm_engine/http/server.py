"""vLLM's OpenAI application on an event loop that is not its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from rollout_side.ticks import seconds_to_tick
from weft.contract.errors import InvalidRequestError, PeerUnavailableError

_POLL_SECONDS = 0.01


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one.

    Raises:
        InvalidRequestError: The address cannot be had; says why.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise InvalidRequestError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror or error}"
        ) from error
    return sock


class _Server(uvicorn.Server):  # type: ignore[misc]  # uvicorn is not read by mypy
    """Uvicorn without signal handlers, which belong to the process's composer, and without
    its looking ten times a second whether it is to end."""

    def __init__(self, config: Any) -> None:
        self._ending = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Set by whoever ends it, on its event loop; it ends at once."""
        return self._ending.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._ending.set()
        else:
            self._ending.clear()

    async def main_loop(self) -> None:
        """Uvicorn's, once a second: it counts tenths of one."""
        tenths = 0
        while not await self.on_tick(tenths):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick()):
                    await self._ending.wait()
            tenths += 10

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """An ASGI application on a bound socket.

    Args:
        app: What to serve.
        sock: Bound; owned and closed by this object.
        tls: uvicorn's ``ssl_*`` settings; empty for plain HTTP.
        settings: Further settings of ``uvicorn.Config``.
    """

    def __init__(
        self, app: Any, sock: socket.socket, *, tls: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        config = uvicorn.Config(app, **tls, **settings)
        self.server: uvicorn.Server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._sock.getsockname()[1])

    async def start(self, timeout_seconds: float = 30.0) -> None:
        """Listen; returns once connections are taken, at once if they are already.

        Raises:
            PeerUnavailableError: The application did not start.
        """
        if self._task is None:
            self._task = asyncio.create_task(self.server.serve(sockets=[self._sock]))
        end = asyncio.get_running_loop().time() + timeout_seconds
        while not self.server.started:
            if self._task.done() or asyncio.get_running_loop().time() > end:
                raise PeerUnavailableError("vLLM's HTTP application did not start")
            await asyncio.sleep(_POLL_SECONDS)

    async def stopped(self, timeout_seconds: float) -> bool:
        """Wait for it to stop, for whatever reason; returns whether it has."""
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
