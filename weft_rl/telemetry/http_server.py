"""Small HTTP server on a thread of its own, beside a process's event loop.

It answers one GET a connection. Slow peers cost nothing but a connection: there is one thread,
however many peers there are. A connection has ``CONNECTION_SECONDS`` in all, and of more than
``MAX_CONNECTIONS`` the oldest is ended. Busy peers cost a bounded share of the interpreter: one
connection is taken in ``PACE_SECONDS``. Where the process has a certificate, HTTPS is spoken on
the same port: the first byte of a connection tells which it is.

HTTP itself is h11's. The connections are kept here because the servers that bring both (uvicorn,
aiohttp) let a head take for ever to come. Nor do they tell an application which names its peer's
certificate has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import h11

from weft_rl.contract.errors import NotReadyError
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials

_log = logging.getLogger(__name__)

#: Longest that a connection may take: handshake, request, and until the answer is taken.
CONNECTION_SECONDS: Final = 10.0
MAX_CONNECTIONS: Final = 256
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


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request of a peer, and what is known of the peer."""

    method: str
    path: str
    query: str = ""
    """Text that follows the ? after the path."""
    headers: Mapping[str, str]
    """Headers by name in lower case."""
    peer: str
    """Address of the peer."""
    is_tls: bool = False
    names: tuple[str, ...] = ()
    """Subject alternative names of its certificate, which was verified."""

    @property
    def is_loopback(self) -> bool:
        """True if it comes over the loopback interface."""
        address = ipaddress.ip_address(self.peer.partition("%")[0])
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    @property
    def is_private(self) -> bool:
        """True if nobody between can read it."""
        return self.is_tls or self.is_loopback


@dataclass(frozen=True, kw_only=True)
class Response:
    """Answer to a request."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_text(cls, text: str, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> Response:
        """Build an answer of one line of text; in a header's name _ stands for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(body=f"{text}\n".encode(), status=status, headers=named)


class HttpServer:
    """HTTP server that serves from ``start`` to ``stop``, which any thread may call.

    Args:
        answer: Answers a request; called on the server's thread, so it reads what is replaced
            and never mutated, and is quick.
        credentials: Whose certificate is shown to peers that speak TLS.
        ask: Whether those are asked for a certificate, which they need not have.
    """

    def __init__(
        self,
        answer: Callable[[Request], Response],
        credentials: Credentials = NO_CREDENTIALS,
        *,
        ask: bool = False,
    ) -> None:
        self._answer = answer
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
        listener = _listener(listen)
        port = int(listener.getsockname()[1])
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener, ready), name="weft-http", daemon=True
        )
        self._thread.start()
        ready.wait(_START_SECONDS)
        return port

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
                _log.exception("nothing is answered over HTTP any more: restart this process")

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(_ignore)
        self._serving = asyncio.current_task()
        ready.set()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError as error:
                    _log.warning("no further connection is taken yet: %s", error)
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                if len(self._connections) >= MAX_CONNECTIONS:
                    oldest = next(iter(self._connections))
                    oldest.cancel()
                    await asyncio.wait({oldest})
                task = loop.create_task(self._converse(connection, str(address[0])))
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

    async def _converse(self, connection: socket.socket, peer: str) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECTION_SECONDS):
                connection.setblocking(False)
                first = await _first_byte(connection)
                context = self._certificate.context() if first == _TLS_BYTE else None
                if first and (context is not None or first != _TLS_BYTE):
                    await self._exchange(connection, peer, context)

    async def _exchange(
        self, connection: socket.socket, peer: str, context: ssl.SSLContext | None
    ) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            try:
                head = await _head(http, reader)
            except h11.RemoteProtocolError as error:
                response = Response.of_text("not a request", HTTPStatus(error.error_status_hint))
                with_body = True
            else:
                if head is None:
                    return
                certificate = writer.get_extra_info("peercert") if context else None
                request = _request(head, peer, context is not None, certificate)
                response, with_body = self._respond(request), request.method != "HEAD"
            writer.write(_encoded(http, response, with_body=with_body))
            writer.close()
            await writer.wait_closed()
        finally:
            transport.abort()

    def _respond(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return Response.of_text("GET", HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
        try:
            return self._answer(request)
        except Exception:  # noqa: BLE001 (one page that fails must not end the others)
            _log.exception("answering %s failed", request.path[:80])
            return Response.of_text("failed; see the log", HTTPStatus.INTERNAL_SERVER_ERROR)


class _Certificate:
    """Certificate that is shown to peers, read again when its files change."""

    def __init__(self, credentials: Credentials, *, ask: bool) -> None:
        self._credentials = credentials
        self._ask = ask
        self._stamps: tuple[tuple[int, int, int], ...] = ()
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the next handshake; None where there is no certificate.

        Raises:
            NotReadyError: The first one cannot be read.
        """
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
            if self._context is None:
                raise NotReadyError(
                    f"the certificate {known.tls_cert} cannot be used for HTTPS: {error}"
                ) from None
            _log.warning("new certificates are not used for HTTPS yet: %s", error)
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


async def _head(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """Return the head of the request that comes; None where the peer ends without one.

    Raises:
        h11.RemoteProtocolError: What comes is no head of a request, or is too long.
    """
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(MAX_HEAD_BYTES))
    return event if isinstance(event, h11.Request) else None


def _request(head: h11.Request, peer: str, is_tls: bool, certificate: Any) -> Request:
    path, _, query = head.target.decode("latin-1").partition("?")
    return Request(
        method=head.method.decode("latin-1"),
        path=path,
        query=query,
        headers={name.decode("latin-1"): text.decode("latin-1") for name, text in head.headers},
        peer=peer,
        is_tls=is_tls,
        names=tuple(str(value) for _, value in (certificate or {}).get("subjectAltName", ())),
    )


def _encoded(http: h11.Connection, response: Response, *, with_body: bool) -> bytes:
    """Encode an answer for sending; the connection ends after it."""
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **response.headers,
    }
    head = h11.Response(
        status_code=response.status.value,
        reason=response.status.phrase.encode(),
        headers=list(headers.items()),
    )
    encoded = http.send(head) or b""
    return encoded + response.body if with_body else encoded


def _ignore(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what peers do to their connections, at debug level: it is no trouble of ours."""
    _log.debug("%s: %r", context.get("message"), context.get("exception"))
