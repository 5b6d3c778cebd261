"""Real vLLM: a replica that starts late answers, bit by bit, like the first, and both
go back to what they served before."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from tests.e2e.conftest import TinyModels
from tests.e2e.replicas import LORA_ARGS, MODEL_NAME, running_coordinator, running_replicas
from trainer_side import Publisher
from weft.rpc.channel import open_channel
from weft.v1 import inspect_pb2 as pb
from weft.v1.inspect_pb2_grpc import InspectServiceStub
from weft_cli.operate import roll_back

_PROMPT = [5, 9, 33, 70, 12, 101, 8]
_CATCH_UP_SECONDS = 30.0


def ask(url: str, model: str) -> tuple[list[str], list[float], str]:
    """Greedy tokens, their log-probabilities, and the version that answered."""
    response = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": model,
            "prompt": _PROMPT,
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


def wait_ready(target: str, replica_id: str, url: str = "") -> pb.Replica:
    """The replica, once the coordinator says that it serves all.

    Args:
        url: Of its OpenAI server, where a process of the same name was killed before: what
            the coordinator knows may still be that one's.
    """
    deadline = time.monotonic() + _CATCH_UP_SECONDS
    with open_channel(target) as channel:
        stub = InspectServiceStub(channel)
        while True:
            replicas = stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
            replica = next((r for r in replicas if r.replica_id == replica_id), pb.Replica())
            if replica.state == pb.REPLICA_STATE_READY and url in ("", replica.http_url):
                return replica
            assert time.monotonic() < deadline, replica.state_reason
            time.sleep(0.1)


def test_a_late_replica_clones_all_and_goes_back_with_the_others(
    tmp_path: Path, qwen2: TinyModels
) -> None:
    models = (MODEL_NAME, "math@1", "math@2", "math", "code")
    options = ("--retain-base", "2")
    with (
        running_coordinator(tmp_path) as coordinator,
        running_replicas(
            tmp_path, coordinator.target, [qwen2.base], *LORA_ARGS, options=options
        ) as first,
        Publisher(coordinator.target, trainer_id="trainer", timeout_seconds=60) as publisher,
    ):
        started_with = ask(first[0], MODEL_NAME)
        publisher.push_base(qwen2.other)
        publisher.push_adapter(qwen2.adapters[0], "math")
        publisher.push_adapter(qwen2.adapters[1], "math")
        publisher.push_adapter(qwen2.adapters[2], "code")
        with running_replicas(
            tmp_path, coordinator.target, [qwen2.base], *LORA_ARGS, first=1, options=options
        ) as late:
            replica = wait_ready(coordinator.target, "replica-1")
            assert list(replica.retained_base_versions) == [1]
            answers = {model: ask(first[0], model) for model in models}
            assert answers[MODEL_NAME] != started_with
            assert answers["math"][2] == "math@2"
            assert answers["math@1"][:2] != answers["math@2"][:2]
            for model in models:
                assert ask(late[0], model) == answers[model]
            publisher.push_base(qwen2.base)
            for url in (first[0], late[0]):
                assert ask(url, MODEL_NAME) == started_with
            roll_back(coordinator.target, "base", 1, timeout_seconds=60)
            roll_back(coordinator.target, "math", 1, timeout_seconds=60)
            for url in (first[0], late[0]):
                for model in (MODEL_NAME, "math@1", "math@2", "code"):
                    assert ask(url, model) == answers[model]
                assert ask(url, "math") == answers["math@1"]
            assert wait_ready(coordinator.target, "replica-1").version_vector.base == 1
            assert str(publisher.push_adapter(qwen2.adapters[3], "math")) == "math@3"
            for url in (first[0], late[0]):
                assert ask(url, "math")[2] == "math@3"
