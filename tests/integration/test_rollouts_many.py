"""Thousands of requests at once while versions change: each answer is of the version that it
names, and none is lost or doubled. The doubles' tokens name what made them;
``python -m benchmarks.rollouts`` does the same with real vLLM."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.doubles.answers import token
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of
from trainer_side import Publisher, RolloutClient, SampleGroup, Sampling

_REQUESTS, _THREADS, _PER_CALL = 10_000, 64, 5
_HOW = Sampling(max_tokens=3)


def test_each_answer_is_of_the_version_that_it_names(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    publisher.push_adapter(peft_of(Model()), "math")
    is_done = threading.Event()
    newest = {"base": 0, "math": 1}  # whose push has returned

    def push() -> int:
        count = 0
        while not is_done.is_set():
            if count % 2:
                newest["base"] = publisher.push_base(Model(count)).version.version
            else:
                newest["math"] = publisher.push_adapter(peft_of(Model()), "math").version.version
            count += 1
        return count

    def ask(number: int) -> list[tuple[str, int, list[SampleGroup]]]:
        policy = ("base", "math")[number % 2]
        at_least = newest[policy]
        prompts = [[number, i + 1] for i in range(_PER_CALL)]
        how = {"min_version": f"{policy}@{at_least}"} if number % 3 else {}
        groups = rollouts.generate(prompts, model=policy, sampling=_HOW, **how)
        assert [group.prompt_token_ids for group in groups] == prompts
        return [(policy, at_least, groups)]

    with (
        RolloutClient(pool.target, timeout_seconds=120) as rollouts,
        ThreadPoolExecutor(_THREADS + 1) as threads,
    ):
        pushing = threads.submit(push)
        asked = [threads.submit(ask, number) for number in range(_REQUESTS // _PER_CALL)]
        answers = [answer for each in asked for answer in each.result(120)]
        is_done.set()
        assert pushing.result(60) >= 4
    replicas: Counter[str] = Counter()
    versions = set()
    for policy, at_least, groups in answers:
        for group in groups:
            (sample,) = group.samples
            replicas[group.replica_ids[0]] += 1
            number = sample.adapter.version if sample.adapter else 0
            assert bool(number) == (policy == "math")
            assert min(sample.versions.tolist()) >= at_least
            assert sample.token_ids.tolist() == [
                token(base, number, 0, at) for at, base in enumerate(sample.base_versions.tolist())
            ]
            versions.add((policy, int(sample.versions[0])))
    assert sum(replicas.values()) == _REQUESTS
    assert min(replicas.values()) > _REQUESTS / 4
    assert len(versions) >= 5
    assert not any(engine.answers for engine in engines)
