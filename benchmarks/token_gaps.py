"""``python -m benchmarks.token_gaps URL MODEL STREAMS``: the time between tokens, as clients
of a replica see it.

A process of its own, so that the trainer's work does not delay its clock. Each line of
its input is answered by a line of JSON: milliseconds between tokens since the one before. A line
may name times of ``time.monotonic()``: what ended until each, after the one before, is said, too.
Before they begin, as many requests as there are streams are prefilled at once, as long as the
streams' get: what a replica that computes their cache anew has to do at the least.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx

_PROMPT = list(range(5, 37))
# After a base was loaded, what the running requests had in the cache is computed anew:
# their length is part of the gap.
_MAX_TOKENS = 200


class Gaps:
    """Times between tokens of several streams."""

    def __init__(self, num_streams: int) -> None:
        self._lock = threading.Lock()
        self._last: list[float | None] = [None] * num_streams
        self._seen: list[tuple[float, float]] = []  # when it ended, seconds

    def token(self, stream: int) -> None:
        """A token has come."""
        now = time.monotonic()
        with self._lock:
            last, self._last[stream] = self._last[stream], now
            if last is not None:
                self._seen.append((now, now - last))

    def begins(self, stream: int) -> None:
        """A new request: the time to its first token is no gap."""
        with self._lock:
            self._last[stream] = None

    def take(self, times: Sequence[float]) -> dict[str, Any]:
        """Return what was seen since it was last asked, and until each of these times."""
        with self._lock:
            seen, self._seen = self._seen, []
        seconds = sorted(gap for _, gap in seen)
        if not seconds:
            return {"tokens": 0}
        middle = seconds[len(seconds) // 2]
        return {
            "tokens": len(seconds),
            "median_ms": round(middle * 1e3, 2),
            "p99_ms": round(seconds[int(len(seconds) * 0.99)] * 1e3, 2),
            "max_ms": round(seconds[-1] * 1e3, 2),
            "max_until_ms": [
                round(max((gap for end, gap in seen if a < end <= b), default=0.0) * 1e3, 2)
                for a, b in pairwise((0.0, *times))
            ],
        }


def stream(url: str, model: str, number: int, gaps: Gaps) -> None:
    """Ask for tokens without end."""
    with httpx.Client(timeout=120.0) as client:
        while True:
            gaps.begins(number)
            body = {"model": model, "prompt": _PROMPT, "max_tokens": _MAX_TOKENS, "stream": True,
                    "ignore_eos": True, "temperature": 0.0}  # fmt: skip
            with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        gaps.token(number)


def prefill(url: str, model: str, num_streams: int) -> float:
    """Seconds until each of so many requests of full length at once has its first token."""

    def ask(prompt: list[int]) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        client.post(f"{url}/v1/completions", json=body).raise_for_status()

    length = len(_PROMPT) + _MAX_TOKENS
    taken = []
    # A client that is made takes longer than a request.
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(num_streams) as pool:
        for _ in range(5):
            prompts = [
                [random.randrange(5, 1000) for _ in range(length)] for _ in range(num_streams)
            ]
            began = time.monotonic()
            list(pool.map(ask, prompts))
            taken.append(time.monotonic() - began)
    return sorted(taken)[2]


def main() -> None:
    """See the module."""
    url, model, num_streams = sys.argv[1], sys.argv[2], int(sys.argv[3])
    anew = prefill(url, model, num_streams)
    gaps = Gaps(num_streams)
    for number in range(num_streams):
        threading.Thread(target=stream, args=(url, model, number, gaps), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        times = [float(text) for text in line.split()[1:]]
        print(json.dumps({**gaps.take(times), "prefill_ms": round(anew * 1e3, 1)}), flush=True)


if __name__ == "__main__":
    main()
