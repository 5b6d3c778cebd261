"""An OpenAI client with as little as the demo needs; any other works as well."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A completion: who answered, which tokens, how probable each was."""

    model: str
    tokens: list[int]
    log_probs: list[float]


def complete(url: str, model: str, prompt: list[int], max_tokens: int = 12) -> Answer:
    """Complete token ids greedily through ``/v1/completions``; blocks at most 60 s."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "logprobs": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    reply = _post(f"{url}/v1/completions", body)
    choice = reply["choices"][0]
    return Answer(reply["model"], choice["token_ids"], choice["logprobs"]["token_logprobs"])


def list_models(url: str) -> list[str]:
    """List the names that can be asked for."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return [card["id"] for card in json.load(response)["data"]]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            reply: dict[str, Any] = json.load(response)
            return reply
    except urllib.error.HTTPError as error:
        error.add_note(error.read().decode("utf-8", "replace"))
        raise
