"""Base updates in a real vLLM: against transformers and against a fresh engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_side.engine import AliasRefusals, BaseSpan, FinishReason, GenerateOrder, SwitchTimes
from tests.e2e.conftest import Served, TinyModels
from tests.e2e.engine_process import Completion, EngineProcess
from tests.e2e.generations import joined
from tests.e2e.logprobs import MAX_ERROR, PROMPT, check
from tests.models import Referee, make_kv_scaled, make_model
from tests.waits import until
from weft_rl.contract.errors import (
    InvalidManifestError,
    InvalidRequestError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    VersionChangedError,
)
from weft_rl.contract.names import STARTED_WITH, PolicyVersion
from weft_rl.contract.sampling import Sampling

_LONG = [3 + (7 * i) % 250 for i in range(300)]
_ASKED = [("tiny", PROMPT), ("tiny", _LONG), ("kept@1", PROMPT), ("kept@2", _LONG)]


def ask(engine: EngineProcess) -> list[Completion]:
    """One request after the other: batches of other sizes may round otherwise."""
    return [engine.complete(model, prompt, 12) for model, prompt in _ASKED]


def test_equal_to_a_fresh_engine_bit_by_bit(
    engine_tp1: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine = engine_tp1
    assert engine.call("engine.get_weight_version") == "base@0"  # nothing was pushed yet
    for i in (1, 2):
        engine.push_adapter(f"kept@{i}", qwen2.adapters[i])
    fresh = ask(engine)  # and all prompts lie in the prefix cache now
    times = engine.push_base("base@1", qwen2.other)
    assert 0 < times.load_seconds <= times.pause_seconds < 2
    assert engine.call("engine.get_weight_version") == "base@1"
    other = ask(engine)
    engine.scribble()  # what was staged is not referenced any more
    assert ask(engine) == other
    check(referee, other[0], qwen2.other)
    check(referee, other[2], qwen2.other, qwen2.adapters[1])
    engine.push_base("base@2", qwen2.base)
    assert ask(engine) == fresh


def test_running_requests_go_on(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(engine.complete, "tiny", PROMPT, 400) for _ in range(2)]
        until(lambda: engine.call("tracker.num_running") == 2)
        times = engine.push_base("base@3", models.other)
        assert not any(request.done() for request in running)
        answers = [request.result() for request in running]
    assert all(len(answer.tokens) == 400 for answer in answers)
    assert times.pause_seconds < 2
    check(referee, engine.complete("tiny", PROMPT), models.other)
    engine.push_base("base@4", models.base)
    check(referee, engine.complete("tiny", PROMPT), models.base)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_token_is_of_the_base_that_its_span_names(
    served: Served, referee: Referee, temperature: float
) -> None:
    """On both sides of a switch, token by token, as transformers scores it."""
    engine, models = served.engine, served.models
    engine.push_adapter("span@1", models.adapters[0])
    engine.push_base("base@20", models.base)
    bases, num_samples = {20: models.base, 21: models.other}, 1 if temperature == 0.0 else 3
    sampling = Sampling(temperature=temperature, max_tokens=300, ignore_eos=True, seed=3)
    begun = []
    for adapter, chunk_tokens in ((None, 0), (PolicyVersion("span", 1), 64)):
        order = GenerateOrder(
            prompt=PROMPT,
            adapter=adapter,
            num_samples=num_samples,
            sampling=sampling,
            chunk_tokens=chunk_tokens,
        )
        begun.append((adapter, *engine.call("generations.begin", order)))
    engine.push_base("base@21", models.other)
    for adapter, number, first in begun:
        chunks, error = engine.call("generations.read", number)
        assert error is None
        assert len(chunks) > 100 if adapter is None else len(chunks) <= num_samples * (1 + 300 / 64)
        for sample in joined([*first, *chunks], num_samples):
            assert sample.finish_reason is FinishReason.LENGTH
            before, after = sample.base_spans
            assert (before.version, before.start, after.version) == (20, 0, 21)
            assert 0 < before.end == after.start < after.end == len(sample.tokens) == 300
            for span in (before, after):
                path = models.adapters[0] if adapter else None
                want = referee.logprobs(
                    bases[span.version], PROMPT, sample.tokens, path, temperature or 1.0
                )
                got = sample.logprobs[span.start : span.end]
                errors = [abs(a - b) for a, b in zip(want[span.start : span.end], got, strict=True)]
                assert max(errors) <= MAX_ERROR, (adapter, span, errors)
    engine.push_base("base@22", models.base)


def test_a_strict_answer_ends_at_the_switch(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    engine.push_base("base@23", models.base)
    sampling = Sampling(max_tokens=400, ignore_eos=True)
    order = GenerateOrder(
        prompt=PROMPT, adapter=None, num_samples=2, sampling=sampling, strict=True
    )
    number, first = engine.call("generations.begin", order)
    engine.push_base("base@24", models.other)
    chunks, error = engine.call("generations.read", number)
    assert isinstance(error, VersionChangedError)
    for sample in joined([*first, *chunks], 2):
        assert sample.finish_reason is FinishReason.ABORT
        assert list(sample.base_spans) == [BaseSpan(23, 0, len(sample.tokens))]
        want = referee.logprobs(models.base, PROMPT, sample.tokens)
        assert max(abs(a - b) for a, b in zip(want, sample.logprobs, strict=True)) <= MAX_ERROR
    engine.push_base("base@25", models.base)


def test_an_answer_that_is_ended_runs_no_further(served: Served) -> None:
    engine = served.engine

    def running() -> float:
        text = engine.http.get("/metrics").text
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.partition("{")[0] in names
        )

    sampling = Sampling(max_tokens=480, ignore_eos=True)
    order = GenerateOrder(prompt=PROMPT, adapter=None, num_samples=4, sampling=sampling)
    number, _ = engine.call("generations.begin", order)
    assert engine.call("num_requests") == 1
    engine.call("generations.end", number)
    assert engine.call("num_requests") == 0
    assert not engine.call("engine.output_processor.has_unfinished_requests")
    assert engine.complete("tiny", PROMPT, 2).tokens  # after which its gauges are of now
    until(lambda: not running(), 5)
    chunks, error = engine.call("generations.read", number)
    assert error is None
    assert all(len(sample.tokens) < 480 for sample in joined(chunks, 4))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"prompt": [1] * 600}, "512"),
        ({"prompt": [10**6]}, "vocab"),
    ],
)
def test_what_vllm_refuses_is_said_in_its_words(
    engine_tp1: EngineProcess, more: dict[str, Any], says: str
) -> None:
    order = GenerateOrder(**{"prompt": PROMPT, "adapter": None, **more})
    with pytest.raises(InvalidRequestError, match=says):
        engine_tp1.call("generations.begin", order)
    assert engine_tp1.call("num_requests") == 0


def test_the_base_by_its_versions_over_http(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    engine.push_base("base@26", models.base)
    engine.push_adapter("named@1", models.adapters[0])

    def ask(model: str) -> httpx.Response:
        json = {"model": model, "prompt": PROMPT, "max_tokens": 4}
        return engine.http.post("/v1/completions", json=json)

    for model in ("base", "base@26"):
        assert ask(model).headers["weft-base"] == "base@26"
        assert "weft-adapter" not in ask(model).headers
        check(referee, engine.complete(model, PROMPT), models.base)
    for model in ("named", "named@1"):
        headers = ask(model).headers
        assert (headers["weft-base"], headers["weft-adapter"]) == ("base@26", "named@1")
    chat = {"model": "named", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    assert engine.http.post("/v1/completions", json=chat).headers["weft-adapter"] == "named@1"
    refused = ask("base@25")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].endswith("of base there are base@26")
    assert "weft-base" not in refused.headers
    engine.call("refuse_aliases", AliasRefusals(every="the pool serves base@30"))
    for model, status in (("base", 503), ("tiny", 503), ("named", 503), ("base@26", 200)):
        answer = ask(model)
        assert (model, answer.status_code) == (model, status)
        assert answer.headers.get("weft-reason") == ("REFUSING" if status == 503 else None)
    for stream in (False, True):  # without a model the base is asked
        unnamed = {"prompt": PROMPT, "max_tokens": 4, "stream": stream}
        answer = engine.http.post("/v1/completions", json=unnamed)
        assert answer.status_code == 503
        assert "the pool serves base@30" in answer.json()["error"]["message"]
    engine.call("refuse_aliases", AliasRefusals())
    assert ask("base").status_code == 200


def test_a_stream_over_a_switch_names_the_bases_behind_its_tokens(
    served: Served, referee: Referee
) -> None:
    """Whenever the switch comes: before the engine has the request, before its first token, or
    later; and an exact base has no token of another one but behind a sign."""
    engine, models = served.engine, served.models
    weights = {27: models.base, 28: models.other}
    engine.push_base("base@27", models.base)
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True, "logprobs": 0}
    body |= {"return_tokens_as_token_ids": True, "ignore_eos": True}
    seen: set[str] = set()

    def ask(model: str) -> None:
        with engine.http.stream("POST", "/v1/completions", json={**body, "model": model}) as got:
            lines = [line.removeprefix("data: ") for line in got.iter_lines() if line]
        if got.status_code != 200:
            assert (model, got.status_code) == ("base@27", 404)
            assert got.headers["weft-reason"] == "VERSION_UNKNOWN"
            seen.add("refused")
            return
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        tokens, logprobs = list[int](), list[float]()
        for chunk in chunks:
            found = chunk["choices"][0]["logprobs"]
            tokens += [int(token.removeprefix("token_id:")) for token in found["tokens"]]
            logprobs += found["token_logprobs"]
        first, last = got.headers["weft-base"], chunks[-1].get("weft-last-base")
        assert chunks[-1]["weft-base"] == first
        assert model in ("base", first)
        want = referee.logprobs(weights[int(first[5:])], PROMPT, tokens)
        errors = [abs(a - b) for a, b in zip(want, logprobs, strict=True)]
        assert errors[0] <= MAX_ERROR, (model, first, last, errors[0])
        if last is None:
            assert max(errors) <= MAX_ERROR, (model, first, max(errors))
        seen.add("changed" if last else "unchanged")

    with ThreadPoolExecutor(8) as pool:
        for switch in range(4):
            running = []
            for at in range(12):
                model = "base" if at % 3 else "base@27"
                running.append(pool.submit(ask, model))
                if at == 5:
                    other = 28 - switch % 2
                    pushed = pool.submit(engine.push_base, f"base@{other}", weights[other])
            pushed.result(60)
            for each in running:
                each.result(60)
    assert seen >= {"changed", "unchanged"}
    engine.push_base("base@29", models.base)


def test_what_is_not_whole_or_not_staged_changes_nothing(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    file = models.other / "model.safetensors"
    digest = engine.stage("t-part", "base@5", file, drop=("model.norm.weight",))
    with pytest.raises(InvalidManifestError, match=r"'model.norm.weight' is missing"):
        engine.call("apply_base", "t-part", PolicyVersion("base", 5), digest)
    engine.call("discard", "t-part")
    with pytest.raises(NotReadyError):
        engine.call("apply_base", "t-part", PolicyVersion("base", 5), digest)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), models.base)


def test_a_load_that_fails_midway_is_repaired_by_the_next(served: Served, referee: Referee) -> None:
    engine, models = served.engine, served.models
    engine.push_adapter("dirty@1", models.adapters[0])
    engine.break_next_load(9)
    with pytest.raises(LoadFailedError, match="the disk of the test is broken") as failed:
        engine.push_base("base@6", models.other)
    assert failed.value.metadata["dirty"] == "true"
    assert "broken" in engine.call("dirty_reason")
    with pytest.raises(httpx.HTTPStatusError) as refused:
        engine.complete("tiny", PROMPT)
    assert refused.value.response.status_code == 503
    assert "mixed" in refused.value.response.json()["error"]["message"]
    assert engine.http.get("/health").status_code == 200
    engine.push_base("base@6", models.other)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), models.other)
    check(referee, engine.complete("dirty", PROMPT), models.other, models.adapters[0])
    engine.push_base("base@7", models.base)
    check(referee, engine.complete("dirty", PROMPT), models.base, models.adapters[0])


def test_going_back_to_a_retained_copy(served: Served, referee: Referee) -> None:
    """With two workers the second maps the first one's copy again."""
    engine, models = served.engine, served.models
    engine.push_adapter("back@1", models.adapters[0])
    engine.push_base("base@8", models.other)
    engine.push_base("base@9", models.base)
    assert engine.call("memory").retained_bases == (9, 8)
    times: SwitchTimes = engine.call("apply_retained", PolicyVersion("base", 8))
    assert 0 < times.pause_seconds < 2
    assert engine.call("memory").retained_bases == (8, 9)
    check(referee, engine.complete("tiny", PROMPT), models.other)
    check(referee, engine.complete("back", PROMPT), models.other, models.adapters[0])
    with pytest.raises(NotFoundError):
        engine.call("apply_retained", PolicyVersion("base", 7))
    engine.call("apply_retained", PolicyVersion("base", 9))
    check(referee, engine.complete("tiny", PROMPT), models.base)


def test_going_back_to_what_it_was_started_with(served: Served, referee: Referee) -> None:
    """As an engine does whose weights were discarded as it slept: from its files."""
    engine, models = served.engine, served.models
    engine.push_adapter("files@1", models.adapters[0])
    engine.push_base("base@10", models.other)
    times: SwitchTimes = engine.call("apply_retained", STARTED_WITH)
    assert 0 < times.pause_seconds < 5
    assert engine.call("engine.get_weight_version") == "base@0"
    check(referee, engine.complete("tiny", PROMPT), models.base)
    check(referee, engine.complete("files", PROMPT), models.base, models.adapters[0])
    engine.push_base("base@11", models.base)


@pytest.fixture(scope="module")
def engine_moe(qwen3_moe: TinyModels) -> Iterator[EngineProcess]:
    """An engine without LoRA that serves ``qwen3_moe.base``."""
    engine = EngineProcess(qwen3_moe.base).start()
    yield engine
    engine.stop()


@pytest.mark.matrix
def test_experts(engine_moe: EngineProcess, qwen3_moe: TinyModels, referee: Referee) -> None:
    """vLLM's own reload of a mixture of experts is wrong on CPU (``cpu_fixes``)."""
    engine = engine_moe
    check(referee, engine.complete("tiny", PROMPT), qwen3_moe.base)
    engine.push_base("base@1", qwen3_moe.other)
    check(referee, engine.complete("tiny", PROMPT), qwen3_moe.other)
    digest = engine.stage("t-lora", "no@1", qwen3_moe.base / "model.safetensors")
    with pytest.raises(NotReadyError, match="enable-lora"):
        engine.call("load_adapter", "t-lora", PolicyVersion("no", 1), "{}", digest)


@pytest.mark.matrix
def test_scales_of_the_kv_cache_come_with_a_base(tmp_path: Path) -> None:
    """They are all that these two differ in."""
    base, other = (
        make_kv_scaled(tmp_path / name, scale) for name, scale in (("a", 0.05), ("b", 2.0))
    )
    asked = []
    for model in (other, base):
        engine = EngineProcess(model, ("--kv-cache-dtype", "fp8")).start()
        try:
            assert engine.facts["capabilities"].base_refusal == ""
            asked.append(engine.complete("tiny", PROMPT))
            if model is base:
                engine.push_base("base@1", other)
                assert engine.complete("tiny", PROMPT) == asked[0] != asked[1]
                engine.push_base("base@2", base)
                assert engine.complete("tiny", PROMPT) == asked[1]
                with pytest.raises(InvalidManifestError, match="no scales of the KV cache"):
                    engine.push_base("base@3", make_model("qwen3", tmp_path / "c"))
                assert engine.complete("tiny", PROMPT) == asked[1]
        finally:
            engine.stop()


@pytest.mark.matrix  # it needs an engine of its own
def test_a_dead_worker_ends_the_server(engine_moe: EngineProcess) -> None:
    """So the process ends, and whoever started it starts another one."""
    served = engine_moe.submit("serve_http")
    os.kill(engine_moe.facts["worker_pids"][0], signal.SIGKILL)
    with pytest.raises(PeerUnavailableError, match="has died"):
        served.result(timeout=20)
    assert engine_moe.call("is_alive") is False
    with pytest.raises(LoadFailedError, match="the engine"):
        engine_moe.call("discard", "t-1")
