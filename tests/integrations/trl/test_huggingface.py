"""Hugging Face's Trainer of two ranks pushes by the callback, and real vLLM answers as what it
saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.logprobs import MAX_ERROR
from tests.e2e.replicas import LORA_ARGS, PROMPT, ask, running_coordinator, running_replicas
from tests.integrations.trl.ranks import running_ranks
from tests.models import Referee, make_model


class Pool:
    def __init__(self, work: Path, model: Path, target: str, url: str) -> None:
        self.work, self.model, self.target, self.url = work, model, target, url


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    work = tmp_path_factory.mktemp("huggingface")
    model = make_model("qwen2", work / "model")
    with (
        running_coordinator(work) as coordinator,
        running_replicas(work, coordinator.target, [model], *LORA_ARGS) as urls,
    ):
        yield Pool(work, model, coordinator.target, urls[0])


# Adapters first: a pushed base is under each that follows. Under DDP a callback is given the
# model itself.
@pytest.mark.parametrize(
    ("zero3", "policy", "source"),
    [
        (False, "math", "plain PEFT adapter"),
        (True, "math", "DeepSpeed ZeRO-3 PEFT adapter"),
        (True, "base", "DeepSpeed ZeRO-3"),
        (False, "base", "plain"),
    ],
)
def test_what_is_served_is_what_was_trained(pool, tmp_path, zero3, policy, source):
    before = ask(pool.url, "tiny")
    with running_ranks(tmp_path, pool.target, 2) as ranks:
        saved = tmp_path / "saved"
        answers = ranks.do(
            "callback", model=str(pool.model), policy=policy, steps=4, every=2,
            saved=str(saved), zero3=zero3,
        )  # fmt: skip
    (version,) = {answer["version"] for answer in answers}
    named, number = version.split("@")
    assert named == policy
    assert int(number) >= 2
    is_base = policy == "base"
    tokens, logprobs, answered = ask(pool.url, "tiny" if is_base else version)
    assert answered == ("tiny" if is_base else version)
    assert (tokens, logprobs) != before[:2]
    ids = [int(token.removeprefix("token_id:")) for token in tokens]
    model, adapter = (saved, None) if is_base else (pool.model, saved)
    wanted = Referee().logprobs(model, PROMPT, ids, adapter)
    assert max(abs(a - b) for a, b in zip(wanted, logprobs, strict=True)) <= MAX_ERROR
    assert source in answers[0]["source"]
