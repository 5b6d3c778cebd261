"""Real vLLM: a replica that is killed, alone, comes back from its spill directory, and ends in
good order; and others read what lies there."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import TinyModels
from tests.e2e.replicas import (
    LORA_ARGS,
    MODEL_NAME,
    PROMPT,
    answering_url,
    ask,
    running_coordinator,
    start_replica,
    stream,
    wait_ready,
)
from tests.models import Referee
from tests.processes import is_running, members
from tests.waits import until
from trainer_side import Publisher

_SPILL_SECONDS = _END_SECONDS = 30.0
_NUM_TOKENS = 200
#: Of the log-probabilities of the same weights, added up in another order.
_MAX_ERROR = 5e-5


def _wait_spilled(target: str, *versions: str) -> None:
    def spilled() -> list[str]:
        found = wait_ready(target, "replica-0").report.spilled_versions
        return [f"{v.policy}@{v.version}" for v in found]

    until(lambda: spilled() == list(versions), _SPILL_SECONDS, every_seconds=0.1, why=spilled)


def _almost(checkpoint: Path, directory: Path) -> Path:
    """A checkpoint that differs from another one in a few elements."""
    shutil.copytree(checkpoint, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor.view(-1)[:3] += 0.25
    save_file(tensors, file, {"format": "pt"})
    return directory


def test_a_pool_of_one_is_killed_and_serves_the_same_without_a_trainer(
    tmp_path: Path, qwen2_tied: TinyModels, referee: Referee
) -> None:
    """What one worker has written two read: one of them reads, the other maps what it has read."""
    tiny, args = qwen2_tied, LORA_ARGS
    models = (MODEL_NAME, "math@1", "math")
    options = ("--spill-dir", str(tmp_path / "spill"))
    with running_coordinator(tmp_path) as coordinator, ExitStack() as stack:
        target = coordinator.target
        first = start_replica(tmp_path, target, "replica-0", tiny.base, *args, options=options)
        stack.callback(first.stop)
        url = answering_url(first)
        with Publisher(
            target, trainer_id="trainer", timeout_seconds=60, delta="always"
        ) as publisher:
            publisher.push_base(_almost(tiny.other, tmp_path / "almost"))
            first_answer = ask(url, MODEL_NAME)
            _wait_spilled(target, "base@1")
            assert publisher.push_base(tiny.other).report.delta.is_delta
            publisher.push_adapter(tiny.adapters[0], "math")
        answers = {model: ask(url, model) for model in models}
        _wait_spilled(target, "base@1", "base@2", "math@1")
        assert len(list((tmp_path / "spill").glob("*/base@2.*/weft.changes"))) == 1
        processes = members(first.pid)
        assert len(processes) > 2  # the engine's, and its worker's
        os.kill(first.pid, signal.SIGKILL)
        first.wait(10)
        until(lambda: not any(map(is_running, processes)))  # they end with it
        (adapter,) = (tmp_path / "spill").glob("*/math@1.*")
        args = (*args, "--tensor-parallel-size", "2", "--lora-modules", f"by-vllm={adapter}")
        again = start_replica(tmp_path, target, "replica-0", tiny.base, *args, options=options)
        stack.callback(again.stop)
        url = answering_url(again)
        replica = wait_ready(target, "replica-0", url)
        assert replica.version_vector.base == 2
        assert list(replica.report.retained_base_versions) == [2]
        for model in models:
            tokens, logprobs, version = ask(url, model)
            assert (tokens, version) == (answers[model][0], answers[model][2])
            assert logprobs == pytest.approx(answers[model][1], abs=_MAX_ERROR)
        assert ask(url, "by-vllm")[:2] == ask(url, "math@1")[:2]
        told: list[int] = []

        def stop_it() -> None:
            """At the first token."""
            if not told:
                told.append(signal.SIGTERM)
                again.send_signal(told[0])

        assert stream(url, _NUM_TOKENS, stop_it) == (_NUM_TOKENS, "length")
        line = again.line(lambda text: text.startswith("ended: "), _END_SECONDS)
        assert line == "ended: drained: its process was told to stop"
        assert again.wait(_END_SECONDS) == 0
    (base,) = (tmp_path / "spill").glob("*/base@1.*")
    checkpoint = Path(shutil.copytree(base, tmp_path / "checkpoint"))
    shutil.copy(tiny.other / "config.json", checkpoint)
    for directory, answer, peft in (
        (checkpoint, first_answer, None),
        (tiny.other, answers[MODEL_NAME], None),
        (tiny.other, answers["math@1"], adapter),
    ):
        tokens, logprobs, _ = answer
        ids = [int(token.removeprefix("token_id:")) for token in tokens]
        expected = referee.logprobs(directory, PROMPT, ids, peft)
        assert logprobs == pytest.approx(expected, abs=_MAX_ERROR)
