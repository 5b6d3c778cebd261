"""Requests that run all the while, from first to last push."""

from __future__ import annotations

import threading
from collections import Counter

from weft_rl.cli.demo.openai_client import complete

# Between a client's requests: two engines share two cores with everything else here.
_THINK_SECONDS = 0.1


class Traffic:
    """One client thread a replica, asking for ``model`` over and over.

    ``answered`` counts answers by the version that they name; ``failures`` holds
    what went wrong, which should be nothing.
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
        """End after the requests under way; blocks for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, url: str, seed: int) -> None:
        number = seed
        while not self._stop.wait(_THINK_SECONDS):
            number += 7
            prompt = [2 + (number * k) % 250 for k in range(1, 9)]
            try:
                answer = complete(url, self.model, prompt, max_tokens=24)
                with self._lock:
                    self.answered[answer.model] += 1
            except OSError as error:
                with self._lock:
                    self.failures.append(f"{url}: {error}")
