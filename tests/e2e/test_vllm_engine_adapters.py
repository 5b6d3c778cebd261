"""Adapters in a real vLLM, over its OpenAI API, against transformers and PEFT."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rollout_side.vllm_engine.replica import GRACE_SECONDS
from tests.e2e.conftest import Served, TinyModels
from tests.e2e.engine_process import Completion, EngineProcess
from tests.e2e.logprobs import PROMPT, check
from tests.models import Referee, adapter_config, make_adapter, rename_modules
from tests.waits import until
from weft_rl.contract.errors import (
    DigestMismatchError,
    InvalidNameError,
    LoadFailedError,
    NotReadyError,
)
from weft_rl.contract.names import PolicyVersion


def names(engine: EngineProcess) -> dict[str, str]:
    """What /v1/models lists: name to root; fails on a double."""
    cards = engine.http.get("/v1/models").json()["data"]
    assert len({card["id"] for card in cards}) == len(cards)
    return {card["id"]: card["root"] for card in cards}


def test_the_trial_at_the_start_left_no_count_and_no_adapter(served: Served) -> None:
    assert served.engine.facts["counted"] == []
    assert not served.engine.facts["loras"]


def test_versions_and_base_in_one_batch(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    for i in (1, 2):
        assert engine.push_adapter(f"batch@{i}", models.adapters[i]).pause_seconds == 0
    wanted = [("tiny", None), ("batch@1", 1), ("batch@2", 2), ("batch", 2)] * 2
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(lambda w: engine.complete(w[0], PROMPT, 24), wanted))
    for (_, adapter), answer in zip(wanted, answers, strict=True):
        assert answer.model == ("tiny" if adapter is None else f"batch@{adapter}")
        check(referee, answer, models.base, None if adapter is None else models.adapters[adapter])


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:4]], ids=["other rows", "as many rows"])
def test_a_prompt_is_echoed_by_its_own_adapter_while_others_run(
    served: Served, referee: Referee, prompt: list[int]
) -> None:
    """vLLM looks at a prompt's tokens by the adapters of the batch, in their order."""
    engine, models = served.engine, served.models
    for i in (1, 2):
        engine.push_adapter(f"echo{i}@1", models.adapters[i])
    asked = {
        "model": "echo1@1", "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True,
        "logprobs": 1, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(engine.complete, m, PROMPT, 300) for m in ("tiny", "echo2@1")]
        answers = []
        while not all(other.done() for other in others):
            response = engine.http.post("/v1/completions", json=asked)
            assert response.status_code == 200, response.text
            answers.append(response.json()["choices"][0]["logprobs"])
        for other, adapter in zip(others, (None, models.adapters[2]), strict=True):
            check(referee, other.result(), models.base, adapter)
    for answer in (answers[0], answers[-1]):
        tokens = [int(token.removeprefix("token_id:")) for token in answer["tokens"]]
        assert tokens[: len(prompt)] == prompt
        want = referee.logprobs(models.base, tokens[:1], tokens[1:], models.adapters[1])
        assert answer["token_logprobs"][1:] == pytest.approx(want, abs=5e-5)


def test_evicted_versions_come_back(served: Served, referee: Referee) -> None:
    """Four versions, vLLM holds two: each use of another one reloads it from memory."""
    engine, models = served.engine, served.models
    for i, adapter in enumerate(models.adapters):
        engine.push_adapter(f"evict@{i + 1}", adapter)
    for _ in range(2):
        for i, adapter in enumerate(models.adapters):
            check(referee, engine.complete(f"evict@{i + 1}", PROMPT), models.base, adapter)
    check(referee, engine.complete("tiny", PROMPT), models.base)


def test_listing_and_unknown_names(served: Served) -> None:
    engine, models = served.engine, served.models
    engine.push_adapter("list@1", models.adapters[0])
    engine.push_adapter("list@2", models.adapters[1])
    listed = names(engine)
    assert listed["tiny"] == str(models.base)
    assert listed["list@1"] == "weft://list@1"
    assert listed["list@2"] == "weft://list@2"
    assert listed["list"] == "list@2"
    with pytest.raises(httpx.HTTPStatusError) as unknown:
        engine.complete("list@3", PROMPT)
    assert unknown.value.response.status_code == 404
    message = unknown.value.response.json()["error"]["message"]
    assert "`list@3` does not exist" in message
    assert message.endswith("of list there are list@1, list@2")
    with pytest.raises(httpx.HTTPStatusError) as typo:
        engine.complete("lists", PROMPT)
    assert typo.value.response.status_code == 404
    message = typo.value.response.json()["error"]["message"]
    assert "`lists` does not exist: ask for " in message
    assert "tiny" in message
    assert engine.http.post("/scale_elastic_ep", json={}).status_code == 404


def test_settings_that_change_the_scaling(served: Served, referee: Referee, tmp_path: Path) -> None:
    base = served.models.base
    adapters = [
        make_adapter(base, tmp_path / "rslora", seed=21, use_rslora=True),
        make_adapter(
            base,
            tmp_path / "patterns",
            seed=22,
            target_modules=r".*\.(self_attn|mlp)\.[a-z]+_proj",
            rank_pattern={"q_proj": 4, r"1\.mlp\.up.*": 16},
            alpha_pattern={"k_proj": 3, r".*0.self_attn.o_proj": 40},
        ),
        make_adapter(base, tmp_path / "few", seed=23, targets=["v_proj"], layers_to_transform=[1]),
    ]
    for i, adapter in enumerate(adapters):
        served.engine.push_adapter(f"scale@{i + 1}", adapter)
    for i, adapter in enumerate(adapters):
        check(referee, served.engine.complete(f"scale@{i + 1}", PROMPT), base, adapter)


def test_alias_flips_under_running_requests(served: Served, referee: Referee) -> None:
    """Each response names the version that made it, and is that version's throughout."""
    engine, models = served.engine, served.models
    engine.push_adapter("flip@1", models.adapters[0])
    answers: list[Completion] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(engine.complete("flip", PROMPT, 16))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for version in range(1, 6):
            if version > 1:
                engine.push_adapter(f"flip@{version}", models.adapters[(version - 1) % 4])
            name = f"flip@{version}"
            until(lambda name=name: any(answer.model == name for answer in list(answers)), 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert {answer.model for answer in answers} == {f"flip@{v}" for v in range(1, 6)}
    for answer in answers:
        version = int(answer.model.removeprefix("flip@"))
        check(referee, answer, models.base, models.adapters[(version - 1) % 4])


def test_a_cached_prompt_is_not_answered_from_an_older_version(
    served: Served, referee: Referee
) -> None:
    engine, models = served.engine, served.models
    prompt = [3 + i % 250 for i in range(300)]
    for version, adapter in enumerate(models.adapters[:2], start=1):
        engine.push_adapter(f"cached@{version}", adapter)
        for _ in range(2):  # the second is answered from the cache of the first
            answer = engine.complete("cached", prompt)
            assert answer.model == f"cached@{version}"
            check(referee, answer, models.base, adapter, prompt)


def test_retiring_waits_for_requests(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    engine.push_adapter("old@1", models.adapters[0])
    before = engine.call("memory").adapter_bytes
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.complete, "old@1", PROMPT, 400)
        until(lambda: engine.call("tracker.num_running"))
        engine.push_adapter("old@2", models.adapters[1])
        assert engine.retire("old@1") is False
        assert not running.done(), "the request ended too soon for this test to say anything"
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            engine.complete("old@1", PROMPT)
        check(referee, engine.complete("old", PROMPT), models.base, models.adapters[1])
        check(referee, running.result(), models.base, models.adapters[0])
    assert engine.retire("old@1") is False  # unused from now on; dropped after a grace
    time.sleep(GRACE_SECONDS)
    assert engine.retire("old@1") is True
    assert engine.retire("old@1") is True
    assert engine.call("memory").adapter_bytes == before
    assert "old@1" not in names(engine)
    with pytest.raises(NotReadyError, match="stands for"):
        engine.retire("old@2")


def test_names_and_retries(engine_tp1: EngineProcess, qwen2: TinyModels) -> None:
    engine, adapter = engine_tp1, qwen2.adapters[0]
    with pytest.raises(InvalidNameError, match="name of the base model"):
        engine.push_adapter("tiny@1", adapter)
    engine.push_adapter("again@1", adapter)
    version, config = PolicyVersion("again", 1), adapter_config(adapter)
    digest = engine.stage("t-again", "again@1", adapter / "adapter_model.safetensors")
    engine.call("load_adapter", "t-again", version, config, digest)
    with pytest.raises(DigestMismatchError, match="never changed"):
        engine.call("load_adapter", "t-again", version, config, b"other")
    engine.call("discard", "t-again")
    with pytest.raises(NotReadyError, match="nothing is staged"):
        engine.call("load_adapter", "t-none", PolicyVersion("again", 2), config, digest)
    digest = engine.stage("t-2", "again@2", adapter / "adapter_model.safetensors")
    with pytest.raises(DigestMismatchError):
        engine.call("load_adapter", "t-2", PolicyVersion("again", 2), config, b"other")
    engine.call("load_adapter", "t-2", PolicyVersion("again", 2), config, digest)


def test_an_adapter_that_the_engine_refuses_changes_nothing(
    served: Served, referee: Referee, tmp_path: Path
) -> None:
    engine, models = served.engine, served.models
    engine.push_adapter("refused@1", models.adapters[0])
    before = engine.call("memory").adapter_bytes
    too_large = make_adapter(models.base, tmp_path / "large", seed=5, rank=32)
    with pytest.raises(LoadFailedError, match="rank 32 is greater"):
        engine.push_adapter("refused@2", too_large)
    stranger = rename_modules(models.adapters[1], tmp_path / "stranger", "q_proj", "z_proj")
    with pytest.raises(LoadFailedError, match="applies no LoRA to"):
        engine.push_adapter("refused@3", stranger)
    assert engine.call("memory").adapter_bytes == before
    assert names(engine)["refused"] == "refused@1"
    check(referee, engine.complete("refused", PROMPT), models.base, models.adapters[0])
