"""OpenAI client with as little as the demo needs, and the requests that it sends all the while."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Any

#: Pause between a client's requests: two engines share two cores with everything else here.
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Answer:
    """Completion: the model that answered, its tokens and their log-probabilities."""

    model: str
    tokens: list[int]
    log_probs: list[float]


def complete(url: str, model: str, prompt: list[int], max_tokens: int = 12) -> Answer:
    """Complete token ids greedily through ``/v1/completions``; blocks at most 60 s."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "logprobs": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            reply: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        error.add_note(error.read().decode("utf-8", "replace"))
        raise
    choice = reply["choices"][0]
    return Answer(reply["model"], choice["token_ids"], choice["logprobs"]["token_logprobs"])


def list_models(url: str) -> list[str]:
    """List the names that can be asked for."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return [card["id"] for card in json.load(response)["data"]]


class ClientThreads:
    """Client threads, one a replica, that request ``model`` over and over.

    ``answered`` counts answers by the version that they name; ``failures`` describes requests
    that failed.
    """

    def __init__(self, urls: list[str], base_name: str) -> None:
        self.answered: Counter[str] = Counter()
        self.failures: list[str] = []
        self.model = base_name
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(url, seed), daemon=True)
            for seed, url in enumerate(urls)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after their running requests; blocks for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, url: str, seed: int) -> None:
        number = seed
        while not self._stop.wait(_PAUSE_SECONDS):
            number += 7
            prompt = [2 + (number * k) % 250 for k in range(1, 9)]
            try:
                answer = complete(url, self.model, prompt, max_tokens=24)
                with self._lock:
                    self.answered[answer.model] += 1
            except OSError as error:
                with self._lock:
                    self.failures.append(f"{url}: {error}")
