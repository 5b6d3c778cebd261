"""Drafts on one GPU: pushed with their base they are as in a fresh engine, loaded by copies, too.

What is refused, said and brought back is in ``tests/e2e/test_drafts.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.gpu_pool import GpuPool
from tests.e2e.test_drafts import draft_counts
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import DRY, NUM_GPUS, PROMPTS, VLLM, Pushed
from tests.models import load_hf, make_drafted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(400),
]


def answers(url: str) -> tuple[list[Any], float]:
    """Greedy tokens with log-probabilities, and the share of drafted tokens that was accepted."""
    before, found = draft_counts(url), []
    for prompt in PROMPTS:
        body = {"model": "base-model", "prompt": prompt, "max_tokens": 128, "temperature": 0.0,
                "logprobs": 1, "ignore_eos": True}  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]
        found.append((logprobs["tokens"], logprobs["token_logprobs"]))
    drafted, accepted = (now - then for now, then in zip(draft_counts(url), before, strict=True))
    return found, accepted / drafted


@pytest.mark.parametrize("staging", ["auto", "in-place"])
@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3", "draft_model"])
def test_a_draft_is_loaded_with_its_base(
    kind: str, staging: str, tmp_path: Path, note: Note
) -> None:
    first, second = (make_drafted(kind, tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    how = {"method": kind, "num_speculative_tokens": 1 if kind in ("mtp", "eagle3") else 3}
    if first[1] is not None:
        how["model"] = str(first[1])
    pool = GpuPool(tmp_path)
    try:
        pool.start()
        args = (*VLLM, "--speculative-config", json.dumps(how))
        options = ("--staging", staging, "--log-level", "debug")
        pool.launch("pushed", "0", first[0], *args, options=options)
        pushed = Pushed(pool, pool.url("pushed"))
        pool.wait_ready(1, 60)
        fresh, acceptance = answers(pushed.url)
        with pushed.publisher() as publisher:
            for _ in range(2):  # by vLLM's reload, and by copies
                for model, draft in (second, first):
                    what = model if draft is None else load_hf(model)
                    publisher.push_base(what, draft=draft)
                again, share = answers(pushed.url)
                assert again == fresh
                assert abs(share - acceptance) <= 0.02
            publisher.push_base(load_hf(second[0]))
            _, stale = answers(pushed.url)
        assert stale < acceptance / 2
        note(kind, f"target and draft, {staging}", f"bitwise, {share:.2f} accepted (a fresh "
             f"engine's {acceptance:.2f}, stale {stale:.2f}); {pushed.how()}")  # fmt: skip
    finally:
        pool.stop()
