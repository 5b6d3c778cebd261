"""ms-swift over a pool of real vLLM: what generates is what was trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.infer_engine.protocol import RequestConfig

from tests.integrations.parity import MAX_ERROR, MIN_CHANGE, error, sampled, version
from tests.integrations.pool import ROOT, Served, serving, serving_struck
from tests.integrations.strike_points import check_struck, in_generation, in_push
from tests.integrations.swift.train import NUM_STEPS
from trainer_side import PolicyVersion, Sampling
from trainer_side.integrations.swift import WeftClient
from weft_rl.contract.errors import UnsupportedError

_TRAIN_SECONDS = 240.0
_ENV = {
    "PYTHONPATH": str(ROOT),
    "ACCELERATE_USE_CPU": "true",
    "GLOO_SOCKET_IFNAME": "lo",
    "USE_HF": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("swift")) as running:
        yield running


def train(served: Served, num_ranks: int, policy: str, tuner: str) -> dict[str, Any]:
    """Run ms-swift's trainer to its end; what rank 0 found."""
    module = "tests.integrations.swift.train"
    arguments = (str(served.folder), served.pool.coordinator, policy, tuner)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    ended = subprocess.run(
        [sys.executable, *launcher, "-m", module, *arguments],
        cwd=ROOT, env={**os.environ, **_ENV}, timeout=_TRAIN_SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    results: dict[str, Any] = json.loads((served.folder / "results.json").read_text())
    return results


@pytest.mark.parametrize(
    ("num_ranks", "policy", "tuner"),
    [(1, "math", "lora"), (1, "base", "lora"), (2, "base", "full")],
)
def test_what_is_trained_by_grpo_is_served_at_each_step(
    served: Served, num_ranks: int, policy: str, tuner: str
) -> None:
    """By the log-probabilities of each push, and by ms-swift's own of what it learns from."""
    before = 0
    if policy == "base":
        before = version(sampled(served.pool.coordinator, "base"))
    results = train(served, num_ranks, policy, tuner)
    check(results, before)
    assert error(sampled(served.pool.coordinator, policy), served.model) > MIN_CHANGE


def check(results: dict[str, Any], before: int = 0) -> None:
    """Each step has pushed what was trained, and learnt from what was pushed."""
    versions = [push["version"] for push in results["pushes"]]
    assert versions == [before + 1 + step for step in range(NUM_STEPS)]
    for push in results["pushes"]:
        assert push["error"] <= MAX_ERROR, results["pushes"]
    assert len(results["log"]) == NUM_STEPS
    for step in results["log"]:
        assert step["rollout_correction/log_ppl_abs_diff"] <= MAX_ERROR, step


def test_a_training_goes_on_where_replicas_are_killed(tmp_path: Path) -> None:
    """One as it generates, one as it receives a push."""
    with serving_struck(tmp_path) as struck:
        check(train(struck, 1, "math", "lora"))
        check_struck(in_generation(tmp_path), in_push(tmp_path))


class Template:
    """What is asked of ms-swift's: stop words are the end token, and two words in a row."""

    template_meta = SimpleNamespace(stop_words=["w2", [7, 8]])
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [int(word[1:]) for word in text.split()],
        decode=lambda ids: " ".join(f"w{token}" for token in ids),
    )

    def set_mode(self, mode: str) -> None:
        assert mode == "vllm"

    def encode(self, request: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(request.messages)]}


@pytest.fixture
def client() -> Iterator[WeftClient]:
    """Of a pool that does not answer; nothing is asked of it."""
    client = WeftClient("127.0.0.1:1", {})
    client.serve(PolicyVersion("math", 3), Template())
    yield client
    client._client.close()


def test_what_ms_swift_says_of_sampling_is_said_to_replicas(client: WeftClient) -> None:
    usual = asdict(RequestConfig(max_tokens=8, temperature=0.9, top_k=-1, top_p=1.0, stop=["w9"]))
    assert client._sampling(usual) == Sampling(
        max_tokens=8, temperature=0.9, stop_token_ids=(9, 2), stop=("w7 w8",)
    )
    with pytest.raises(UnsupportedError, match="frequency_penalty, prompt_logprobs: not known"):
        client._sampling({**usual, "frequency_penalty": 0.5, "prompt_logprobs": 1})


def test_what_cannot_be_answered_is_refused(client: WeftClient) -> None:
    with pytest.raises(UnsupportedError, match="images"):
        client.infer([{"messages": [], "images": ["a.png"]}], asdict(RequestConfig()))
    client._version = None
    with pytest.raises(UnsupportedError, match="begins with a push"):
        client.infer([{"messages": []}], asdict(RequestConfig()))
