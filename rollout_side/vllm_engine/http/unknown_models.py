"""Answers of vLLM's server for unknown models, put in words of versions.

A version that was retired, or is not here yet, gets vLLM's 404, which names only the base
model. The answer's text is replaced, and its form stays. An alias that is refused, since the
pool serves a version of it that is not here, gets a 503.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, MutableMapping
from typing import Any

from rollout_side.vllm_engine.http import version_headers
from rollout_side.vllm_engine.http.request_tracker import App, Receive, Scope, Send
from rollout_side.vllm_engine.http.served_models import Refusal

#: vLLM's own words, 0.26 to 0.32.
_UNKNOWN = re.compile(r"The model `(?P<name>[^`]+)` does not exist")
#: Answers that are longer are left as they are; a 404 of vLLM has some 200 bytes.
_MAX_BYTES = 16_384


#: What is answered to a name that vLLM does not know; None: its own words.
Explain = Callable[[str], Refusal | None]


def explain_unknown_models(app: App, explain: Explain) -> App:
    """Return an ASGI application that replaces the 404 of an unknown model by ``explain(name)``.

    Args:
        app: vLLM's application.
        explain: Returns what is answered instead, and why; None keeps vLLM's answer.
    """

    async def explaining(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
        else:
            await app(scope, receive, _Answer(send, explain).take)

    return explaining


class _Answer:
    """One answer on its way; a 404 is held until it is whole, or too long."""

    def __init__(self, send: Send, explain: Explain) -> None:
        self._send, self._explain = send, explain
        self._held: list[MutableMapping[str, Any]] = []
        self._num_bytes = 0

    async def take(self, message: MutableMapping[str, Any]) -> None:
        """Take a message in place of vLLM's ``send``."""
        is_404 = message["type"] == "http.response.start" and message["status"] == 404
        if not (is_404 or self._held):
            await self._send(message)
            return
        self._held.append(message)
        self._num_bytes += len(message.get("body", b""))
        is_whole = message["type"] == "http.response.body" and not message.get("more_body")
        if is_whole or self._num_bytes > _MAX_BYTES:
            ready, self._held = self._held, []
            for part in _explained(ready, self._explain) if is_whole else ready:
                await self._send(part)


def _explained(
    held: list[MutableMapping[str, Any]], explain: Explain
) -> list[MutableMapping[str, Any]]:
    """Return a whole answer's messages, with the text replaced if a model is unknown."""
    start = held[0]
    body = b"".join(message.get("body", b"") for message in held[1:])
    try:
        answer = json.loads(body)
        error = answer["error"]
        found = _UNKNOWN.search(error["message"])
    except (ValueError, TypeError, KeyError):
        return held
    refusal = explain(found["name"]) if found else None
    if refusal is None:
        return held
    error["message"], error["code"] = refusal.message, refusal.status
    error["type"] = refusal.type
    version_headers.note_reason(refusal.reason)
    body = json.dumps(answer).encode()
    headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    start = {**start, "status": refusal.status, "headers": headers}
    return [start, {"type": "http.response.body", "body": body}]
