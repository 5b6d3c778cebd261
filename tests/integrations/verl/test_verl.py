"""verl over a pool of real vLLM: what generates is what was trained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager

from tests.integrations.parity import (
    MAX_ERROR,
    MIN_CHANGE,
    PROMPT,
    error,
    logprob_error,
    sampled,
    version,
)
from tests.integrations.pool import ROOT, Served, serving, serving_struck
from tests.integrations.strike_points import check_struck, in_generation, in_push
from tests.integrations.verl.train import NUM_STEPS, configured
from tests.models import draw_base, load_hf
from trainer_side import Sampling
from trainer_side.integrations.verl import (
    Settings,
    VerlSender,
    WeftRollout,
    sampling_of,
    settings_of,
)
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError

_TRAIN_SECONDS = 300.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("verl")) as running:
        yield running


def train(served: Served, num_ranks: int, policy: str = "") -> list[dict[str, float]]:
    """Run verl's trainer to its end; its metrics of each step."""
    metrics = served.folder / f"metrics-{policy or 'base'}.jsonl"
    command = [
        sys.executable, "-m", "tests.integrations.verl.train", str(served.folder),
        served.pool.coordinator, str(num_ranks), *([policy] if policy else []),
    ]  # fmt: skip
    log = served.folder / f"train-{policy or 'base'}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)},
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(_TRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGTERM)  # Ray ends what it started
            process.wait(60)
    assert code == 0, log.read_text()[-6000:]
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]


def check_steps(steps: list[dict[str, float]]) -> None:
    """Every step's rollouts were made by the weights that the actors then had."""
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step["training/rollout_probs_diff_max"] <= MAX_ERROR, step


def test_an_adapter_is_trained_by_grpo_and_served_at_each_step(served: Served) -> None:
    check_steps(train(served, 1, policy="math"))
    adapter = sampled(served.pool.coordinator, "math")
    assert version(adapter) == NUM_STEPS + 1  # one before the first step
    assert error(adapter, served.model) > MIN_CHANGE
    base = sampled(served.pool.coordinator, "base")
    assert version(base) == 0
    assert error(base, served.model) <= MAX_ERROR


def test_full_weights_of_two_ranks_are_trained_by_grpo_and_served_at_each_step(
    served: Served,
) -> None:
    before = version(sampled(served.pool.coordinator, "base"))
    check_steps(train(served, 2))
    group = sampled(served.pool.coordinator, "base")
    assert version(group) == before + NUM_STEPS + 1
    assert error(group, served.model) > MIN_CHANGE


def test_a_training_goes_on_where_replicas_are_killed(tmp_path: Path) -> None:
    """One as it generates, one as it receives a push."""
    with serving_struck(tmp_path) as struck:
        check_steps(train(struck, 1, policy="math"))
        check_struck(in_generation(tmp_path), in_push(tmp_path))
        assert version(sampled(struck.pool.coordinator, "math")) == NUM_STEPS + 1


@ray.remote(num_cpus=0)
class Actor:
    """What verl's worker of an actor does in a sync, of a real model."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self.model = load_hf(Path(model))
        self.engine = CheckpointEngineRegistry.new(
            "weft", is_master=True, bucket_size=1 << 20, **settings
        )

    def draw(self, seed: int) -> None:
        draw_base(self.model, seed)

    def nudge(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.view(-1)[::40] += 0.25

    def error(self, *said: Any) -> float:
        return logprob_error(self.model, *said)

    async def update_weights(self, global_steps: int, mode: str) -> dict[str, float]:
        assert mode == "weft"
        return await self.engine.send_weights(self.model.named_parameters(), global_steps)

    def execute_checkpoint_engine(self, method: str, **arguments: Any) -> Any:
        return getattr(self.engine, method)(**arguments)


class Group:
    """A worker group of one."""

    world_size = 1

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def update_weights(self, **arguments: Any) -> list[Any]:
        return [self.actor.update_weights.remote(**arguments)]

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        one = {name: values[0] for name, values in arguments.items()}
        return [self.actor.execute_checkpoint_engine.remote(method[0], **one)]


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False)
    yield
    ray.shutdown()


def test_verls_own_manager_pushes_and_its_client_generates(served: Served, cluster: None) -> None:
    """Push as verl's trainers do that make their manager themselves. A step that changes little is
    a delta, though verl gives its tensors one by one."""
    settings = {"coordinator": served.pool.coordinator, "publisher": {"delta": "always"}}
    config = configured(served.folder, served.pool.coordinator, num_ranks=2)
    OmegaConf.update(config, "actor_rollout_ref.rollout.nnodes", 1)
    servers = LLMServerManager.create(config=config)
    assert servers.get_addresses() == ["weft-0", "weft-1"]
    actor = Actor.remote(str(served.model), settings)
    manager = CheckpointEngineManager(
        config=CheckpointEngineConfig(backend="weft"),
        actor_wg=Group(actor),
        replicas=servers.get_replicas(),
    )
    client = servers.get_client()
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}

    async def generate(count: int) -> list[Any]:
        return await asyncio.gather(
            *(
                client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params=dict(sampling))
                for i in range(count)
            )
        )

    before = version(sampled(served.pool.coordinator, "base"))
    for number in (1, 2):
        ray.get(actor.draw.remote(1) if number == 1 else actor.nudge.remote())
        metrics = manager.update_weights(number)
        assert metrics["weft/version"] == before + number
        assert metrics["weft/is_delta"] == (number == 2)
        for output in asyncio.run(generate(4)):
            assert output.extra_fields["global_steps"] == before + number
            assert output.extra_fields["max_global_steps"] == before + number
            assert output.stop_reason == "completed"
            assert 0 < len(output.token_ids) <= 8  # verl's response_length
            assert len(output.log_probs) == len(output.token_ids)
            said = (PROMPT, output.token_ids, output.log_probs)
            assert ray.get(actor.error.remote(*said)) <= MAX_ERROR


def test_a_sync_without_a_checkpoint_engine_is_a_push(served: Served) -> None:
    """As verl's v1 trainers make it, whose backend is ``naive``."""
    config = configured(served.folder, served.pool.coordinator, num_ranks=1).actor_rollout_ref
    assert get_rollout_class("weft") is WeftRollout
    rollout = WeftRollout(config.rollout, config.model, device_mesh=None)
    model = load_hf(served.model)
    draw_base(model, 9)
    with pytest.raises(UnsupportedError, match=r"model\.lora\.merge=True"):
        asyncio.run(rollout.update_weights(iter(()), peft_config={"r": 8}, base_sync_done=True))
    before = version(sampled(served.pool.coordinator, "base"))
    asyncio.run(rollout.update_weights(model.named_parameters(), base_sync_done=True))
    group = sampled(served.pool.coordinator, "base")
    assert version(group) == before + 1
    assert error(group, model) <= MAX_ERROR
    rollout.close()


def test_what_verl_says_of_sampling_is_said_to_replicas() -> None:
    params = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}
    said = sampling_of({**params, "logprobs": True, "stop": "end", "seed": None}, 7)
    assert said == Sampling(temperature=0.5, top_p=0.9, stop=("end",), max_tokens=7)
    assert sampling_of({"top_k": 5, "max_new_tokens": 3}, 7) == Sampling(top_k=5, max_tokens=3)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs, typical_p: not known"):
        sampling_of({"typical_p": 0.1, "prompt_logprobs": 1}, 7)


@pytest.mark.parametrize(("policy", "what"), [("base", "an adapter"), ("math", "full weights")])
def test_a_policy_that_is_not_what_is_trained_is_refused(policy: str, what: str) -> None:
    """Before anything is sent: nobody listens there."""

    class Module(torch.nn.Module):
        peft_config = {}  # noqa: RUF012 (as PEFT has it)

    class Engine:
        module = Module()
        model_config = SimpleNamespace(lora={"merge": policy != "base"})

        def get_per_tensor_param(self) -> Any:
            raise AssertionError("asked for tensors")

    with pytest.raises(InvalidRequestError, match=what):
        VerlSender(Settings(coordinator="127.0.0.1:1", policy=policy)).push(Engine())


def test_settings_that_are_none_are_refused_by_name() -> None:
    config = RolloutConfig(name="weft", checkpoint_engine=CheckpointEngineConfig(backend="weft"))
    with pytest.raises(InvalidRequestError, match=r"engine_kwargs\.weft: .*'coordinator'"):
        settings_of(config)
