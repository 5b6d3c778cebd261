"""``weft coordinator`` and ``weft rollout`` as processes, for tests of the whole path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.waits import until
from weft_rl.cli.demo.processes import Process
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import generate_pb2
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.generate_pb2_grpc import GenerateServiceStub
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

MODEL_NAME = "tiny"
PROMPT = [5, 9, 33, 70, 12, 101, 8]
_START_SECONDS = 240.0
_CATCH_UP_SECONDS = 30.0
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ARGS = (
    "--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "256", "--max-num-seqs", "8", "--disable-uvicorn-access-log",
)  # fmt: skip
LORA_ARGS = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3")


@dataclass
class Coordinator:
    """A coordinator process on a port of its own, which a restart keeps."""

    work: Path
    process: Process
    target: str

    @classmethod
    def start(
        cls,
        work: Path,
        lost_after_seconds: float = 60.0,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Coordinator:
        """Start on ``work``'s catalog, with further options; returns once it listens."""
        args = ("-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0", "--catalog",
                str(work / "weft.db"), "--lost-after-seconds", str(lost_after_seconds),
                *options)  # fmt: skip
        process = Process("coordinator", args, work, dict(env or {}))
        line = process.line(lambda text: text.startswith("listening on "), 60)
        return cls(work, process, line.removeprefix("listening on "))


@contextmanager
def running_coordinator(work: Path, **settings: Any) -> Iterator[Coordinator]:
    """A coordinator for the length of a test; ``settings`` as for ``start``."""
    coordinator = Coordinator.start(work, **settings)
    try:
        yield coordinator
    finally:
        coordinator.process.stop()


@contextmanager
def running_replicas(
    work: Path,
    target: str,
    models: Sequence[Path],
    *args: str,
    first: int = 0,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[list[str]]:
    """A replica for each of ``models``, started side by side.

    Args:
        args: vLLM's.
        first: Number in the name of the first; further ones follow.
        options: Of ``weft rollout``.
        env: Further environment.

    Yields:
        Base URLs of their OpenAI servers.
    """
    with ExitStack() as stack:
        processes = []
        for i, model in enumerate(models, first):
            process = start_replica(
                work, target, f"replica-{i}", model, *args, options=options, env=env
            )
            stack.callback(process.stop)
            processes.append(process)
        yield [answering_url(process) for process in processes]


def start_replica(
    work: Path,
    target: str,
    replica_id: str,
    model: Path,
    *args: str,
    options: Sequence[str] = (),
    log_name: str = "",
    entry: Sequence[str] = ("-m", "weft_rl"),
    env: Mapping[str, str] | None = None,
) -> Process:
    """Start ``weft rollout``; ``serving_url`` waits for it. The caller stops it.

    Args:
        args: vLLM's.
        options: Of ``weft rollout``.
        log_name: Of its log file, without suffix; by default the replica's id.
        entry: How the command is run.
        env: Further environment.
    """
    command = (*entry, "rollout", "-c", target, "--http-port", "0",
               "--replica-id", replica_id, "--adapter-memory-gib", "0.25",
               "--staging-memory-gib", "0.25", *options,
               "--", str(model), *ARGS, *args)  # fmt: skip
    return Process(log_name or replica_id, command, work, {**ENV, **(env or {})})


def serving_url(process: Process) -> str:
    """Base URL of a replica's OpenAI server, once it listens."""
    line = process.line(lambda text: "serving on http" in text, _START_SECONDS)
    match = re.search(r"http://[^\s,]+", line)
    assert match is not None
    return match.group()


def answering_url(process: Process) -> str:
    """The same, once it answers bare names, too: it has heard from the coordinator by then, and
    serves the pool's base."""
    url = serving_url(process)

    def names() -> list[str]:
        return [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]

    until(lambda: "base" in names(), _START_SECONDS, every_seconds=0.05, why=process.tail)
    return url


def served_versions(target: str) -> dict[str, int]:
    """The number that a pool serves of each policy."""
    with open_channel(target) as channel:
        pool = InspectServiceStub(channel).GetPool(pb.GetPoolRequest(), timeout=10)
    return {each.policy: each.served_version for each in pool.policies}


def ask(url: str, model: str) -> tuple[list[str], list[float], str]:
    """Greedy tokens, their log-probabilities, and the version that answered."""
    response = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": model,
            "prompt": PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        },
        timeout=60,
    )
    response.raise_for_status()
    answer = response.json()
    logprobs = answer["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"], answer["model"]


def stream(url: str, num_tokens: int, started: Callable[[], object]) -> tuple[int, str]:
    """Ask for so many tokens, and call ``started`` as each comes; how many came, and why the
    answer ended."""
    request = {
        "model": MODEL_NAME,
        "prompt": [5, 9, 33, 70],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    finish, num_come = "", 0
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=60) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                started()
                finish = choice["finish_reason"] or finish
            if chunk.get("usage"):
                num_come = chunk["usage"]["completion_tokens"]
    return num_come, finish


def generate(address: str, policy: str) -> tuple[list[str], list[float], str]:
    """What ``ask`` answers, from a replica's GenerateService."""
    request = generate_pb2.GenerateRequest(
        policy=policy,
        token_ids=generate_pb2.TokenIds(ids=PROMPT),
        sampling=generate_pb2.Sampling(temperature=0, max_tokens=12, ignore_eos=True),
    )
    tokens, logprobs = list[str](), list[float]()
    with open_channel(address) as channel:
        for response in GenerateServiceStub(channel).Generate(request, timeout=60):
            (chunk,) = response.chunks
            tokens += [f"token_id:{token}" for token in chunk.token_ids]
            logprobs += chunk.logprobs
    (span,) = chunk.base_spans
    assert (span.start, span.end) == (0, 12)
    named = chunk.adapter if chunk.HasField("adapter") else span
    return tokens, logprobs, f"{chunk.adapter.policy or 'base'}@{named.version}"


def wait_ready(target: str, replica_id: str, url: str = "") -> pb.Replica:
    """The replica, once the coordinator says that it serves all.

    Args:
        url: Of its OpenAI server, where a process of the same name was killed before: what
            the coordinator knows may still be that one's.
    """
    with open_channel(target) as channel:
        stub = InspectServiceStub(channel)
        found = [pb.Replica()]

        def is_ready() -> bool:
            replicas = stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
            found[:] = [r for r in replicas if r.replica_id == replica_id] or [pb.Replica()]
            is_there = url in ("", found[0].http_url)
            return is_there and bool(found[0].state == pb.REPLICA_STATE_READY)

        until(is_ready, _CATCH_UP_SECONDS, every_seconds=0.1, why=lambda: found[0].state_reason)
        return found[0]
