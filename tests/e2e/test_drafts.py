"""Models that draft tokens are a part of the base's version: real vLLM, over the whole path.

A replica is asked when it is fresh. Then another model and its draft are pushed, one without, and
then the first ones: tokens and acceptance must be as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from tests import models
from tests.e2e.replicas import (
    MODEL_NAME,
    answering_url,
    running_coordinator,
    start_replica,
    wait_ready,
)
from tests.waits import until
from trainer_side import Publisher
from weft_rl.cli.demo.main import Answer, complete
from weft_rl.cli.demo.processes import Process
from weft_rl.cli.orders import rollback
from weft_rl.cli.status import stale_draft
from weft_rl.contract.errors import InvalidManifestError

PROMPTS = ([5, 17, 99, 200, 33], [7, 8, 9, 10, 11, 12, 13, 14], [100], [61, 3], [250, 9])
_NUM_TOKENS = 80
#: By how much the share of accepted tokens may differ from a fresh engine's.
WITHIN = 0.02
#: vLLM against Hugging Face in fp32.
BOUND = 5e-5
#: Kind of draft, staging, tensor-parallel size.
CASES = [
    ("mtp", "auto", 1),
    ("mtp", "in-place", 2),
    ("draft_model", "auto", 2),
    ("draft_model", "in-place", 1),
    ("eagle", "auto", 1),
    ("eagle3", "in-place", 1),
]
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Model:
    """A model and the one that drafts for it, in directories."""

    target: Path
    draft: Path | None

    @property
    def pushed(self) -> dict[str, Any]:
        """The arguments that push both."""
        if self.draft is None:
            return {"model": self.target}
        return {"model": models.load_hf(self.target), "draft": self.draft}


@dataclass
class Pool:
    """A replica that drafts, a trainer, and what starts another such replica."""

    target: str
    url: str
    publisher: Publisher
    start: Callable[[], str]
    answers: list[Answer]

    def ask(self, url: str = "") -> tuple[list[list[int]], float]:
        """Greedy answers, and the share of the tokens drafted for them that was accepted."""
        url = url or self.url
        before = draft_counts(url)
        self.answers = [complete(url, MODEL_NAME, prompt, _NUM_TOKENS) for prompt in PROMPTS]
        drafted, accepted = (
            now - then for now, then in zip(draft_counts(url), before, strict=True)
        )
        assert drafted >= 200
        return [answer.tokens for answer in self.answers], accepted / drafted

    def check(self, model: Path) -> None:
        """Compare the last answers with Hugging Face's."""
        referee = models.Referee()
        for answer, prompt in zip(self.answers, PROMPTS, strict=True):
            want = referee.logprobs(model, prompt, answer.tokens)
            assert max(abs(a - b) for a, b in zip(answer.log_probs, want, strict=True)) <= BOUND

    def stale(self, version: int, replica_id: str = "replica-0", *, words: str = "") -> str:
        """Return the words of `weft status` on a draft, once the replica serves a version, and
        these words are among them: its draft counts as of the base until its next heartbeat."""
        said = [""]

        def is_said() -> bool:
            replica = wait_ready(self.target, replica_id)
            said[0] = stale_draft(replica)
            return bool(replica.version_vector.base == version and words in said[0])

        until(is_said, 60.0, every_seconds=0.1, why=lambda: said[0])
        return said[0]


def draft_counts(url: str) -> tuple[float, float]:
    """How many tokens an idle engine has drafted, and how many of them were accepted.

    vLLM counts a step once it has handed its tokens out, so the last may still be missing.
    """
    found = [(-1.0, -1.0)] * 2

    def is_idle() -> bool:
        found[:] = found[1], _draft_counts(url)
        return found[0] == found[1]

    until(is_idle, 30, every_seconds=0.2, why=lambda: "the engine is not idle")
    return found[0]


def _draft_counts(url: str) -> tuple[float, float]:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    count = "vllm:spec_decode_num_{}_tokens_total"
    return found[count.format("draft")], found[count.format("accepted")]


@pytest.fixture
def pool(
    tmp_path: Path, first: Model, kind: str, staging: str, tensor_parallel: int
) -> Iterator[Pool]:
    how = {"method": kind, "num_speculative_tokens": 1 if kind in ("mtp", "eagle3") else 3}
    if first.draft is not None:
        how["model"] = str(first.draft)
    args = ["--speculative-config", json.dumps(how)]
    args += ["--tensor-parallel-size", str(tensor_parallel)]
    options = ["--staging", staging, *(["--base-copies", "3"] if staging == "auto" else [])]
    with ExitStack() as stack:
        target = stack.enter_context(running_coordinator(tmp_path)).target
        started: list[Process] = []

        def start() -> str:
            name = f"replica-{len(started)}"
            process = start_replica(tmp_path, target, name, first.target, *args, options=options)
            started.append(process)
            stack.callback(process.stop)
            return answering_url(process)

        url = start()
        publisher = stack.enter_context(
            Publisher(target, trainer_id="trainer-a", timeout_seconds=120)
        )
        yield Pool(target, url, publisher, start, [])


@pytest.fixture
def first(tmp_path: Path, kind: str) -> Model:
    return Model(*models.make_drafted(kind, tmp_path / "first", seed=1))


@pytest.fixture
def second(tmp_path: Path, kind: str) -> Model:
    return Model(*models.make_drafted(kind, tmp_path / "second", seed=2))


@pytest.mark.parametrize(("kind", "staging", "tensor_parallel"), CASES)
def test_a_draft_is_of_its_bases_version(
    pool: Pool, first: Model, second: Model, staging: str, tmp_path: Path
) -> None:
    replica = wait_ready(pool.target, "replica-0")
    assert replica.capabilities.draft_fingerprint
    when_fresh, acceptance = pool.ask()
    pool.check(first.target)
    assert acceptance > 0.3

    assert str(pool.publisher.push_base(**second.pushed).version) == "base@1"
    other, of_other = pool.ask()
    pool.check(second.target)
    assert other != when_fresh
    assert of_other > 0.3
    assert not pool.stale(1)

    wrong, words = _cut(second, tmp_path / "wrong")
    with pytest.raises(InvalidManifestError, match=words):
        pool.publisher.push_base(**wrong.pushed)
    assert pool.ask() == (other, of_other)

    pool.publisher.push_base(models.load_hf(first.target))  # without its draft
    tokens, stale = pool.ask()
    assert tokens == when_fresh
    assert stale < acceptance / 2
    assert pool.stale(2, words="of base@1: fewer drafts are accepted")

    pool.publisher.push_base(**first.pushed)
    tokens, again = pool.ask()
    assert tokens == when_fresh
    assert abs(again - acceptance) <= WITHIN
    assert not pool.stale(3)
    if staging == "auto":
        _go_back_and_grow(pool, other, of_other)


def _go_back_and_grow(pool: Pool, tokens: list[list[int]], acceptance: float) -> None:
    """Both are brought back, and to a replica that comes later."""
    rollback("base", to=1, coordinator=pool.target)
    for replica_id, url in (("replica-0", pool.url), ("replica-1", pool.start())):
        found, share = pool.ask(url)
        assert found == tokens
        assert abs(share - acceptance) <= WITHIN
        assert not pool.stale(1, replica_id)


def _cut(model: Model, path: Path) -> tuple[Model, str]:
    """The model with a draft that lacks a tensor, and what is said of it."""
    directory = model.draft or model.target
    tensors = load_file(directory / "model.safetensors")
    lost = next(name for name in sorted(tensors) if "eh_proj" in name or "down_proj" in name)
    if model.draft is None:
        lost = f"model.layers.{models.LAYERS}.eh_proj.weight"
    del tensors[lost]
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((directory / "config.json").read_text())
    cut = Model(path, None) if model.draft is None else Model(model.target, path)
    return cut, f"{lost}' is missing"
