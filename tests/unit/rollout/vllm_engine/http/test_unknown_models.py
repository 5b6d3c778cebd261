"""What is answered for a model that is not served."""

from __future__ import annotations

import json
from typing import Any

from rollout_side.vllm_engine.http.unknown_models import explain_unknown_models


async def _ask(status: int, bodies: list[bytes]) -> tuple[dict[str, str], bytes]:
    """The headers and the body of an answer that goes through ``explain_unknown_models``."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"Content-Length", b"1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            more = body is not bodies[-1]
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def send(message: Any) -> None:
        sent.append(message)

    asked = explain_unknown_models(app, lambda name: f"ask for {name}2" if name == "m" else "")
    await asked({"type": "http", "path": "/v1/completions"}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    headers = {k.decode().lower(): v.decode() for k, v in sent[0]["headers"]}
    assert not sent[-1].get("more_body")
    return headers, b"".join(message["body"] for message in sent[1:])


async def test_an_unknown_model_is_explained_and_nothing_else_is_touched() -> None:
    error = {"message": "The model `m` does not exist. Valid aliases: tiny.", "code": 404}
    body = json.dumps({"error": error}).encode()
    for bodies in ([body], [body[:9], body[9:], b""]):
        headers, answer = await _ask(404, bodies)
        assert json.loads(answer)["error"]["message"] == "The model `m` does not exist: ask for m2"
        assert headers["content-length"] == str(len(answer))
    for status, other in (
        (200, body),
        (404, b"no json"),
        (404, b"[]"),
        (404, body.replace(b"`m`", b"`n`")),
        (404, b"x" * 100_000),
    ):
        headers, answer = await _ask(status, [other[:5], other[5:], b""])
        assert (headers["content-length"], answer) == ("1", other)
