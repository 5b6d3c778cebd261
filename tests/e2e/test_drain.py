"""Real vLLM: replicas that are told to leave finish what runs, then end with status 0."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import TinyModels
from tests.e2e.replicas import MODEL_NAME, running_coordinator, serving_url, start_replica
from weft_cli.replicas import drain

_NUM_TOKENS = 240
_SECONDS = 60.0


def _stream(url: str, started: Any) -> tuple[int, str]:
    """Ask for many tokens; calls ``started`` at the first; returns how many came, and why
    the answer ended."""
    request = {
        "model": MODEL_NAME,
        "prompt": [5, 9, 33, 70],
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    finish, num_tokens = "", 0
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=_SECONDS) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                started()
                finish = choice["finish_reason"] or finish
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
    return num_tokens, finish


def test_running_requests_end_whole_and_the_process_with_0(
    tmp_path: Path, qwen2: TinyModels
) -> None:
    with running_coordinator(tmp_path) as coordinator, ExitStack() as stack:
        processes = [
            start_replica(tmp_path, coordinator.target, f"replica-{i}", qwen2.base)
            for i in range(2)
        ]
        for process in processes:
            stack.callback(process.stop)
        urls = [serving_url(process) for process in processes]
        threads = stack.enter_context(ThreadPoolExecutor(1))

        told: list[Any] = []

        def drain_first() -> None:
            """At the first token: an order of an operator, to replica-0."""
            if not told:
                order = (coordinator.target, "replica-0", "old card")
                told.append(threads.submit(drain, *order, timeout_seconds=_SECONDS))

        def stop_second() -> None:
            """At the first token: SIGTERM, to replica-1."""
            if len(told) < 2:
                told.append(processes[1].signal_quietly(signal.SIGTERM))

        assert _stream(urls[0], drain_first) == (_NUM_TOKENS, "length")
        assert _stream(urls[1], stop_second) == (_NUM_TOKENS, "length")
        ends = ("by an operator: old card", "its process was told to stop")
        for process, why in zip(processes, ends, strict=True):
            line = process.line(lambda text: text.startswith("ended: "), _SECONDS)
            assert line == f"ended: drained: {why}"
            assert process.wait(_SECONDS) == 0
        told[0].result(_SECONDS)
