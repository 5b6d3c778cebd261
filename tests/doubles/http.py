"""A client of HTTP that sends what it is told, byte by byte if need be; and requests as values."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

_SECONDS = 10.0


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def ask(
    port: int,
    path: str = "/metrics",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    raw: bytes = b"",
) -> Answer:
    """One request on a connection of its own; ``raw`` is sent in its place."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    async with asyncio.timeout(_SECONDS):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
        )
        try:
            writer.write(raw or "\r\n".join([*lines, "", ""]).encode())
            data = await reader.read()
        finally:
            writer.close()
    return _answer(data)


def _answer(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionResetError("the connection was ended without an answer")
    first, *lines = head.decode().split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    return Answer(int(first.split()[1]), headers, body)


def request(
    peer: str = "127.0.0.1", *, query: str = "", is_tls: bool = False, **headers: str
) -> Request:
    """A request as the HTTP server hands it to a page."""
    return Request(
        {
            "type": "http",
            "method": "GET",
            "path": "/page",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": (peer, 1),
            "scheme": "https" if is_tls else "http",
            "state": {"names": ()},
        }
    )
