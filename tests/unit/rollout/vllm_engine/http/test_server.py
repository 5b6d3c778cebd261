"""The OpenAI server's shell: it answers, and ends when it is told to, by whomever."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rollout_side.vllm_engine.http import server as server_module
from rollout_side.vllm_engine.http.server import OpenAiServer, listen
from weft_rl.contract.errors import InvalidRequestError, PeerUnavailableError


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def _server() -> OpenAiServer:
    return OpenAiServer(_app, listen("127.0.0.1", 0), tls={}, settings={"log_level": "warning"})


def test_no_two_processes_have_one_port() -> None:
    """Of sockets that are only bound, both would have it until one of them listens."""
    with (
        listen("127.0.0.1", 0) as first,
        pytest.raises(InvalidRequestError, match="another --http-port"),
    ):
        listen("127.0.0.1", first.getsockname()[1])
    with pytest.raises(InvalidRequestError, match="cannot listen"):
        listen("127.0.0.1", 10**6)


async def test_a_server_that_does_not_start_says_why() -> None:
    closed = listen("127.0.0.1", 0)
    server = OpenAiServer(_app, closed, tls={}, settings={"log_level": "critical"})
    closed.close()
    with pytest.raises(PeerUnavailableError, match="did not start: "):
        await server.start()
    await server.stop(0.0)


async def test_it_answers_and_stops() -> None:
    server = _server()
    await server.start()
    await server.start()  # it has
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{server.port}/")
    assert (answer.text, "date" in answer.headers) == ("here", True)
    await server.stop(5.0)
    assert await server.stopped(0.0)


async def test_it_ends_when_vllms_error_handlers_say_so() -> None:
    server = _server()
    await server.start()
    assert not await server.stopped(0.0)
    server.server.should_exit = True
    async with asyncio.timeout(20):
        assert await server.stopped(20.0)
    await server.stop(0.0)


async def test_strangers_who_ask_for_nothing_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them, and no request that is being answered."""
    monkeypatch.setattr(server_module, "bounded", lambda most, eighths: 4)
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/slow":
            begun.set()
            await may_end.wait()
        await _app(scope, receive, send)

    server = OpenAiServer(app, listen("127.0.0.1", 0), tls={}, settings={"log_level": "warning"})
    await server.start()
    async with httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}/slow", timeout=20))
        await begun.wait()
        strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(12)]
        answer = await client.get(f"http://127.0.0.1:{server.port}/", timeout=20)
        assert answer.text == "here"
        assert len(server.server.server_state.connections) <= 4
        may_end.set()
        assert (await slow).text == "here"
    for _, writer in strangers:
        writer.close()
    await server.stop(5.0)
