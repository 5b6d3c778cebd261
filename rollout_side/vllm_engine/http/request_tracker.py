"""Which HTTP requests are running, so that an adapter is not dropped under one.

A request looks its model up somewhere between its first byte and the engine, so
"does the engine use it" is not enough. Instead every request gets a number, and a
name that was removed is unreachable once all requests that began before the
removal have ended (as in read-copy-update).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Paths that answer even while requests are refused: they say how the process is.
ALWAYS_OPEN = frozenset({"/health", "/ping", "/metrics", "/version", "/load", "/v1/models"})


class RequestTracker:
    """Numbers running requests, and refuses new ones while told to.

    Used from one event loop only. Its memory is bounded by the requests that run.
    """

    def __init__(self) -> None:
        self._next = 0
        self._running: set[int] = set()
        self.refuse_reason = ""
        """Why new requests are refused; empty when they are not."""

    @property
    def num_running(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._running)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as running; from before it looks its model up to its end."""
        number = self.mark()
        self._running.add(number)
        try:
            yield
        finally:
            self._running.discard(number)

    def mark(self) -> int:
        """A point in time for ``passed``."""
        number = self._next
        self._next += 1
        return number

    def passed(self, mark: int) -> bool:
        """Whether every request that began before ``mark`` has ended."""
        return all(number > mark for number in self._running)

    def wrap(self, app: App) -> App:
        """An ASGI application that tracks ``app``'s requests."""

        async def tracked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            if self.refuse_reason and scope.get("path") not in ALWAYS_OPEN:
                await _refuse(scope, send, self.refuse_reason)
                return
            with self.running():
                await app(scope, receive, send)

        return tracked


async def _refuse(scope: Scope, send: Send, reason: str) -> None:
    """Answer 503 in the form of OpenAI's errors."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": reason[:120]})
        return
    error = {"message": reason, "type": "ServiceUnavailable", "param": None, "code": 503}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"5"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
