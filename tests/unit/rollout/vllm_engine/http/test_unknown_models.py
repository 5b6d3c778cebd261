"""What is answered for a model that is not served."""

from __future__ import annotations

import json
from typing import Any

from rollout_side.vllm_engine.http.middleware import explain_unknown_models
from rollout_side.vllm_engine.http.served_models import Refusal


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
