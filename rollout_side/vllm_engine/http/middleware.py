"""Layers around vLLM's HTTP application: running requests, versions in headers, unknown models.

Running requests are tracked, so that no adapter is dropped while one uses it. A request looks its
model up before the engine knows of it, so every request gets a number. A removed name is
unreachable once all requests that began before its removal have ended (as in read-copy-update).

Answers name the versions behind them in headers. ``weft-base`` and ``weft-adapter`` are those at
the moment when the engine admitted the request. ``weft-last-base`` is set if the base has changed
since, and ``weft-older-cache`` if the cache was kept over that. ``weft-reason`` is the reason code
of a failure. An answer that is not streamed has the headers as of its end. The head of a
stream is held until its first tokens; its last chunk has the final values, as fields of the same
names. vLLM looks the model up by the name in a request's body, in one place, where the name and the
result are noted: reading the body here would parse each request twice.

vLLM's 404 for an unknown model names only the base model. Its text is replaced, its form stays. An
alias that is refused, since the pool serves a version of it that is not here, gets a 503. It is
refused where the name is looked up, and again at its admission.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rollout_side.vllm_engine.http.served_models import Refusal, ServedModels
from weft_rl.contract.names import BASE_POLICY, PolicyVersion

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Paths that answer even while requests are refused: they show the state of the process.
ALWAYS_OPEN = frozenset({"/health", "/ping", "/metrics", "/version", "/load", "/v1/models"})


class RequestTracker:
    """Register of running HTTP requests, which can refuse new ones; used from one event loop."""

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
        reason: Value of the header ``weft-reason``.
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


#: Pattern of a stream's last chunk for a sample, and of later ones, in any API. In text of the
#: model the quotes would have backslashes.
_LAST_CHUNK = re.compile(
    rb'"(finish_reason|stop_reason)": ?"|"choices": ?\[\]|'
    rb'"type": ?"(response\.(completed|incomplete|failed)|message_stop)"'
)
_EVENT_END = b"}\n\n"


@dataclass
class RequestNotes:
    """RequestNotes on one request: the model that it asks for, the versions behind its answer."""

    models: ServedModels | None
    """None outside a request, which admits everything."""
    base: PolicyVersion
    """Base of the first tokens, or the current base until there are any."""
    asked: str = ""
    """Name of the model that it asks for; empty for none."""
    adapters: list[str] = field(default_factory=list)
    reason: str = ""
    refusal: Refusal | None = None
    """Refusal of the request since its model was looked up; None if it is answered."""
    has_begun: bool = False
    """True if it has tokens."""

    def admit(self) -> Refusal | None:
        """Record that the engine is about to admit the request; or return its refusal."""
        if self.models is not None:
            self.refusal = self.models.refusal(self.asked)
            if not self.has_begun:
                self.base = self.models.base
        return self.refusal

    def switch(self) -> Refusal | None:
        """Record that the base has changed; return the refusal if the request must end. A request
        for an exact version without tokens may have to end."""
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
_notes: ContextVar[RequestNotes] = ContextVar("notes")


class NotedAdapters(dict[str, Any]):
    """``OpenAIServingModels.lora_requests`` that notes each look-up at the current request.

    To a request that may not have it now, a name is unknown: so it is refused before its prompt is
    rendered.
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and _is_admitted(str(name))

    def __getitem__(self, name: str) -> Any:
        request = super().__getitem__(name)
        if (notes := _notes.get(None)) is not None:
            notes.asked = name
            notes.adapters.append(request.lora_name)
        return request


def current_notes() -> RequestNotes:
    """Return the notes of the request in this context; outside one, notes without effect."""
    return _notes.get(None) or RequestNotes(None, PolicyVersion(BASE_POLICY, 0))


def set_reason(reason: str) -> None:
    """Note why the request that runs in this context fails."""
    if (notes := _notes.get(None)) is not None:
        notes.reason = reason


def _is_admitted(name: str) -> bool:
    """Return whether the current request may have a model; note its refusal if it may not."""
    if (notes := _notes.get(None)) is not None and notes.models is not None:
        notes.refusal = notes.models.refusal(name)
        return notes.refusal is None
    return True


def _note_base(name: str) -> bool:
    if (notes := _notes.get(None)) is not None:
        notes.asked = name
    return _is_admitted(name)


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
        notes = RequestNotes(models, models.base)
        token = _notes.set(notes)
        try:
            await app(scope, receive, _VersionedResponse(scope, send, notes, kept=kept).take)
        finally:
            _notes.reset(token)

    return naming


class _VersionedResponse:
    """Answer on its way; its head is held until its body begins."""

    def __init__(self, scope: Scope, send: Send, notes: RequestNotes, *, kept: bool) -> None:
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


#: vLLM's own words, 0.26 to 0.32.
_UNKNOWN = re.compile(r"The model `(?P<name>[^`]+)` does not exist")
#: Longer answers are left unchanged; a 404 of vLLM has some 200 bytes.
_MAX_BYTES = 16_384


#: Returns the answer to a name that vLLM does not know; None keeps vLLM's own.
Explain = Callable[[str], Refusal | None]


def explain_unknown_models(app: App, explain: Explain) -> App:
    """Return an ASGI application that replaces the 404 of an unknown model by ``explain(name)``."""

    async def explaining(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
        else:
            await app(scope, receive, _ExplainedResponse(send, explain).take)

    return explaining


class _ExplainedResponse:
    """Answer on its way; a 404 is held until it is complete, or too long."""

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
    set_reason(refusal.reason)
    body = json.dumps(answer).encode()
    headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    start = {**start, "status": refusal.status, "headers": headers}
    return [start, {"type": "http.response.body", "body": body}]
