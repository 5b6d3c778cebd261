"""Answers of the OpenAI server over a switch of the base, with vLLM's doubles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rollout_side.engine import AliasRefusals
from rollout_side.vllm_engine.compat import requests
from rollout_side.vllm_engine.http.middleware import name_versions
from tests.doubles.vllm import BASE, GeneratingEngine, make_replica, sampling_params
from tests.waits import eventually
from weft_rl.contract.capabilities import RunningRequests


class _Failed(Exception):
    """In the place of vLLM's."""


class _Server:
    """vLLM's server: it looks the model up, has the engine generate, and streams."""

    def __init__(self, choice: RunningRequests = "recompute") -> None:
        self.engine = GeneratingEngine()
        self.replica = make_replica(self.engine, running_requests=choice)
        self.models = self.replica.models
        self.app = name_versions(self._answer, self.models, kept=choice == "keep")
        #: Between a request's lookup and its admission.
        self.rendered = asyncio.Event()
        self.rendered.set()
        self.num_rendered = 0

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        serving, model = self.models._serving, scope["model"]
        if not serving.is_base_model(model) and model not in serving.lora_requests:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"The model does not exist."})
            return
        self.num_rendered += 1
        await self.rendered.wait()
        if scope["stream"]:
            await self._stream(scope, send)
        else:
            await self._whole(scope, send)

    async def _stream(self, scope: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for output in self._outputs(scope):
                (sample,) = output.outputs
                choice = {"text": str(sample.token_ids), "finish_reason": sample.finish_reason}
                await _send_event(send, {"id": "cmpl-1", "choices": [choice]})
            await _send_event(send, {"choices": [], "usage": {}})
        except _Failed as error:
            await _send_event(send, {"error": {"message": str(error)}})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _whole(self, scope: Any, send: Any) -> None:
        status, tokens = 200, []
        try:
            async for output in self._outputs(scope):
                tokens += output.outputs[0].token_ids
        except _Failed:
            status = 503
        body = json.dumps(tokens).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def _outputs(self, scope: Any) -> Any:
        return self.engine.generate([1], sampling_params(None), scope["id"])

    def ask(self, model: str, *, stream: bool = True, request_id: str = "h1") -> _Request:
        return _Request(self, model, stream, request_id)

    async def admitted(self, number: int) -> None:
        await eventually(lambda: len(self.engine.prompts) >= number)


async def _send_event(send: Any, event: dict[str, Any]) -> None:
    body = f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


class _Request:
    """A client's, on its way."""

    def __init__(self, server: _Server, model: str, stream: bool, request_id: str) -> None:
        self.sent: list[Any] = []
        scope = {"type": "http", "method": "POST", "model": model, "stream": stream}
        call = server.app({**scope, "id": request_id}, None, self._take)  # type: ignore[arg-type]
        self.task = asyncio.create_task(call)  # type: ignore[arg-type]

    async def _take(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        named = ((k.decode(), v.decode()) for k, v in self.sent[0]["headers"])
        return {name: text for name, text in named if name.startswith("weft-")}

    @property
    def events(self) -> list[dict[str, Any]]:
        body = b"".join(message["body"] for message in self.sent[1:]).decode()
        events = [event.removeprefix("data: ") for event in body.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        return [json.loads(event) for event in events[:-2]]

    @property
    def error(self) -> dict[str, Any]:
        assert not self.sent[-1].get("more_body")
        (error,) = json.loads(b"".join(message["body"] for message in self.sent[1:])).values()
        return error  # type: ignore[no-any-return]


@pytest_asyncio.fixture(params=["recompute", "keep", "abort"])
async def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[_Server]:
    monkeypatch.setattr(requests, "failure", lambda message, status: _Failed(message))
    made = _Server(request.param)
    yield made
    made.engine.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_exact_base_that_was_replaced_before_the_first_token_answers_nobody(
    server: _Server, stream: bool
) -> None:
    """No token of another base comes under its name."""
    asked = server.ask("base@0", stream=stream)
    await server.admitted(1)
    await server.replica.apply_base("t", BASE, b"")
    server.engine.emit("h1", [10], finish="stop")
    await asked.task
    assert (asked.status, asked.headers) == (404, {"weft-reason": "VERSION_UNKNOWN"})
    assert asked.error["message"].endswith("of base there are base@3")
    assert "abort h1" in server.engine.calls


@pytest.mark.parametrize("stream", [True, False])
async def test_an_exact_base_that_was_replaced_before_admission_answers_nobody(
    server: _Server, stream: bool
) -> None:
    """vLLM has found its name by then; the engine never hears of the request."""
    server.rendered.clear()
    asked = server.ask("base@0", stream=stream)
    await asyncio.sleep(0)
    await server.replica.apply_base("t", BASE, b"")
    server.rendered.set()
    await asked.task
    assert (asked.status, asked.headers) == (404, {"weft-reason": "VERSION_UNKNOWN"})
    assert not server.engine.prompts


async def test_one_that_is_sent_while_the_base_is_replaced_answers_nobody(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not among the engine's requests yet, and so is of the new base whatever it asked."""
    sending = asyncio.Event()

    async def supported(*args: Any, **more: Any) -> Any:
        await sending.wait()
        async for output in server.engine.__class__.generate(server.engine, *args, **more):
            yield output

    requests_at_switch = server.replica.base_switch.requests
    server.engine.generate = lambda *args, **more: requests_at_switch._admit(
        supported, *args, **more
    )
    asked = server.ask("base@0")
    for _ in range(5):
        await asyncio.sleep(0)
    await server.replica.apply_base("t", BASE, b"")
    sending.set()
    await server.admitted(1)
    for _ in range(5):
        await asyncio.sleep(0)
    server.engine.emit("h1", [10], finish="stop")
    await asked.task
    assert asked.status == 404


@pytest.mark.parametrize("asked_for", ["base", "tiny"])
async def test_an_alias_without_tokens_is_answered_by_the_new_base_and_says_so(
    server: _Server, asked_for: str
) -> None:
    asked = server.ask(asked_for)
    await server.admitted(1)
    await server.replica.apply_base("t", BASE, b"")
    server.engine.emit("h1", [10], finish="stop")
    await asked.task
    assert asked.headers == {"weft-base": "base@3"}
    assert [event.get("weft-base") for event in asked.events] == ["base@3", "base@3"]
    assert "weft-last-base" not in asked.events[0]


async def test_a_streams_last_chunk_says_that_the_base_has_changed(server: _Server) -> None:
    asked = server.ask("base@0")
    await server.admitted(1)
    server.engine.emit("h1", [10])
    await eventually(lambda: len(asked.sent) >= 2)
    server.engine.emit("h1", [11])  # on its way when the base changes
    await server.replica.apply_base("t", BASE, b"")
    choice = server.replica.base_switch.requests.choice
    server.engine.emit("h1", [12], finish="stop")
    await asked.task
    assert (asked.status, asked.headers) == (200, {"weft-base": "base@0"})
    events = asked.events
    assert [event["choices"][0]["text"] for event in events[:2]] == ["[10]", "[11]"]
    assert not any("weft-base" in event for event in events[:2])
    if choice == "abort":
        assert "VERSION_CHANGED" in events[-1]["error"]["message"]
        return
    last = {"weft-base": "base@0", "weft-last-base": "base@3"}
    last |= {"weft-older-cache": "true"} if choice == "keep" else {}
    for event in events[2:]:  # of the sample, and of its usage
        assert {k: v for k, v in event.items() if k.startswith("weft-")} == last
        assert event.keys() > last.keys()


async def test_a_token_that_is_on_its_way_is_of_the_base_before(server: _Server) -> None:
    asked = server.ask("base@0")
    await server.admitted(1)
    server.engine.emit("h1", [10], finish="stop")
    await server.replica.apply_base("t", BASE, b"")
    await asked.task
    assert (asked.status, asked.headers["weft-base"]) == (200, "base@0")
    assert asked.events[0]["choices"][0]["text"] == "[10]"


async def test_what_has_ended_by_the_switch_is_not_ended_again(server: _Server) -> None:
    """Its answer has not been taken from the engine yet."""
    asked = server.ask("base@0", stream=False)
    await server.admitted(1)
    server.engine._take("h1", 0, [10], "stop")
    server.models.set_base(BASE)
    await server.replica.base_switch.requests.note_base(frozenset())
    await asked.task
    assert (asked.status, asked.headers["weft-base"]) == (200, "base@0")
    assert asked.headers["weft-last-base"] == "base@3"


async def test_the_same_number_again_ends_nobody(server: _Server) -> None:
    """A base is loaded again, to be repaired."""
    asked = server.ask("base@0")
    await server.admitted(1)
    server.models.set_base(type(BASE)("base", 0))
    await server.replica.base_switch.requests.note_base(frozenset())
    server.engine.emit("h1", [10], finish="stop")
    await asked.task
    assert (asked.status, asked.headers) == (200, {"weft-base": "base@0"})


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_alias_is_unavailable_with_the_reason(
    server: _Server, stream: bool
) -> None:
    server.models.refuse_aliases(AliasRefusals(every="the pool serves base@7"))
    for model in ("base", "tiny"):
        asked = server.ask(model, stream=stream)
        await asked.task
        assert (asked.status, asked.headers) == (503, {"weft-reason": "REFUSING"})
        assert "the pool serves base@7" in asked.error["message"]
        assert (b"retry-after", b"5") in asked.sent[0]["headers"]
    assert not server.num_rendered
    assert not server.engine.prompts
    exact = server.ask("base@0", stream=stream)
    await server.admitted(1)
    server.engine.emit("h1", [10], finish="stop")
    await exact.task
    assert exact.status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_an_alias_that_is_refused_as_its_prompt_is_rendered_is_not_admitted(
    server: _Server, stream: bool
) -> None:
    server.rendered.clear()
    asked = server.ask("tiny", stream=stream)
    await asyncio.sleep(0)
    server.models.refuse_aliases(AliasRefusals(every="the pool serves base@7"))
    server.rendered.set()
    await asked.task
    assert (asked.status, asked.headers) == (503, {"weft-reason": "REFUSING"})
    assert server.num_rendered == 1
    assert not server.engine.prompts


async def test_what_the_model_says_is_never_taken_for_a_last_chunk(server: _Server) -> None:
    text = json.dumps({"finish_reason": "stop", "choices": []}) + '"choices": []'
    body: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_event(send, {"choices": [{"text": text, "finish_reason": None}]})

    async def take(message: Any) -> None:
        body.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST"}
    await name_versions(app, server.models)(scope, None, take)  # type: ignore[arg-type]
    assert json.loads(body[1][6:]) == {"choices": [{"text": text, "finish_reason": None}]}
