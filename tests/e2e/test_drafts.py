"""Models that draft tokens are a part of the base's version: real vLLM, over the whole path.

A replica is asked when it is fresh. Then another model and its draft are pushed, one without, and
then the first ones: tokens and acceptance must be as they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from tests import models
from tests.e2e.replicas import MODEL_NAME, running_coordinator, running_replicas, wait_ready
from trainer_side import Publisher
from weft_rl.cli.demo.openai_client import complete
from weft_rl.cli.orders import rollback
from weft_rl.cli.status import stale_draft
from weft_rl.contract.errors import InvalidManifestError

PROMPTS = ([5, 17, 99, 200, 33], [7, 8, 9, 10, 11, 12, 13, 14], [100], [61, 3], [250, 9])
_NUM_TOKENS = 80
#: By how much the share of accepted tokens may differ from a fresh engine's.
WITHIN = 0.02
CASES = [
    pytest.param(*case, marks=pytest.mark.matrix)
    for case in (
        ("mtp", "auto"), ("mtp", "in-place"), ("draft_model", "auto"), ("draft_model", "in-place"),
        ("eagle", "auto"),
    )
]  # fmt: skip


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
    """A replica that drafts, and a trainer."""

    target: str
    url: str
    publisher: Publisher

    def ask(self) -> tuple[list[list[int]], float]:
        """Greedy answers, and the share of the tokens drafted for them that was accepted."""
        before = self._counts()
        tokens = [complete(self.url, MODEL_NAME, p, _NUM_TOKENS).tokens for p in PROMPTS]
        drafted, accepted = (after - b for after, b in zip(self._counts(), before, strict=True))
        assert drafted >= 200
        return tokens, accepted / drafted

    def _counts(self) -> tuple[float, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        names = (f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
        return tuple(found[name] for name in names)  # type: ignore[return-value]

    def stale(self, version: int) -> str:
        """What `weft status` says of its draft, once it has said what came with a version."""
        while True:
            replica = wait_ready(self.target, "replica-0")
            if replica.version_vector.base == version:
                return stale_draft(replica)


@pytest.fixture
def pool(
    request: pytest.FixtureRequest, tmp_path: Path, first: Model, kind: str, staging: str
) -> Iterator[Pool]:
    how = {"method": kind, "num_speculative_tokens": 1 if kind == "mtp" else 3}
    if first.draft is not None:
        how["model"] = str(first.draft)
    args = ("--speculative-config", json.dumps(how))
    with ExitStack() as stack:
        coordinator = stack.enter_context(running_coordinator(tmp_path))
        options = ("--staging", staging, *(("--base-copies", "3") if staging == "auto" else ()))
        (url,) = stack.enter_context(
            running_replicas(tmp_path, coordinator.target, [first.target], *args, options=options)
        )
        publisher = stack.enter_context(
            Publisher(coordinator.target, trainer_id="trainer-a", timeout_seconds=120)
        )
        yield Pool(coordinator.target, url, publisher)


@pytest.fixture
def first(tmp_path: Path, kind: str) -> Model:
    return Model(*models.make_drafted(kind, tmp_path / "first", seed=1))


@pytest.fixture
def second(tmp_path: Path, kind: str) -> Model:
    return Model(*models.make_drafted(kind, tmp_path / "second", seed=2))


@pytest.mark.parametrize(("kind", "staging"), CASES)
def test_a_draft_is_of_its_bases_version(
    pool: Pool, first: Model, second: Model, staging: str, tmp_path: Path
) -> None:
    replica = wait_ready(pool.target, "replica-0")
    assert replica.capabilities.draft_fingerprint
    when_fresh, acceptance = pool.ask()
    print("fresh", acceptance)
    assert acceptance > 0.3

    assert str(pool.publisher.push_base(**second.pushed).version) == "base@1"
    other, of_other = pool.ask()
    print("other", of_other)
    assert other != when_fresh
    assert of_other > 0.3
    assert not pool.stale(1)

    wrong = _cut(second, tmp_path / "wrong")
    with pytest.raises(InvalidManifestError, match=wrong[1]):
        pool.publisher.push_base(**wrong[0].pushed)
    assert pool.ask() == (other, of_other)

    pool.publisher.push_base(models.load_hf(first.target))  # without its draft
    tokens, stale = pool.ask()
    print("stale", stale)
    assert tokens == when_fresh
    assert stale < acceptance / 2
    assert "of base@1: fewer drafts are accepted" in pool.stale(2)

    pool.publisher.push_base(**first.pushed)
    tokens, again = pool.ask()
    assert tokens == when_fresh
    assert abs(again - acceptance) <= WITHIN
    assert not pool.stale(3)

    if staging == "auto":
        rollback("base", to=1, coordinator=pool.target)
        tokens, again = pool.ask()
        assert tokens == other
        assert abs(again - of_other) <= WITHIN
        assert not pool.stale(1)


def _cut(model: Model, path: Path) -> tuple[Model, str]:
    """The model with a draft that lacks a tensor, and what is said of it."""
    file = "model.safetensors"
    path.mkdir()
    if model.draft is None:
        tensors = load_file(model.target / file)
        lost = f"model.layers.{models.LAYERS}.eh_proj.weight"
        (path / "config.json").write_text((model.target / "config.json").read_text())
    else:
        tensors = load_file(model.draft / file)
        lost = next(name for name in sorted(tensors) if "down_proj" in name)
    del tensors[lost]
    save_file(tensors, path / file)
    cut = Model(path, None) if model.draft is None else Model(model.target, path)
    return cut, f"{lost}' is missing"
