"""A real vLLM of two ranks that was started to load bases in place."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_side.engine import BaseSpan, FinishReason, GenerateOrder, SampleChunk, SwitchTimes
from tests.e2e.arriving_file import arriving_digest
from tests.e2e.conftest import TinyModels
from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.e2e.generations import Generated, joined
from tests.e2e.logprobs import MAX_ERROR, PROMPT, check
from tests.models import Referee
from tests.waits import until
from weft_rl.contract.errors import NotReadyError, VersionChangedError
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.sampling import Sampling

WAIT_SECONDS = 30.0
#: Of the KV cache, of 128 tokens each: three requests of 400 tokens fit, and not four.
NUM_BLOCKS = 14
LONG = [3 + (7 * i) % 250 for i in range(300)]


@pytest.fixture(scope="module")
def engine(qwen2: TinyModels) -> Iterator[EngineProcess]:
    """It serves ``qwen2.base``; leave it so."""
    ranks = ("--tensor-parallel-size", "2")
    args = (*LORA_ARGS, *ranks, "--num-gpu-blocks-override", str(NUM_BLOCKS))
    running = EngineProcess(qwen2.base, args, staging="in-place", running_requests="keep").start()
    running.call("generations.choose", "recompute")
    yield running
    running.stop()


def commit(engine: EngineProcess, version: str, model: Path) -> SwitchTimes:
    """What the coordinator does once the receiver has everything."""
    digest = arriving_digest(model / "model.safetensors")
    until_loaded(engine)
    times: SwitchTimes = engine.call(
        "apply_base", f"t-{version}", PolicyVersion.parse(version), digest
    )
    return times


def push(engine: EngineProcess, version: str, model: Path) -> SwitchTimes:
    engine.arrive(version, model)
    return commit(engine, version, model)


def _arriving(engine: EngineProcess) -> list[Any]:
    return [rank["value"] for rank in engine.rpc("weft_test_arriving")]


def until_loaded(engine: EngineProcess, *, begun: bool = False) -> None:
    """Wait until what arrives was loaded, or its first bucket."""
    what = "begun" if begun else "complete"
    until(lambda: all(rank[what] for rank in _arriving(engine)), WAIT_SECONDS)


def test_bases_are_loaded_as_they_arrive(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    assert engine.facts["capabilities"].loads_in_place
    engine.push_adapter("kept@1", qwen2.adapters[0])
    before = [engine.complete(name, PROMPT, 12) for name in ("tiny", "kept")]
    for number in (1, 3):
        times = push(engine, f"base@{number}", qwen2.other)
        assert 0 < times.load_seconds <= times.pause_seconds
        assert engine.call("engine.get_weight_version") == f"base@{number}"
        check(referee, engine.complete("tiny", PROMPT, 12), qwen2.other)
        check(referee, engine.complete("kept", PROMPT, 12), qwen2.other, qwen2.adapters[0])
        push(engine, f"base@{number + 1}", qwen2.base)
        assert [engine.complete(name, PROMPT, 12) for name in ("tiny", "kept")] == before
    held = engine.call("memory")
    assert (held.staging_bytes, held.retained_bases) == (0, ())


def test_running_requests_wait_and_go_on(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(engine.complete, "tiny", PROMPT, 400) for _ in range(2)]
        until(lambda: engine.call("tracker.num_running") == 2)
        engine.arrive("base@11", qwen2.other)
        late = pool.submit(engine.complete, "tiny", PROMPT, 8)
        assert engine.call("loading") == "t-base@11"
        commit(engine, "base@11", qwen2.other)
        answers = [request.result(60) for request in running]
        assert all(len(answer.tokens) == 400 for answer in answers)
        check(referee, late.result(60), qwen2.other)
    push(engine, "base@12", qwen2.base)
    check(referee, engine.complete("tiny", PROMPT), qwen2.base)


def test_nothing_changes_if_it_ends_before_it_began(
    engine: EngineProcess, qwen2: TinyModels
) -> None:
    before = engine.complete("tiny", PROMPT)
    with pytest.raises(NotReadyError):
        engine.call("load_in_place", "t-unknown", PolicyVersion("base", 20), 1.0)
    assert engine.complete("tiny", PROMPT) == before
    engine.arrive("base@21", qwen2.other, num_buckets=0)
    engine.call("discard", "t-base@21")
    assert engine.complete("tiny", PROMPT) == before
    engine.arrive("base@22", qwen2.other, num_buckets=0, seconds=0.01)  # the order's own end
    assert engine.complete("tiny", PROMPT) == before
    assert engine.call("dirty_reason") == engine.call("loading") == ""


def test_one_that_ends_midway_is_repaired_by_the_next(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine.push_adapter("mid@1", qwen2.adapters[1])
    engine.arrive("base@31", qwen2.other, num_buckets=3)
    until_loaded(engine, begun=True)
    with pytest.raises(NotReadyError, match="in place"):
        engine.push_adapter("mid@2", qwen2.adapters[2])
    assert engine.call("memory").staged_transfer_ids == ("t-base@31", "t-mid@2")
    engine.call("discard", "t-base@31")
    assert "base@31" in engine.call("dirty_reason")
    with pytest.raises(httpx.HTTPStatusError) as refused:
        engine.complete("tiny", PROMPT)
    assert refused.value.response.status_code == 503
    push(engine, "base@32", qwen2.other)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), qwen2.other)
    check(referee, engine.complete("mid", PROMPT), qwen2.other, qwen2.adapters[1])
    push(engine, "base@33", qwen2.base)
    check(referee, engine.complete("mid", PROMPT), qwen2.base, qwen2.adapters[1])
    engine.call("discard", "t-mid@2")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_midway_takes_the_other_with_it(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee, rank: int
) -> None:
    before = engine.complete("tiny", PROMPT)
    engine.rpc("weft_test_break", rank, 5)
    version = f"base@{34 + 2 * rank}"
    engine.arrive(version, qwen2.other)
    until(lambda: all("error" in rank for rank in _arriving(engine)), WAIT_SECONDS)
    for found in _arriving(engine):
        assert "the disk of the test is broken" in found["error"]
        assert not found["complete"]
    engine.call("discard", f"t-{version}")
    assert version in engine.call("dirty_reason")
    with pytest.raises(httpx.HTTPStatusError):
        engine.complete("tiny", PROMPT)
    push(engine, f"base@{35 + 2 * rank}", qwen2.base)
    assert engine.call("dirty_reason") == ""
    assert engine.complete("tiny", PROMPT) == before


def test_a_commit_may_come_late(engine: EngineProcess, qwen2: TinyModels, referee: Referee) -> None:
    """As from a coordinator that starts anew."""
    engine.arrive("base@41", qwen2.other, seconds=1.0)
    until_loaded(engine)
    until(lambda: engine.call("dirty_reason"), WAIT_SECONDS)
    assert engine.call("memory").staged_transfer_ids == ("t-base@41",)
    commit(engine, "base@41", qwen2.other)
    assert engine.call("dirty_reason") == ""
    check(referee, engine.complete("tiny", PROMPT), qwen2.other)
    push(engine, "base@42", qwen2.base)


@dataclass
class _Running:
    """A request to GenerateService that runs."""

    number: int
    first: Sequence[SampleChunk]
    adapter: Path | None = None

    def whole(self, engine: EngineProcess, num_samples: int = 1) -> list[Generated]:
        chunks, error = engine.call("generations.read", self.number)
        assert error is None
        return joined([*self.first, *chunks], num_samples)


def _begin(
    engine: EngineProcess,
    adapter: Path | None = None,
    prompt: list[int] = PROMPT,
    *,
    num_samples: int = 1,
    max_tokens: int = 300,
) -> _Running:
    order = GenerateOrder(
        prompt=prompt,
        adapter=PolicyVersion("cut", 1) if adapter else None,
        num_samples=num_samples,
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, seed=3),
    )
    return _Running(*engine.call("generations.begin", order), adapter)


def _furthest(errors: list[float]) -> int:
    """How many of the first are within the bound."""
    return next((at for at, error in enumerate(errors) if error > MAX_ERROR), len(errors))


def _errors(want: list[float], got: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(want, got, strict=True)]


def test_kept_requests_go_on_over_their_old_cache_and_no_other_uses_it(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine.push_adapter("cut@1", qwen2.adapters[0])
    asked = [("tiny", PROMPT), ("tiny", LONG), ("cut", PROMPT), ("cut", LONG)]
    push(engine, "base@60", qwen2.other)
    fresh = [engine.complete(name, prompt, 12) for name, prompt in asked]
    engine.call("generations.choose", "keep")
    push(engine, "base@61", qwen2.base)
    for name, prompt in asked:  # all prompts lie in the cache, by the old base
        engine.complete(name, prompt, 12)
    running = [_begin(engine), _begin(engine, qwen2.adapters[0], LONG, max_tokens=200)]
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        http = pool.submit(engine.http.post, "/v1/completions", json=body)
        until(lambda: engine.call("tracker.num_running") == 3)
        times = push(engine, "base@62", qwen2.other)
        assert times.num_begun >= 2
        assert [engine.complete(name, prompt, 12) for name, prompt in asked] == fresh
        headers = http.result(60).headers
    assert (headers["weft-base"], headers["weft-last-base"]) == ("base@61", "base@62")
    assert headers["weft-older-cache"] == "true"
    for request, prompt in zip(running, (PROMPT, LONG), strict=True):
        (sample,) = request.whole(engine)
        before, after = sample.base_spans
        assert (before.version, before.older_cache) == (61, False)
        assert (after.version, after.older_cache) == (62, True)
        old = referee.logprobs(qwen2.base, prompt, sample.tokens, request.adapter)
        cut = before.end
        assert max(_errors(old[:cut], sample.logprobs[:cut])) <= MAX_ERROR
        kept = referee.logprobs_over_kept_cache(
            qwen2.base, qwen2.other, prompt, sample.tokens, cut, request.adapter
        )
        assert max(_errors(kept, sample.logprobs[cut:])) <= MAX_ERROR
        anew = referee.logprobs(qwen2.other, prompt, sample.tokens, request.adapter)[cut:]
        assert max(_errors(anew, sample.logprobs[cut:])) > 100 * MAX_ERROR, "no difference is seen"
    push(engine, "base@63", qwen2.base)
    engine.call("generations.choose", "recompute")


def test_a_kept_request_that_is_preempted_is_computed_anew(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine.call("generations.choose", "keep")
    push(engine, "base@70", qwen2.base)
    running = [_begin(engine, max_tokens=450) for _ in range(5)]
    push(engine, "base@71", qwen2.other)
    ends = []
    for request in running:
        (sample,) = request.whole(engine)
        before, after = sample.base_spans
        got = sample.logprobs[before.end :]
        kept = _errors(
            referee.logprobs_over_kept_cache(
                qwen2.base, qwen2.other, PROMPT, sample.tokens, before.end
            ),
            got,
        )
        anew = _errors(referee.logprobs(qwen2.other, PROMPT, sample.tokens)[before.end :], got)
        at = _furthest(kept)
        assert max(anew[at:], default=0.0) <= MAX_ERROR, (at, after.end)
        ends.append(after.end - before.end - at)
    # At their ends three of them fill the cache.
    assert sum(end > 0 for end in ends) >= 2, ends
    assert 0 in ends
    push(engine, "base@72", qwen2.base)
    engine.call("generations.choose", "recompute")


def test_aborted_requests_end_with_a_reason(
    engine: EngineProcess, qwen2: TinyModels, referee: Referee
) -> None:
    engine.call("generations.choose", "abort")
    push(engine, "base@80", qwen2.base)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 450, "ignore_eos": True}
    request = _begin(engine, num_samples=2)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(engine.http.post, "/v1/completions", json=body)
        with engine.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            until(lambda: engine.call("tracker.num_running") == 3)
            time.sleep(0.05)  # so that the second has tokens, too
            assert push(engine, "base@81", qwen2.other).num_begun == 3
            events = [line.removeprefix("data: ") for line in lines if line]
        refused = whole.result(60)
    assert (refused.status_code, refused.headers["weft-reason"]) == (503, "VERSION_CHANGED")
    assert refused.json()["error"]["message"].startswith("VERSION_CHANGED: ")
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert (error["code"], error["message"][:16]) == (503, "VERSION_CHANGED:")
    chunks, failure = engine.call("generations.read", request.number)
    assert isinstance(failure, VersionChangedError)
    for sample in joined([*request.first, *chunks], 2):
        assert sample.finish_reason is FinishReason.ABORT
        assert list(sample.base_spans) == [BaseSpan(80, 0, len(sample.tokens))]
        want = referee.logprobs(qwen2.base, PROMPT, sample.tokens)
        assert max(_errors(want, sample.logprobs)) <= MAX_ERROR
    check(referee, engine.complete("tiny", PROMPT), qwen2.other)
    push(engine, "base@82", qwen2.base)
    engine.call("generations.choose", "recompute")


def test_the_end_does_not_wait_for_what_never_comes(
    engine: EngineProcess, qwen2: TinyModels
) -> None:
    """The last one: it ends the engine."""
    engine.arrive("base@50", qwen2.other, num_buckets=2)
    until_loaded(engine, begun=True)
    engine.stop()
    assert engine.process.exitcode == 0
