"""HTTP server on a thread of its own, beside a process's event loop.

HTTP is Uvicorn's. Connections are taken here, for what Uvicorn does not bound or does not tell.
It lets a request's head take for ever, speaks either HTTP or HTTPS on a port, and keeps a peer's
certificate from the application.

Slow peers cost a connection each: there is one thread, however many peers there are. A connection
has ``CONNECTION_SECONDS`` in all, and carries one request. Of more than ``MAX_CONNECTIONS`` the
oldest is ended. Busy peers cost a bounded share of the interpreter: one connection is taken in
``PACE_SECONDS``. Where the process has a certificate, HTTPS is spoken on the same port: the first
byte of a connection tells which it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from weft_rl.contract.errors import NotReadyError
from weft_rl.descriptors import bounded, is_short
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials

_log = logging.getLogger(__name__)
#: Of single connections: Uvicorn warns of each request that is none, and peers may send many.
_connections_log = logging.getLogger(f"{__name__}.connections")
_connections_log.setLevel(logging.ERROR)

#: Longest that a connection may take: handshake, request, and until the answer is taken.
CONNECTION_SECONDS: Final = 10.0
MAX_CONNECTIONS: Final = 256
#: Bound of a request's head that has not ended yet. A head that comes in one piece is parsed
#: before it is measured; asyncio's pieces are of 256 KiB at most.
MAX_HEAD_BYTES: Final = 16 << 10
_BACKLOG: Final = 512
_START_SECONDS: Final = 10.0
#: Between two connections that are taken: this thread and the process's event loop share one
#: interpreter, and whoever asks without end must not slow a push.
PACE_SECONDS: Final = 0.005
#: After the system could not give a connection a descriptor.
_PAUSE_SECONDS: Final = 0.1
#: The first byte of a TLS handshake.
_TLS_BYTE: Final = b"\x16"
#: Headers of every answer.
_HEADERS: Final = [
    ("Connection", "close"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
]


class HttpServer:
    """HTTP server that serves from ``start`` to ``stop``, which any thread may call.

    Args:
        app: ASGI application, called on the server's thread; ``state`` of its scope has
            ``names``, the alternative names of the peer's certificate, which was verified.
        credentials: Whose certificate is shown to peers that speak TLS.
        ask: Whether those are asked for a certificate, which they need not have.
    """

    def __init__(
        self, app: ASGIApp, credentials: Credentials = NO_CREDENTIALS, *, ask: bool = False
    ) -> None:
        # Uvicorn's own loggers stay as they are: in a replica they are vLLM's.
        self._config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            headers=_HEADERS,
        )
        self._certificate = _Certificate(credentials, ask=ask)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._serving: asyncio.Task[None] | None = None
        self._connections: dict[asyncio.Task[None], socket.socket] = {}

    def start(self, listen: str) -> int:
        """Listen on HOST:PORT (0 picks a free port); returns the port.

        Raises:
            NotReadyError: The address cannot be listened on, or the certificate not be used.
        """
        self._certificate.context()
        self._config.load()
        listener = _listener(listen)
        port = int(listener.getsockname()[1])
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener, ready), name="weft-http", daemon=True
        )
        self._thread.start()
        ready.wait(_START_SECONDS)
        return port

    def look_again(self) -> None:
        """Read the files of the certificate for the next handshake, changed or not."""
        self._certificate.look_again()

    def stop(self) -> None:
        """End every connection and the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._serving is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._serving.cancel)
        thread.join(_START_SECONDS)

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        with asyncio.Runner() as runner, contextlib.suppress(asyncio.CancelledError):
            try:
                runner.run(self._serve(listener, ready))
            except Exception:  # noqa: BLE001 (the edge of the thread)
                _log.exception("the HTTP server has ended: restart this process")

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(_ignore)
        self._serving = asyncio.current_task()
        state = ServerState()
        state.default_headers = self._config.encoded_headers
        ready.set()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    _log.warning("cannot accept connections; trying again: %s", error)
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                if len(self._connections) >= bounded(MAX_CONNECTIONS, 1):
                    oldest = next(iter(self._connections))
                    oldest.cancel()
                    await asyncio.wait({oldest})
                task = loop.create_task(self._converse(connection, state))
                self._connections[task] = connection
                task.add_done_callback(self._end)
                await asyncio.sleep(PACE_SECONDS)
        finally:
            listener.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()

    async def _converse(self, connection: socket.socket, state: ServerState) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECTION_SECONDS):
                connection.setblocking(False)
                first = await _first_byte(connection)
                context = self._certificate.context() if first == _TLS_BYTE else None
                if first and (context is not None or first != _TLS_BYTE):
                    await self._exchange(connection, context, state)

    async def _exchange(
        self, connection: socket.socket, context: ssl.SSLContext | None, state: ServerState
    ) -> None:
        loop = asyncio.get_running_loop()
        protocol = _Connection(self._config, state, {}, loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        try:
            await protocol.lost.wait()
        finally:
            transport.abort()


class _Connection(H11Protocol):
    """Uvicorn's side of one connection, which tells the application the peer's certificate."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _connections_log
        self.access_log = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is None:  # it was reset before its address was asked for
            transport.abort()
        certificate = transport.get_extra_info("peercert") or {}
        names = tuple(str(value) for _, value in certificate.get("subjectAltName", ()))
        self.app_state = {"names": names}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()


class _Certificate:
    """Certificate that is shown to peers, read again when its files change."""

    def __init__(self, credentials: Credentials, *, ask: bool) -> None:
        self._credentials = credentials
        self._ask = ask
        self._stamps: tuple[tuple[int, int, int], ...] = ()
        self._context: ssl.SSLContext | None = None

    def look_again(self) -> None:
        self._stamps = ()

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the next handshake; None where there is no certificate."""
        known = self._credentials
        if not known.tls_cert or (stamps := known.stamps()) == self._stamps:
            return self._context
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(known.tls_cert, known.tls_key, password="")
            if self._ask and known.tls_ca:
                context.load_verify_locations(known.tls_ca)
                context.verify_mode = ssl.CERT_OPTIONAL
        except OSError as error:
            if self._context is not None and is_short():
                return self._context  # the files may be as they should: they are looked at again
            if self._context is None:
                raise NotReadyError(
                    f"the certificate {known.tls_cert} cannot be used for HTTPS: {error}"
                ) from None
            _log.warning(
                "keeping the former certificates for HTTPS: %s",
                error,
            )
        else:
            self._context = context
        self._stamps = stamps  # of before the reading; looked at again when they change
        return self._context


def _listener(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise NotReadyError(
            f"cannot listen on {listen}: {error.strerror or error}", reason="ADDRESS_IN_USE"
        ) from None
    made.setblocking(False)
    return made


async def _first_byte(connection: socket.socket) -> bytes:
    """Return the first byte that comes, which stays to be read; empty where none does."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


def _ignore(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log at debug level that a peer ended its connection."""
    _log.debug("%s: %r", context.get("message"), context.get("exception"))
