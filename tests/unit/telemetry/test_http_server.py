"""The HTTP server by itself: what it believes of its peers, and what of them it logs."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from uvicorn.server import ServerState

from tests.doubles.http import ask
from weft_rl.rpc.server import Security
from weft_rl.telemetry.http_server import HttpServer
from weft_rl.telemetry.site import Page, build_site


def _fail(_: Request) -> Response:
    raise RuntimeError("nonsense")


def _tell_peer(request: Request) -> Response:
    assert request.client is not None
    return PlainTextResponse(f"{request.client.host} {request['scheme']} {request.state.names}")


@contextmanager
def _serving() -> Iterator[int]:
    pages = {"/peer": Page(answer=_tell_peer), "/fail": Page(answer=_fail)}
    server = HttpServer(build_site(pages, Security()))
    try:
        yield server.start("127.0.0.1:0")
    finally:
        server.stop()


async def test_what_a_peer_says_of_whom_it_speaks_for_is_not_believed() -> None:
    claims = {"X-Forwarded-For": "10.0.0.7", "X-Forwarded-Proto": "https"}
    with _serving() as port:
        assert (await ask(port, "/peer", headers=claims)).body == b"127.0.0.1 http ()"


async def test_a_page_that_fails_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with _serving() as port:
        failed = await ask(port, "/fail")
        assert (failed.status, failed.body) == (500, b"Internal Server Error")
        assert "nonsense" in caplog.text
        assert (await ask(port, "/peer")).status == 200


async def test_peers_that_send_nonsense_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with caplog.at_level(logging.INFO), _serving() as port:
        assert (await ask(port, raw=b"nonsense\r\n\r\n")).status == 400
        assert (await ask(port, "/peer", headers=upgrade)).status == 200
    assert not caplog.records


async def test_a_peer_that_ends_its_side_is_answered() -> None:
    with _serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /peer HTTP/1.0\r\n\r\n")
        writer.write_eof()
        assert b"200 OK" in await reader.read()
        writer.close()


async def test_one_connection_carries_one_request() -> None:
    with _serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /peer HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()
    assert b"server:" not in answer.lower()


async def test_a_peer_that_is_gone_before_its_address_is_known_is_not_answered() -> None:
    asked: list[object] = []

    async def app(scope: Any, receive: object, send: object) -> None:
        asked.append(scope)

    server = HttpServer(app)
    server._config.load()
    near, far = socket.socketpair()  # whose ends have no address, as a connection that was reset
    with near, far:
        near.sendall(b"GET /peer HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(server._converse(far, ServerState()), 5)
    assert asked == []


def test_loggers_of_another_uvicorn_in_this_process_stay_as_they_are() -> None:
    """In a replica vLLM's server writes to them."""
    access = logging.getLogger("uvicorn.access")
    handler, propagates = logging.NullHandler(), access.propagate
    access.addHandler(handler)
    try:
        with _serving():
            assert handler in access.handlers
            assert access.propagate is propagates
    finally:
        access.removeHandler(handler)


def test_it_ends_at_once_whoever_is_connected() -> None:
    before = threading.active_count()
    with _serving() as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        idle[1].sendall(b"GET /pe")
        time.sleep(0.1)
        began = time.monotonic()
    seconds, after = time.monotonic() - began, threading.active_count()
    for connection in idle:
        connection.close()
    assert seconds < 1
    assert after <= before  # less, where a thread of an earlier call has had no more to do
