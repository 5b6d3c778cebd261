"""Real vLLM: a replica that starts late answers, bit by bit, like the first; both go back
to what they served before; one is killed, the other leaves in good order."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tests.doubles.collector import Collector, Seen
from tests.e2e.conftest import TinyModels
from tests.e2e.logprobs import MAX_ERROR, PROMPT
from tests.e2e.replicas import (
    LORA_ARGS,
    MODEL_NAME,
    answering_url,
    ask,
    generate,
    running_coordinator,
    start_replica,
    stream,
    wait_ready,
)
from tests.models import Referee, load_hf
from tests.waits import until
from trainer_side import Publisher, RolloutClient, SampleGroup, Sampling
from weft_rl.cli.demo.processes import Process
from weft_rl.cli.main import app
from weft_rl.cli.orders import drain, rollback
from weft_rl.progress import STARTING

_NUM_TOKENS = 240
_SECONDS = 60.0


class PoolOfTwo:
    """A coordinator and a replica; the other one starts when it is asked for."""

    def __init__(
        self, work: Path, target: str, model: Path, collector: Collector, stack: ExitStack
    ) -> None:
        self.target, self.collector = target, collector
        self._work, self._model, self._stack = work, model, stack
        self.processes: list[Process] = []
        self.urls: list[str] = []

    def grow(self, count: int) -> None:
        """Have so many replicas."""
        while len(self.urls) < count:
            name = f"replica-{len(self.urls)}"
            options = ("--base-copies", "2", "--metrics", "127.0.0.1:0", "--log-format", "json")
            process = start_replica(
                self._work,
                self.target,
                name,
                self._model,
                *LORA_ARGS,
                options=(*options, "--traces"),
                env=_tracing_to(self.collector),
            )
            self._stack.callback(process.stop)
            self.processes.append(process)
            self.urls.append(answering_url(process))

    def metrics(self, number: int) -> dict[str, float]:
        """What a replica counts, by name and values of labels."""
        log = self.processes[number].log_path.read_text()
        (url,) = re.findall(r'"metrics on (http://[^"]+)"', log)
        text = httpx.get(url, timeout=_SECONDS).text
        return {
            "/".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, qwen2: TinyModels) -> Iterator[PoolOfTwo]:
    work = tmp_path_factory.mktemp("two")
    with Collector() as collector, ExitStack() as stack:
        traces = {"options": ("--traces",), "env": _tracing_to(collector)}
        coordinator = stack.enter_context(running_coordinator(work, **traces))
        yield PoolOfTwo(work, coordinator.target, qwen2.base, collector, stack)


def test_a_replica_logs_how_far_its_start_is(pool: PoolOfTwo) -> None:
    """Every ten seconds, from the fifth on: an engine needs more."""
    pool.grow(1)
    lines = pool.processes[0].log_path.read_text().splitlines()
    told = [json.loads(line)["message"] for line in lines if STARTING in line]
    steps = (
        r"importing vLLM|starting the engine of /.+|preparing the workers for pushes"
        r"|generating its first tokens"
    )
    assert told
    assert all(re.fullmatch(rf"{STARTING}: ({steps}) \(\d+ (s|min)\)", each) for each in told), told


def _tracing_to(collector: Collector) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}


def test_a_late_replica_clones_all_and_goes_back_with_the_others(
    pool: PoolOfTwo, qwen2: TinyModels
) -> None:
    models = (MODEL_NAME, "math@1", "math@2", "math", "code")
    pool.grow(1)
    with Publisher(pool.target, trainer_id="trainer", timeout_seconds=60) as publisher:
        started_with = ask(pool.urls[0], MODEL_NAME)
        publisher.push_base(qwen2.other)
        publisher.push_adapter(qwen2.adapters[0], "math")
        publisher.push_adapter(qwen2.adapters[1], "math")
        publisher.push_adapter(qwen2.adapters[2], "code")
        pool.grow(2)
        replica = wait_ready(pool.target, "replica-1")
        assert list(replica.report.retained_base_versions) == [1]
        answers = {model: ask(pool.urls[0], model) for model in models}
        assert answers[MODEL_NAME] != started_with
        assert answers["math"][2] == "math@2"
        assert answers["math@1"][:2] != answers["math@2"][:2]
        for model in models:
            assert ask(pool.urls[1], model) == answers[model]
        for policy, model in (("math", "math"), ("math@1", "math@1"), ("base@1", MODEL_NAME)):
            tokens, logprobs, version = generate(replica.address, policy)
            assert tokens == answers[model][0]
            assert logprobs == pytest.approx(answers[model][1], abs=1e-6)
            assert version == ("base@1" if model == MODEL_NAME else answers[model][2])
        publisher.push_base(qwen2.base)
        for url in pool.urls:
            assert ask(url, MODEL_NAME) == started_with
        rollback("base", 1, coordinator=pool.target, timeout=60)
        rollback("math", 1, coordinator=pool.target, timeout=60)
        for url in pool.urls:
            for model in (MODEL_NAME, "math@1", "math@2", "code"):
                assert ask(url, model) == answers[model]
            assert ask(url, "math") == answers["math@1"]
        assert wait_ready(pool.target, "replica-1").version_vector.base == 1
        assert str(publisher.push_adapter(qwen2.adapters[3], "math").version) == "math@3"
        for url in pool.urls:
            assert ask(url, "math")[2] == "math@3"


def _verified(pool: PoolOfTwo, path: Path, policy: str) -> dict[str, Any]:
    """What ``weft verify --json`` says; it ends as it says."""
    command = ["verify", "-c", pool.target, "--policy", policy, "--json", str(path)]
    ended = CliRunner().invoke(app, command)
    found: dict[str, Any] = json.loads(ended.stdout)
    assert ended.exit_code == (0 if found["ok"] else 1)
    return found


def test_what_is_served_is_verified_tensor_by_tensor_and_by_its_answers(
    pool: PoolOfTwo, qwen2: TinyModels
) -> None:
    pool.grow(1)
    with Publisher(pool.target, trainer_id="trainer", timeout_seconds=60) as publisher:
        publisher.push_base(qwen2.base)
        publisher.push_adapter(qwen2.adapters[0], "verified")
    for policy, path, other in (
        ("base", qwen2.base, qwen2.other),
        ("verified", qwen2.adapters[0], qwen2.adapters[1]),
    ):
        found = _verified(pool, path, policy)
        assert found["ok"], found
        below = [str(qwen2.base)] if policy != "base" else []
        assert [part["path"] for part in found["parts"]] == [str(path), *below]
        for replica in found["parts"][0]["replicas"]:
            assert replica["tensors"].keys() == {"equal"}
            assert replica["parity"]["num_tokens"] == 96
            assert replica["parity"]["largest"] <= replica["parity"]["bound"] == 5e-5
        found = _verified(pool, other, policy)
        assert not found["ok"]
        names = {difference["name"] for difference in found["parts"][0]["differences"]}
        assert any("layers.1.self_attn.q_proj" in name for name in names)
        for replica in found["parts"][0]["replicas"]:
            assert not replica["parity"]["ok"]


def _change(model: torch.nn.Module) -> None:
    """Change some elements."""
    with torch.no_grad():
        for parameter in model.parameters():
            changed = torch.rand(parameter.shape) < 0.02
            parameter[changed] *= 1.5


def test_what_a_delta_made_is_verified_by_its_tensors_and_answers(
    pool: PoolOfTwo, qwen2: TinyModels, tmp_path: Path
) -> None:
    pool.grow(2)
    model = load_hf(qwen2.base)
    with Publisher(
        pool.target, trainer_id="trainer", timeout_seconds=60, delta="always"
    ) as publisher:
        version, _ = publisher.push_base(model)
        answers = [[ask(url, MODEL_NAME) for url in pool.urls]]
        for _ in range(2):
            _change(model)
            report = publisher.push_base(model).report
            answers.append([ask(url, MODEL_NAME) for url in pool.urls])
            assert report.delta.is_delta, report.delta
            assert report.sent_bytes < report.total_bytes / 10
            assert report.num_replicas == 2
    model.save_pretrained(tmp_path / "trained")
    found = _verified(pool, tmp_path / "trained", "base")
    assert found["ok"], found
    for replica in found["parts"][0]["replicas"]:
        assert replica["tensors"].keys() == {"equal"}
        assert replica["parity"]["ok"]
    assert answers[0] != answers[2]
    rollback("base", version.version + 1, coordinator=pool.target, timeout=60)
    assert [ask(url, MODEL_NAME) for url in pool.urls] == answers[1]


def test_the_bytes_that_replicas_were_started_with_are_no_other_base(
    pool: PoolOfTwo, qwen2: TinyModels
) -> None:
    pool.grow(1)
    with Publisher(pool.target, trainer_id="trainer", timeout_seconds=60) as publisher:

        def remarks(base: str) -> tuple[str, ...]:
            return publisher.push_adapter(qwen2.adapters[0], "same", base=base).report.remarks

        base = publisher.push_base(qwen2.other).version
        assert remarks("base@0") == (f"trained on base@0, served over {base}",)
        publisher.push_base(qwen2.base)
        assert remarks("only base@0") == ()


def test_what_a_replica_shows_of_itself(pool: PoolOfTwo, qwen2: TinyModels) -> None:
    pool.grow(1)
    before = pool.metrics(0)
    with Publisher(pool.target, trainer_id="trainer", timeout_seconds=60) as publisher:
        publisher.push_base(qwen2.base)
        publisher.push_adapter(qwen2.adapters[0], "shown")
    wait_ready(pool.target, "replica-0")
    switches = "weft_switches_total/adapter"
    until(lambda: pool.metrics(0)[switches] > before[switches])  # a text is good for 0.25 s
    after = pool.metrics(0)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["weft_switches_total/base"] == grown["weft_switches_total/adapter"] == 1
    assert grown["weft_load_seconds_count/base"] == 1
    assert grown["weft_replica_pause_seconds_count"] == 1
    assert 0 < grown["weft_replica_pause_seconds_sum"] < _SECONDS
    assert 0 < after["weft_store_bytes/adapters"] < after["weft_store_limit_bytes/adapters"]
    assert 0 < after["weft_store_bytes/staging"] < after["weft_store_limit_bytes/staging"]
    assert after["weft_requests_running"] == 0
    assert "weft_store_bytes/spill" not in after


def test_a_push_is_one_trace_from_the_coordinator_to_vllms_workers(
    pool: PoolOfTwo, qwen2: TinyModels
) -> None:
    pool.grow(1)
    with Publisher(pool.target, trainer_id="trainer", timeout_seconds=60) as publisher:
        version = publisher.push_adapter(qwen2.adapters[0], "traced").version
    wait_ready(pool.target, "replica-0")

    def of_push(name: str) -> list[Seen]:
        return [
            span
            for span in pool.collector.wait(1, name)
            if span.name == name
            and span.attributes["weft.policy"] == "traced"
            and span.attributes["weft.version"] == version.version
        ]

    until(lambda: of_push("weft.transfer"))  # it ends last
    (transfer,) = of_push("weft.transfer")
    for name in ("weft.receive", "weft.switch"):  # by a worker process, by its replica's
        until(lambda name=name: "replica-0" in {span.instance for span in of_push(name)})
        spans = {span.instance: span for span in of_push(name)}
        assert spans["replica-0"].service == "weft-replica"
        assert spans["replica-0"].parent_id == transfer.span_id
        assert spans["replica-0"].trace_id == transfer.trace_id
    assert spans["replica-0"].attributes["weft.load_seconds"] > 0


def test_rollouts_are_what_transformers_says_of_the_versions_they_name(
    pool: PoolOfTwo, qwen2: TinyModels, referee: Referee, tmp_path: Path
) -> None:
    """Full and adapter, while both change, the base by deltas and whole; every token against
    transformers."""
    pool.grow(2)
    for name in ("replica-0", "replica-1"):  # one that still catches up is not routed to
        wait_ready(pool.target, name)
    how = Sampling(max_tokens=120, temperature=0.7, ignore_eos=True)
    trained, deltas = [load_hf(qwen2.base)], set[int]()
    for number in range(2):
        trained.append(copy.deepcopy(trained[-1]))
        _change(trained[-1])
        trained[-1].save_pretrained(tmp_path / f"trained-{number}")
    with (
        Publisher(
            pool.target, trainer_id="trainer", timeout_seconds=60, delta="always"
        ) as publisher,
        RolloutClient(pool.target, timeout_seconds=_SECONDS) as rollouts,
        ThreadPoolExecutor(2) as threads,
    ):
        bases = {publisher.push_base(trained[0]).version.version: qwen2.base}
        adapters = {
            publisher.push_adapter(qwen2.adapters[0], "roll").version.version: qwen2.adapters[0]
        }
        asked = [
            threads.submit(rollouts.generate, [PROMPT] * 4, model=policy, n=2, sampling=how)
            for policy in ("base", "roll")
        ]
        for number, model in enumerate(trained[1:]):
            version, report = publisher.push_base(model)
            assert report.delta.is_delta, report.delta
            bases[version.version] = tmp_path / f"trained-{number}"
            deltas.add(version.version)
        # What is under way may be slower than three pushes.
        changed = rollouts.generate(
            [PROMPT], model="base", min_version=f"base@{max(deltas)}", sampling=how
        )
        bases[publisher.push_base(qwen2.other).version.version] = qwen2.other
        adapters[publisher.push_adapter(qwen2.adapters[1], "roll").version.version] = (
            qwen2.adapters[1]
        )
        groups = [group for each in asked for group in each.result(_SECONDS)] + changed
        groups += rollouts.generate(
            [PROMPT], model="roll", n=2, min_version=f"roll@{max(adapters)}", sampling=how
        )
    assert {name for group in groups for name in group.replica_ids} == {"replica-0", "replica-1"}
    assert len(groups) == 10
    samples = [sample for group in groups for sample in group.samples]
    named = {version for sample in samples for version in sample.base_versions.tolist()}
    assert deltas & named, "no answer was sampled of what a delta made"
    for sample in samples:
        adapter = adapters[sample.adapter.version] if sample.adapter else None
        for version in set(sample.base_versions.tolist()):
            of_it = sample.base_versions == version
            want = torch.tensor(
                referee.logprobs(
                    bases[version], PROMPT, sample.token_ids.tolist(), adapter, how.temperature
                )
            )
            assert (want - sample.logprobs)[of_it].abs().max() <= MAX_ERROR
    (newest,) = groups[-1:]
    assert all(s.adapter and s.adapter.version == max(adapters) for s in newest.samples)


def test_a_replica_that_is_killed_loses_no_sample(
    pool: PoolOfTwo, qwen2: TinyModels, referee: Referee
) -> None:
    pool.grow(2)
    wait_ready(pool.target, "replica-1")
    how = Sampling(max_tokens=_NUM_TOKENS, ignore_eos=True)
    with (
        Publisher(pool.target, trainer_id="trainer", timeout_seconds=60) as publisher,
        # Prompts wait in the client: one that is slow to be listed, or to answer, has some, too,
        # if they last till then.
        RolloutClient(
            pool.target, timeout_seconds=_SECONDS, max_requests_per_replica=2
        ) as rollouts,
        ThreadPoolExecutor(1) as threads,
    ):
        publisher.push_base(qwen2.base)
        version = publisher.push_adapter(qwen2.adapters[0], "kept").version
        is_killed = threading.Event()

        def ask_in_rounds() -> list[list[SampleGroup]]:
            rounds = []
            while not is_killed.is_set():
                rounds.append(rollouts.generate([PROMPT] * 12, model="kept", n=2, sampling=how))
            return [*rounds, rollouts.generate([PROMPT] * 12, model="kept", n=2, sampling=how)]

        asked = threads.submit(ask_in_rounds)
        try:
            until(lambda: asked.done() or _num_running(pool.urls[1]) > 0, _SECONDS)
            pool.processes.pop().kill()
            pool.urls.pop()
        finally:
            is_killed.set()
        rounds = asked.result(2 * _SECONDS)
    assert {len(groups) for groups in rounds} == {12}
    for group in rounds[-1]:
        assert set(group.replica_ids) == {"replica-0"}
    for group in chain.from_iterable(rounds):
        for sample in group.samples:
            assert sample.adapter == version
            assert len(sample.token_ids) == _NUM_TOKENS
    sample = rounds[0][0].samples[0]
    want = referee.logprobs(qwen2.base, PROMPT, sample.token_ids.tolist(), qwen2.adapters[0])
    assert (torch.tensor(want) - sample.logprobs).abs().max() <= MAX_ERROR


def _num_running(url: str) -> float:
    """Requests that a replica's engine works on."""
    text = httpx.get(f"{url}/metrics", timeout=_SECONDS).text
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return float(line.rpartition(" ")[2])


def test_running_requests_end_whole_and_the_process_with_0(pool: PoolOfTwo) -> None:
    """The last one: the replica that is left leaves. (One that is told by SIGTERM to stop is in
    test_spill.)"""
    pool.grow(1)
    told: list[Any] = []
    with ThreadPoolExecutor(1) as threads:

        def drain_it() -> None:
            """At the first token: an order of an operator."""
            if not told:
                order = {"timeout": _SECONDS, "reason": "old card", "coordinator": pool.target}
                told.append(threads.submit(drain, "replica-0", **order))

        assert stream(pool.urls[0], _NUM_TOKENS, drain_it) == (_NUM_TOKENS, "length")
        (process,) = pool.processes
        line = process.line(lambda text: '"ended: ' in text, _SECONDS)
        assert json.loads(line)["message"] == "ended: drained: by an operator: old card"
        assert process.wait(_SECONDS) == 0
        told[0].result(_SECONDS)
    # From the first line to the last, whoever wrote it: ours, vLLM's processes, libraries.
    lines = [json.loads(line) for line in process.log_path.read_text().splitlines()]
    assert all({"time", "message"} <= line.keys() or "result" in line for line in lines)
    assert any(line.get("logger", "").startswith("rollout_side") for line in lines)
