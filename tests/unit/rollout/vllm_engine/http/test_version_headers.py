"""Headers that name what made an answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.http.middleware import (
    current_notes,
    name_versions,
    note_reason,
)
from rollout_side.vllm_engine.http.served_models import ServedModels
from weft_rl.contract.names import PolicyVersion


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
            note_reason(self.reason)
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
    note_reason("of no request")
