"""Versions behind an answer of the OpenAI server, named in headers.

``weft-base`` and ``weft-adapter`` are those of the moment when the engine admitted the request.
``weft-last-base`` is set where the base has changed since, and ``weft-older-cache`` where the cache
was kept over that. ``weft-reason`` names a failure that Weft has a word for.

An answer that is not streamed has the headers as of its end. The head of a stream is held until the
first tokens are there. Its last chunk has the final values, as fields of the same names.

vLLM looks the model up by the name in a request's body, in one place. What it looked for and found
is noted there: reading the body here would parse each request twice. The engine admits the request
later, and what the name stands for is checked then; see ``RequestsAtSwitch``.
"""

from __future__ import annotations

import json
import re
from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rollout_side.vllm_engine.http.request_tracker import App, Receive, Scope, Send, refuse
from rollout_side.vllm_engine.http.served_models import Refusal, ServedModels
from weft_rl.contract.names import BASE_POLICY, PolicyVersion

#: A stream's last chunk for a sample, and those behind it, whatever API it is of. In a text of
#: the model these would have backslashes.
_LAST_CHUNK = re.compile(
    rb'"(finish_reason|stop_reason)": ?"|"choices": ?\[\]|'
    rb'"type": ?"(response\.(completed|incomplete|failed)|message_stop)"'
)
_EVENT_END = b"}\n\n"


@dataclass
class Notes:
    """Notes on one request: the model that it asks for, the versions behind its answer."""

    models: ServedModels | None
    """None outside a request: everything is admitted then."""
    base: PolicyVersion
    """Base of the first tokens; until there are any, the base that they would be of."""
    asked: str = ""
    """Name of the model that it asks for; empty for none."""
    adapters: list[str] = field(default_factory=list)
    reason: str = ""
    refusal: Refusal | None = None
    """Reason why it is not answered after all; None if it is."""
    has_begun: bool = False
    """True if it has tokens."""

    def admit(self) -> Refusal | None:
        """Note that the engine is about to admit the request; return why it must not."""
        if self.models is not None:
            self.refusal = self.models.refusal(self.asked)
            if not self.has_begun:
                self.base = self.models.base
        return self.refusal

    def switch(self) -> Refusal | None:
        """Note that the base has changed; return why the request must end, None if it goes on.

        It may have to end where it asks for an exact version and has no tokens.
        """
        if self.models is not None and not self.has_begun:
            self.base = self.models.base
            if "@" in self.asked:
                self.refusal = self.models.refusal(self.asked)
        return self.refusal

    def versions(self, *, kept: bool) -> dict[str, str]:
        """Return the versions behind the answer so far, by header name."""
        named = {"weft-base": str(self.base)}
        if self.adapters:
            named["weft-adapter"] = self.adapters[-1]
        if self.models and self.models.base is not self.base:  # each switch makes a new one
            named["weft-last-base"] = str(self.models.base)
            if kept:
                named["weft-older-cache"] = "true"
        return named


#: Of the request that runs in this context.
_notes: ContextVar[Notes] = ContextVar("notes")


class NotedAdapters(dict[str, Any]):
    """``OpenAIServingModels.lora_requests`` that notes each look-up at the current request."""

    def __getitem__(self, name: str) -> Any:
        request = super().__getitem__(name)
        if (notes := _notes.get(None)) is not None:
            notes.asked = name
            notes.adapters.append(request.lora_name)
        return request


def current_notes() -> Notes:
    """Return the notes of the request in this context; outside one, notes without effect."""
    return _notes.get(None) or Notes(None, PolicyVersion(BASE_POLICY, 0))


def note_reason(reason: str) -> None:
    """Note why the request that runs in this context fails."""
    if (notes := _notes.get(None)) is not None:
        notes.reason = reason


def _note_base(name: str) -> None:
    if (notes := _notes.get(None)) is not None:
        notes.asked = name


def name_versions(app: App, models: ServedModels, *, kept: bool = False) -> App:
    """Return an ASGI application whose answers to POST name the versions behind them.

    Args:
        app: vLLM's application.
        models: Its models; the lookup of them is replaced.
        kept: Whether running requests keep their cache when the base changes.
    """
    models.replace_lookup(NotedAdapters, _note_base)

    async def naming(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        notes = Notes(models, models.base)
        token = _notes.set(notes)
        try:
            await app(scope, receive, _Answer(scope, send, notes, kept=kept).take)
        finally:
            _notes.reset(token)

    return naming


class _Answer:
    """One answer on its way; its head is held until there is a body to it."""

    def __init__(self, scope: Scope, send: Send, notes: Notes, *, kept: bool) -> None:
        self._scope, self._send, self._notes, self._kept = scope, send, notes, kept
        self._head: MutableMapping[str, Any] | None = None
        self._is_stream = self._is_refused = False

    async def take(self, message: MutableMapping[str, Any]) -> None:
        """Take a message in place of vLLM's ``send``."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        head, self._head = self._head, None
        if head is not None and (refusal := self._notes.refusal) is not None:
            self._is_refused = True
            await refuse(
                self._scope,
                self._send,
                refusal.message,
                status=refusal.status,
                kind=refusal.type,
                reason=refusal.reason,
            )
        elif head is not None:
            await self._send({**head, "headers": self._headers(head)})
        if self._is_refused:
            return
        if self._is_stream and message.get("body"):
            message = {**message, "body": self._with_versions(message["body"])}
        await self._send(message)

    def _headers(self, head: MutableMapping[str, Any]) -> list[tuple[bytes, bytes]]:
        headers, notes = [*head.get("headers", ())], self._notes
        if head["status"] >= 400:
            return headers + [(b"weft-reason", notes.reason.encode())] * bool(notes.reason)
        kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
        self._is_stream = kind.startswith(b"text/event-stream")
        versions = notes.versions(kept=self._kept)
        return headers + [(name.encode(), text.encode()) for name, text in versions.items()]

    def _with_versions(self, body: bytes) -> bytes:
        """Return a part of a stream, with the versions added if it ends with a last chunk."""
        if not (_LAST_CHUNK.search(body) and body.endswith(_EVENT_END)):
            return body
        versions = json.dumps(self._notes.versions(kept=self._kept)).encode()
        return body.removesuffix(_EVENT_END) + b"," + versions[1:-1] + _EVENT_END
