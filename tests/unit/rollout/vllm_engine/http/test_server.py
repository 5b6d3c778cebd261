"""The OpenAI server's shell: it answers, and ends when it is told to, by whomever."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from rollout_side.vllm_engine.http.server import HttpServer, bind


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def _server() -> HttpServer:
    return HttpServer(_app, bind("127.0.0.1", 0), tls={}, settings={"log_level": "warning"})


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
