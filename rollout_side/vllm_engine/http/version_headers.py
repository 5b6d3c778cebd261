"""Headers of the OpenAI server's answers that name what made them: ``weft-base`` and
``weft-adapter``, as of when the request was taken.

vLLM looks the adapter up by the name in a request's body, in one place, so what it found is
noted there: reading the body here would parse each request twice.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

from rollout_side.vllm_engine.http.request_tracker import App, Receive, Scope, Send
from rollout_side.vllm_engine.http.served_models import ServedModels

#: What the request that runs in this context has looked up.
_looked_up: ContextVar[list[str]] = ContextVar("looked_up")


class NotedAdapters(dict[str, Any]):
    """``OpenAIServingModels.lora_requests``, which notes for whom an adapter is taken out."""

    def __getitem__(self, name: str) -> Any:
        request = super().__getitem__(name)
        if (noted := _looked_up.get(None)) is not None:
            noted.append(request.lora_name)
        return request


def name_versions(app: App, models: ServedModels) -> App:
    """An ASGI application whose answers to POST, but for failures, carry the headers.

    Args:
        app: vLLM's.
        models: Its models; the lookup of adapters is replaced.
    """
    models.replace_lookup(NotedAdapters)

    async def naming(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        base, adapters = models.base, list[str]()

        async def send_named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                named = [(b"weft-base", str(base).encode())]
                named += [(b"weft-adapter", name.encode()) for name in adapters[-1:]]
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        token = _looked_up.set(adapters)
        try:
            await app(scope, receive, send_named)
        finally:
            _looked_up.reset(token)

    return naming
