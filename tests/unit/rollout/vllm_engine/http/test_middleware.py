"""What our layers around vLLM's HTTP application do with requests and answers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.http.middleware import (
    RequestTracker,
    current_notes,
    explain_unknown_models,
    name_versions,
    set_reason,
)
from rollout_side.vllm_engine.http.served_models import Refusal, ServedModels
from weft_rl.contract.names import PolicyVersion


def test_a_mark_is_passed_once_the_requests_before_it_have_ended() -> None:
    tracker = RequestTracker()
    with tracker.running():
        mark = tracker.mark()
        assert not tracker.passed(mark)
        with tracker.running():
            assert tracker.num_running == 2
    with tracker.running():
        assert tracker.passed(mark)
    assert tracker.num_running == 0


async def test_refused_requests_get_an_openai_error() -> None:
    tracker, reached, sent = RequestTracker(), [], []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        reached.append(scope["path"])

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    tracked = tracker.wrap(app)
    tracker.refuse_reason = "weights are mixed"
    await tracked({"type": "http", "path": "/v1/completions"}, receive, send)
    await tracked({"type": "http", "path": "/health"}, receive, send)
    assert reached == ["/health"]
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["message"] == "weights are mixed"


async def _ask(status: int, bodies: list[bytes]) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of an answer that was explained."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"Content-Length", b"1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            more = body is not bodies[-1]
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def send(message: Any) -> None:
        sent.append(message)

    def explain(name: str) -> Refusal | None:
        if name == "alias":
            return Refusal(503, "later", "REFUSING")
        return Refusal(404, f"no {name}: ask for {name}2", "X") if name == "m" else None

    asked = explain_unknown_models(app, explain)
    await asked({"type": "http", "path": "/v1/completions"}, None, send)  # type: ignore[arg-type]
    headers = {k.decode().lower(): v.decode() for k, v in sent[0]["headers"]}
    assert not sent[-1].get("more_body")
    return sent[0]["status"], headers, b"".join(message["body"] for message in sent[1:])


async def test_an_unknown_model_is_explained_and_nothing_else_is_touched() -> None:
    error = {"message": "The model `m` does not exist. Valid aliases: tiny.", "code": 404}
    body = json.dumps({"error": error}).encode()
    for bodies in ([body], [body[:9], body[9:], b""]):
        code, headers, answer = await _ask(404, bodies)
        assert code == 404
        assert json.loads(answer)["error"]["message"] == "no m: ask for m2"
        assert headers["content-length"] == str(len(answer))
    for status, other in (
        (200, body),
        (404, b"no json"),
        (404, b"[]"),
        (404, body.replace(b"`m`", b"`n`")),
        (404, b"x" * 100_000),
    ):
        code, headers, answer = await _ask(status, [other[:5], other[5:], b""])
        assert (code, headers["content-length"], answer) == (status, "1", other)


async def test_an_alias_that_may_come_is_unavailable() -> None:
    error = {"message": "The model `alias` does not exist.", "type": "NotFoundError", "code": 404}
    code, _, answer = await _ask(404, [json.dumps({"error": error}).encode()])
    assert code == 503
    assert json.loads(answer)["error"] == {
        "message": "later",
        "type": "ServiceUnavailable",
        "code": 503,
    }


class _App:
    """Looks its request's model up as vLLM does, then answers."""

    def __init__(self, *, kept: bool = False, switches: bool = False, reason: str = "") -> None:
        self.switches, self.reason = switches, reason
        self.base_model_paths = [SimpleNamespace(name="tiny")]
        request = SimpleNamespace(lora_name="math@2", lora_path="weft://math@2")
        self.lora_requests: dict[str, Any] = {"math": request, "math@2": request}
        self.models = ServedModels(self)
        self.app = name_versions(self._answer, self.models, kept=kept)

    def is_base_model(self, name: str) -> bool:
        return any(path.name == name for path in self.base_model_paths)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        model = scope["model"]
        await asyncio.sleep(0)
        if not self.is_base_model(model) and model in self.lora_requests:
            assert self.lora_requests[model].lora_name
        current_notes().admit()
        if self.switches:  # meanwhile
            self.models.set_base(PolicyVersion("base", 9))
        if self.reason:
            set_reason(self.reason)
        head = {"type": "http.response.start", "status": scope["status"]}
        await send({**head, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, model: str, status: int = 200, method: str = "POST") -> dict[str, str]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "model": model, "status": status}
        await self.app(scope, None, send)  # type: ignore[arg-type]
        assert sent[1]["body"] == b""
        return {k.decode(): v.decode() for k, v in sent[0]["headers"] if k != b"content-length"}


@pytest.mark.parametrize("model", ["math", "math@2"])
async def test_an_answer_names_what_was_asked_as_it_was_taken(model: str) -> None:
    assert await _App().ask(model) == {"weft-base": "base@0", "weft-adapter": "math@2"}


async def test_the_base_has_no_adapter_and_failures_name_nothing() -> None:
    app = _App()
    assert await app.ask("tiny") == {"weft-base": "base@0"}
    app.models.set_base(PolicyVersion("base", 9))
    assert await app.ask("base") == {"weft-base": "base@9"}
    assert await app.ask("math", status=400) == {}
    assert await app.ask("math", method="GET") == {}


async def test_requests_do_not_take_each_others_names() -> None:
    app = _App()
    answers = await asyncio.gather(*(app.ask(m) for m in ("math", "tiny", "math@2", "tiny")))
    assert ["weft-adapter" in answer for answer in answers] == [True, False, True, False]


@pytest.mark.parametrize("kept", [False, True])
async def test_an_answer_under_which_the_base_changed_says_so(kept: bool) -> None:
    app = _App(kept=kept, switches=True)
    assert await app.ask("tiny") == {
        "weft-base": "base@0",
        "weft-last-base": "base@9",
        **({"weft-older-cache": "true"} if kept else {}),
    }
    # The same number again is a switch, too: by way of another one, or of a repair.
    assert (await app.ask("tiny"))["weft-last-base"] == "base@9"


async def test_a_failure_has_its_reason_and_no_other() -> None:
    app = _App(reason="VERSION_CHANGED")
    assert await app.ask("tiny", status=503) == {"weft-reason": "VERSION_CHANGED"}
    app.reason = ""
    assert await app.ask("tiny", status=503) == {}
    set_reason("of no request")
