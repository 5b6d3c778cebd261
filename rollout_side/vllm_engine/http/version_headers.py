"""Headers of the OpenAI server's answers that name what made them: ``weft-base`` and
``weft-adapter``, as of when the request was taken; ``weft-last-base`` where the base has
changed before the headers left, which is after the last token of an answer that is not
streamed, and ``weft-older-cache`` where the cache was kept over that; ``weft-reason`` of a
failure that Weft has a word for.

vLLM looks the adapter up by the name in a request's body, in one place, so what it found is
noted there: reading the body here would parse each request twice.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rollout_side.vllm_engine.http.request_tracker import App, Receive, Scope, Send
from rollout_side.vllm_engine.http.served_models import ServedModels
from weft.contract.names import PolicyVersion


@dataclass
class _Notes:
    """What is noted of one request."""

    base: PolicyVersion
    adapters: list[str] = field(default_factory=list)
    reason: str = ""


#: Of the request that runs in this context.
_notes: ContextVar[_Notes] = ContextVar("notes")


class NotedAdapters(dict[str, Any]):
    """``OpenAIServingModels.lora_requests``, which notes for whom an adapter is taken out."""

    def __getitem__(self, name: str) -> Any:
        request = super().__getitem__(name)
        if (notes := _notes.get(None)) is not None:
            notes.adapters.append(request.lora_name)
        return request


def note_reason(reason: str) -> None:
    """Say, in the request that runs in this context, why it fails."""
    if (notes := _notes.get(None)) is not None:
        notes.reason = reason


def name_versions(app: App, models: ServedModels, *, kept: bool = False) -> App:
    """An ASGI application whose answers to POST carry the headers.

    Args:
        app: vLLM's.
        models: Its models; the lookup of adapters is replaced.
        kept: Whether running requests keep their cache when the base changes.
    """
    models.replace_lookup(NotedAdapters)

    def headers(notes: _Notes, status: int) -> list[tuple[bytes, bytes]]:
        if status >= 400:
            return [(b"weft-reason", notes.reason.encode())] if notes.reason else []
        named = [(b"weft-base", str(notes.base).encode())]
        named += [(b"weft-adapter", name.encode()) for name in notes.adapters[-1:]]
        if models.base is not notes.base:  # each switch makes a new one
            named.append((b"weft-last-base", str(models.base).encode()))
            named += [(b"weft-older-cache", b"true")] * kept
        return named

    async def naming(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        notes = _Notes(models.base)

        async def send_named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                named = headers(notes, message["status"])
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        token = _notes.set(notes)
        try:
            await app(scope, receive, send_named)
        finally:
            _notes.reset(token)

    return naming
