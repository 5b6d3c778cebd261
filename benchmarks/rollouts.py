"""``python -m benchmarks.rollouts``: thousands of short requests over two real vLLM replicas.

First the client's own CPU for each request, beside plain HTTP clients that ask the same of the
same replicas, in turns. Then 10,000 requests from 64 threads by RolloutClient while adapters and
bases are pushed: each answer is checked against transformers and PEFT on the weights of the
versions that it names. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import torch

from benchmarks.machine import describe
from tests.e2e.replicas import LORA_ARGS, MODEL_NAME, running_coordinator, running_replicas
from tests.models import Referee, make_adapter, make_model
from trainer_side import Publisher, RolloutClient, Sample, Sampling

_THREADS, _TOKENS, _ROUNDS = 64, 4, 5
_ENGINE_ARGS = ("--max-num-seqs", "32")
_PROMPTS = [[5, 9, 33, 70], [12, 101, 8], [77, 3, 3, 40, 9]]
_HOW = Sampling(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)


def _body(prompt: Sequence[int]) -> dict[str, Any]:
    return {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0,
        "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip


def _cpu_of_clients(urls: list[str], target: str, count: int) -> dict[str, list[float]]:
    """CPU seconds of this process a request, by client, in rounds."""
    local = threading.local()
    hosts = [url.removeprefix("http://") for url in urls]
    numbers = itertools.count()

    def by_http_client(prompt: list[int]) -> int:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(hosts[next(numbers) % 2], timeout=60)
        headers = {"Content-Type": "application/json"}
        local.connection.request("POST", "/v1/completions", json.dumps(_body(prompt)), headers)
        answer = json.loads(local.connection.getresponse().read())
        return len(answer["choices"][0]["token_ids"])

    def by_httpx(prompt: list[int]) -> int:
        url = urls[next(numbers) % 2]
        answer = shared.post(f"{url}/v1/completions", json=_body(prompt)).json()
        return len(answer["choices"][0]["token_ids"])

    def by_rollout_client(prompt: list[int]) -> int:
        (group,) = rollouts.generate([prompt], sampling=_HOW)
        return len(group.samples[0].token_ids)

    clients: dict[str, Callable[[list[int]], int]] = {
        "http.client": by_http_client,
        "httpx": by_httpx,
        "RolloutClient": by_rollout_client,
    }
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    limits = httpx.Limits(max_connections=_THREADS)
    with (
        httpx.Client(timeout=60, limits=limits) as shared,
        RolloutClient(target, timeout_seconds=120) as rollouts,
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        for _ in range(_ROUNDS + 1):
            for name, ask in clients.items():
                began = time.process_time()
                prompts = itertools.islice(itertools.cycle(_PROMPTS), count)
                assert set(threads.map(ask, prompts)) == {_TOKENS}
                seconds[name].append((time.process_time() - began) / count)
    return {name: taken[1:] for name, taken in seconds.items()}


class _Weights:
    """Which weights a version has, of those that were pushed."""

    def __init__(self, root: Path) -> None:
        self._bases = [make_model("qwen2", root / f"base{i}", seed=i, tied=False) for i in (0, 1)]
        self._adapters = [
            make_adapter(self._bases[0], root / f"adapter{i}", seed=i) for i in range(3)
        ]
        self.base = self._bases[0]
        self._of: dict[tuple[str, int], Path] = {("base", 0): self.base}
        self.newest = {"base": 0}
        self._referee = Referee()
        self._known: dict[tuple[Any, ...], list[float]] = {}

    def push(self, publisher: Publisher, policy: str, number: int) -> None:
        """Push the next weights of a policy."""
        if policy == "base":
            path = self._bases[number % 2]
            version = publisher.push_base(path).version
        else:
            path = self._adapters[number % 3]
            version = publisher.push_adapter(path, policy, base="any").version
        self._of[policy, version.version] = path
        self.newest[policy] = version.version

    def error_of(self, prompt: list[int], sample: Sample) -> float:
        """How far its log-probabilities are from what transformers says of its versions."""
        tokens = sample.token_ids.tolist()
        adapter = sample.adapter and self._of[sample.adapter.policy, sample.adapter.version]
        errors = []
        for at, (base, logprob) in enumerate(
            zip(sample.base_versions.tolist(), sample.logprobs.tolist(), strict=True)
        ):
            key = (self._of["base", base], tuple(prompt), tuple(tokens), adapter)
            if key not in self._known:
                self._known[key] = self._referee.logprobs(key[0], prompt, tokens, adapter)
            errors.append(abs(self._known[key][at] - logprob))
        return max(errors)


def _under_change(target: str, weights: _Weights, count: int, max_error: float) -> bool:
    """Ask while versions change, check every answer, and print what was seen."""
    is_done = threading.Event()

    def push() -> int:
        for number in itertools.count():
            if is_done.wait(0.3):
                return number
            weights.push(publisher, ("math", "base", "math", "poet")[number % 4], number)
        raise AssertionError

    def ask(number: int) -> tuple[list[int], str, int, list[Sample]]:
        policy = ("base", "math", "poet")[number % 3]
        newest = weights.newest[policy]
        prompt = _PROMPTS[number % 7 % 3]
        how = {"min_version": f"{policy}@{newest}"} if number % 2 else {}
        (group,) = rollouts.generate([prompt], model=policy, sampling=_HOW, **how)
        return prompt, policy, newest, [*group.samples]

    with (
        # Between processes that may share a GPU, too, which NCCL cannot.
        Publisher(target, trainer_id="bench", progress=None, backend="gloo") as publisher,
        RolloutClient(target, timeout_seconds=300) as rollouts,
        ThreadPoolExecutor(_THREADS + 1) as threads,
    ):
        for number, policy in enumerate(("math", "poet")):
            weights.push(publisher, policy, number)
        pushing = threads.submit(push)
        began = time.monotonic()
        answers = list(threads.map(ask, range(count)))
        seconds = time.monotonic() - began
        is_done.set()
        pushes = pushing.result(60)
    counted: Counter[str] = Counter()
    versions, worst = set(), 0.0
    for prompt, policy, newest, samples in answers:
        counted["answers"] += len(samples)
        for sample in samples:
            worst = max(worst, weights.error_of(prompt, sample))
            named = {(policy, version) for version in sample.versions.tolist()}
            versions |= named
            counted["older than asked for"] += min(sample.versions.tolist()) < newest
            counted["cut short"] += len(sample.token_ids) != _TOKENS
            counted["over two bases"] += len(set(sample.base_versions.tolist())) > 1
    print(
        f"{count} requests of {_TOKENS} tokens, {_THREADS} threads, {pushes} pushes: "
        f"{count / seconds:.0f} a second; {counted['answers']} answers, {len(versions)} versions, "
        f"{counted['over two bases']} over two bases; older than the newest that was pushed "
        f"before: {counted['older than asked for']}; cut short: {counted['cut short']}; largest "
        f"error of a log-probability {worst:.1e} (bound {max_error})"
    )
    bad = counted["older than asked for"] or counted["cut short"] or worst > max_error
    return not bad and counted["answers"] == count


def main() -> int:
    """Print the figures, and what they were measured on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="while versions change")
    parser.add_argument("--cpu-requests", type=int, default=600, help="of each client and round")
    parser.add_argument("--max-error", type=float, default=5e-5, help="of a log-probability")
    parser.add_argument("vllm_args", nargs="*", help="further ones of vLLM's, behind --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        work = Path(folder)
        weights = _Weights(work)
        target = stack.enter_context(running_coordinator(work)).target
        urls = stack.enter_context(
            running_replicas(
                work, target, [weights.base] * 2, *LORA_ARGS, *_ENGINE_ARGS, *arguments.vllm_args
            )
        )
        print(describe())
        taken = _cpu_of_clients(urls, target, arguments.cpu_requests)
        for name, seconds in taken.items():
            print(
                f"{name}: {statistics.median(seconds) * 1e3:.2f} ms of CPU a request "
                f"({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}, {_ROUNDS} rounds of "
                f"{arguments.cpu_requests} from {_THREADS} threads)"
            )
        is_right = _under_change(target, weights, arguments.requests, arguments.max_error)
        return 0 if is_right else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
