"""``weft verify`` beside a pool of engine doubles: what it says, and how it ends."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from tests.doubles import answers
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, weights
from tests.models import make_model
from trainer_side import Publisher
from weft_rl import progress
from weft_rl.cli.main import app
from weft_rl.cli.verify import main
from weft_rl.contract.names import PolicyVersion


@pytest.fixture
def engines(pool: Pool) -> list[EngineDouble]:
    doubles = [
        EngineDouble(weights(Model()), base_copies=1, logprobs_mode="processed_logprobs")
        for _ in range(2)
    ]
    for i, engine in enumerate(doubles):
        pool.add_replica(f"replica-{i}", engine)
    return doubles


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(path: Path, seed: int, **changes: torch.Tensor) -> Path:
    save_file({**weights(Model(seed)), **changes}, path)
    return path


def verify(pool: Pool, path: Path, policy: str, *options: str) -> Result:
    command = ["verify", "-c", pool.target, "--policy", policy, str(path), *options]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, command)


def facts(pool: Pool, path: Path, policy: str, *options: str) -> tuple[int, dict[str, Any]]:
    ended = verify(pool, path, policy, "--json", *options)
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["ok"] == (ended.exit_code == 0)
    return ended.exit_code, found


def test_a_base_is_what_was_pushed_and_not_another(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, tmp_path: Path
) -> None:
    publisher.push_base(Model(5))
    ended = verify(pool, saved(tmp_path / "five", 5), "base")
    assert ended.exit_code == 0, ended.output
    assert "13 equal" in ended.output
    assert f"equal: base@1 is what {tmp_path / 'five'} holds" in ended.output
    other = weights(Model(5))["layers.1.q_proj.weight"] + 1e-6
    path = saved(tmp_path / "near", 5, **{"layers.1.q_proj.weight": other})
    ended = verify(pool, path, "base@1")
    assert ended.exit_code == 1
    assert "12 equal, 1 different" in ended.output
    assert "different: layers.1.q_proj.weight: F32 (32,32) of other values" in ended.output
    code, found = facts(pool, path, "base")
    assert code == 1
    (difference,) = found["parts"][0]["differences"]
    assert (difference["name"], difference["verdict"]) == ("layers.1.q_proj.weight", "different")
    doubled = saved(
        tmp_path / "doubled", 5, **{k: v.double() for k, v in weights(Model(5)).items()}
    )
    code, found = facts(pool, doubled, "base")
    assert code == 0
    tensors = [replica["tensors"] for replica in found["parts"][0]["replicas"]]
    assert tensors == [{"equal after a cast": 13}] * 2
    assert any("another type of floats" in remark for remark in found["remarks"])


def test_replicas_that_disagree_are_seen(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, tmp_path: Path
) -> None:
    publisher.push_base(Model(5))
    held = engines[1].store.held(PolicyVersion("base", 1))
    held.segment.data[0] ^= 1  # what nobody is told of
    code, found = facts(pool, saved(tmp_path / "five", 5), "base")
    first, second = found["parts"][0]["replicas"]
    assert code == 1
    assert first["tensors"] == {"equal": 13}
    assert second["tensors"] == {"equal": 12, "different": 1}
    assert first["digest"] != second["digest"]


def test_an_adapter_with_what_it_was_trained_on(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, tmp_path: Path
) -> None:
    publisher.push_base(Model(5))
    adapter, path = peft_of(Model(5), 1), tmp_path / "adapter"
    adapter.save_pretrained(path)
    publisher.push_adapter(adapter, "math", base="base@1")
    five = str(saved(tmp_path / "five", 5))
    code, found = facts(pool, path, "math", "--base", five)
    assert code == 0
    assert [part["version"] for part in found["parts"]] == ["math@1", "base@1"]
    assert "math@1 was trained on base@1, served over base@1" in found["remarks"]
    publisher.push_base(Model(6))
    code, found = facts(pool, path, "math", "--base", five)
    assert found["wrong"] == [f"base@2 is not what {five} holds"]
    assert code == 1
    code, found = facts(pool, path, "math")
    assert found["wrong"] == ["math@1 was trained on base@1, served over base@2"]
    assert code == 1
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 99}))
    code, found = facts(pool, path, "math@1", "--base", five)
    (setting,) = found["parts"][0]["differences"]
    assert setting["name"] == "adapter_config.json"
    assert "here 99" in setting["says"]


def test_what_cannot_be_compared(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, tmp_path: Path
) -> None:
    five = saved(tmp_path / "five", 5)
    code, found = facts(pool, five, "base")  # which doubles have no files of
    assert code == 1
    assert "NOT_RETAINED" in found["parts"][0]["replicas"][0]["error"]
    publisher.push_base(Model(5))
    code, found = facts(pool, five, "base@0")
    assert found["parts"][0]["replicas"][0]["error"] == "serves base@1"
    assert code == 1
    assert verify(pool, tmp_path / "nowhere", "base").exit_code == 2
    assert verify(pool, five, "math").exit_code == 2


def test_answers_of_another_model_are_told_apart(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_model("qwen2", tmp_path / "model")
    publisher.push_base(Model(5))
    _, found = facts(pool, path, "base")  # the double's tokens are beyond every vocabulary
    for replica in found["parts"][0]["replicas"]:
        assert replica["parity_error"].endswith("is beyond the 256 of the local model")
    monkeypatch.setattr(answers, "token", lambda base, adapter, index, position: position + 9)
    _, found = facts(pool, path, "base", "--prompt", "ab", "--prompt", "c")
    for replica in found["parts"][0]["replicas"]:
        assert replica["parity"]["num_tokens"] == 2 * 2 * 16
        assert replica["parity"]["largest"] > 1, "they say -0.5 of each"
        assert not replica["parity"]["ok"]
    ended = verify(pool, path, "base")
    assert "of 96 tokens at most" in ended.output
    assert f"differs: base@1 does not answer as {path} does" in ended.output
    assert ended.exit_code == 1
    _, found = facts(pool, path, "base", "--no-parity")
    assert not any("parity" in replica for replica in found["parts"][0]["replicas"])


def test_who_waits_reads_how_many_replicas_have_answered(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.push_base(Model(5))
    monkeypatch.setattr(progress.LineView, "first_seconds", 0.01)
    monkeypatch.setattr(progress.LineView, "every_seconds", 0.01)
    told, digests = threading.Event(), main._Pool.digests
    seen = main.ShownProgress.text

    def text(shown: progress.ShownProgress) -> str:
        if "digest base@1, 0 of 2 have answered" in (found := seen(shown)):
            told.set()
        return found

    def slowly(*given: Any) -> Any:
        assert told.wait(20)
        return digests(*given)

    monkeypatch.setattr(main.ShownProgress, "text", text)
    monkeypatch.setattr(main._Pool, "digests", slowly)
    ended = verify(pool, saved(tmp_path / "five", 5), "base")
    assert ended.exit_code == 0
    assert "verify: replicas digest base@1, 0 of 2 have answered (0 s)\n" in ended.stderr
    assert "verify:" not in ended.stdout
