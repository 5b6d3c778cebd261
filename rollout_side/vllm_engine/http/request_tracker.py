"""Running HTTP requests, tracked so that no adapter is dropped while one uses it.

A request looks its model up somewhere between its first byte and the engine, so
"does the engine use it" is not enough. Instead every request gets a number. A name
that was removed is unreachable once all requests that began before the removal
have ended (as in read-copy-update).
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
    """Register of running HTTP requests, which refuses new ones while told to.

    Used from one event loop only. Its memory is bounded by the requests that run.
    """

    def __init__(self) -> None:
        self._next = 0
        self._running: set[int] = set()
        self.refuse_reason = ""
        """Reason why new requests are refused; empty when they are not."""

    @property
    def num_running(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._running)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as running in the ``with``: from before its model look-up to its end."""
        number = self.mark()
        self._running.add(number)
        try:
            yield
        finally:
            self._running.discard(number)

    def mark(self) -> int:
        """Return a point in time for ``passed``."""
        number = self._next
        self._next += 1
        return number

    def passed(self, mark: int) -> bool:
        """Return whether every request that began before ``mark`` has ended."""
        return all(number > mark for number in self._running)

    def wrap(self, app: App) -> App:
        """Return an ASGI application that tracks ``app``'s requests."""

        async def tracked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            if self.refuse_reason and scope.get("path") not in ALWAYS_OPEN:
                await refuse(scope, send, self.refuse_reason)
                return
            with self.running():
                await app(scope, receive, send)

        return tracked


async def refuse(
    scope: Scope,
    send: Send,
    message: str,
    *,
    status: int = 503,
    kind: str = "ServiceUnavailable",
    reason: str = "",
) -> None:
    """Answer with an error in the form of OpenAI's.

    Args:
        kind: Type of the error, as vLLM's server names it.
        reason: Weft's word for it, for the header ``weft-reason``.
    """
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": message[:120]})
        return
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    headers += [(b"retry-after", b"5")] if status == 503 else []
    headers += [(b"weft-reason", reason.encode())] if reason else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
