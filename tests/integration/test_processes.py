"""The coordinator as a process that is killed, and the command line as people use it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import replicas_of, running_pool
from tests.integration.models import Model, lora, peft_of, same, weights
from tests.integration.processes import start_coordinator
from trainer_side import Publisher
from weft_rl.coordinator.runtime.manifests import LayoutCache
from weft_rl.transport import member

#: Longer than a rank may say nothing here.
_LONG_SECONDS = 4.0


def test_kill_9_of_the_coordinator_between_pushes(tmp_path):
    process, target = start_coordinator(tmp_path)
    engine = EngineDouble(weights(Model()))
    try:
        with (
            replicas_of(target) as pool,
            Publisher(target, trainer_id="trainer-a", timeout_seconds=30) as publisher,
        ):
            agent = pool.add_replica("replica-0", engine)
            assert str(publisher.push_base(Model(1)).version) == "base@1"
            assert str(publisher.push_adapter(peft_of(Model()), "math").version) == "math@1"
            for number in (2, 3):
                process.kill()
                process, _ = start_coordinator(tmp_path, listen=target)
                # Nobody tells the replica: it registers again by itself.
                assert str(publisher.push_base(Model(number)).version) == f"base@{number}"
                assert same(engine.base, weights(Model(number)))
            assert str(publisher.push_adapter(peft_of(Model()), "math").version) == "math@2"
            assert agent.serving.vector.adapters["math"].versions == (1, 2)
    finally:
        process.stop()


def weft(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "weft_rl", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "120", **env},
        check=False,
    )


@pytest.fixture
def pool(tmp_path):
    with running_pool(tmp_path / "weft.db") as running:
        running.add_replica("replica-0", EngineDouble(weights(Model())))
        yield running


def test_push_and_status_from_the_shell(pool, tmp_path):
    model = peft_of(Model())
    model.save_pretrained(tmp_path / "adapter")
    pushed = weft("push", "-c", pool.target, "--policy", "math", str(tmp_path / "adapter"))
    assert pushed.returncode == 0, pushed.stderr
    assert "math@1 is served by 1 replica:" in pushed.stdout
    engine = pool.agents["replica-0"].engine
    assert same(engine.adapter("math@1"), lora(model))

    save_file(weights(Model(7)), tmp_path / "model.safetensors")
    again = weft("push", "--policy", "base", str(tmp_path / "model.safetensors"),
                 WEFT_COORDINATOR=pool.target)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert same(engine.base, weights(Model(7)))

    table = weft("status", "-c", pool.target).stdout
    for words in ("replica-0", "ready", "base@1", "math@1 (1)", "double", "last transfer", "B/s"):
        assert words in table
    facts = json.loads(weft("status", "-c", pool.target, "--json").stdout)
    assert facts["version_vector"]["base"] == "1"
    assert facts["replicas"][0]["state"] == "REPLICA_STATE_READY"
    assert facts["last_transfer"]["state"] == "TRANSFER_STATE_COMMITTED"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["push", "--policy", "a@b", "."], "cannot name a policy"),
        (["push", "--policy", "math", "/nowhere"], "does not exist"),
        (["push", "--policy", "math", "."], "adapter_config.json"),
        (["push", "--policy", "math", "--draft", ".", "."], "--draft needs --policy base"),
        (["push", "--policy", "base", "--draft", "/nowhere", "."], "/nowhere does not exist"),
        (["push", "--policy", "math", "--require", "none", "."], "--require"),
        (["coordinator", "--listen", "nonsense"], "nonsense"),
        (["status", "-c", "127.0.0.1:1"], "COORDINATOR_AWAY"),
        (["rollout", "-c", "127.0.0.1:1"], "name the model after --"),
    ],
)
def test_mistakes_are_one_clear_line(pool, args, words, tmp_path):
    given = args if args[0] != "push" else [args[0], "-c", pool.target, *args[1:]]
    result = subprocess.run(
        [sys.executable, "-m", "weft_rl", *given],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_trainers_need_no_vllm_and_no_server_packages():
    """Imported with all of them forbidden, and with none of them loaded afterwards."""
    code = (
        "import sys\n"
        "for name in ('vllm', 'grpc_reflection', 'grpc_health', 'grpc_channelz', 'rich', 'typer',"
        " 'peft', 'transformers', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "import trainer_side\n"
        "trainer_side.Publisher('127.0.0.1:1', trainer_id='a').close()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_hundred_thousand_tensors_are_pushed(tmp_path):
    names = [f"layers.{i // 1000}.experts.{i % 1000}.weight" for i in range(100_000)]
    base = {name: torch.zeros(1) for name in names}
    new = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    save_file(new, tmp_path / "model.safetensors")
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(base)
        pool.add_replica("replica-0", engine)
        with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=120) as publisher:
            assert str(publisher.push_base(tmp_path / "model.safetensors").version) == "base@1"
        assert same(engine.base, new)


def test_a_rank_that_plans_for_long_is_not_taken_for_one_that_stalls(tmp_path, monkeypatch):
    """Its list of tensors comes late, and takes long to read."""
    read, chunks = member.manifest_from_chunks, LayoutCache.chunks

    def read_slowly(parts):
        parts = list(parts)
        time.sleep(_LONG_SECONDS)
        return read(parts)

    async def late(cache, layout):
        await asyncio.sleep(_LONG_SECONDS)
        return await chunks(cache, layout)

    monkeypatch.setattr(member, "manifest_from_chunks", read_slowly)
    monkeypatch.setattr(LayoutCache, "chunks", late)
    with running_pool(tmp_path / "weft.db", stall_seconds=2.5) as pool:
        engine = EngineDouble(weights(Model(1)))
        pool.add_replica("replica-0", engine)
        with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=60) as publisher:
            result = publisher.push_base(Model(2))
        assert not any("begun again" in remark for remark in result.report.remarks)
        assert same(engine.base, weights(Model(2)))


def test_sigterm_ends_a_coordinator_at_once(tmp_path):
    process, _ = start_coordinator(tmp_path)
    assert process.signal(signal.SIGTERM, timeout_seconds=10) == 0
    process.stop()
