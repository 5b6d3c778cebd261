"""What lies here is read as it would be pushed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer_side.sources.file_source import CheckpointSource
from trainer_side.sources.source import CastRule
from weft_rl.cli.verify.tensors import (
    base_dir_of,
    differing_settings,
    read_adapter,
    read_checkpoint,
)
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.tensors import DataType
from weft_rl.transport.digests.wsum64 import tensor_digest

TENSORS = {"a": torch.linspace(-3, 3, 77).view(7, 11), "lm_head.weight": torch.ones(2, 2)}
CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
_Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(path: Path, **config: object) -> Path:
    path.mkdir()
    save_file(TENSORS, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def adapter(path: Path, **config: object) -> Path:
    path.mkdir()
    save_file({f"{_Q}.lora_A.weight": torch.ones(8, 4)}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def test_a_cast_is_that_of_a_push(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    local = read_checkpoint(path)
    assert {t.name: (t.dtype, t.shape) for t in local.tensors} == {
        "a": ("F32", (7, 11)),
        "lm_head.weight": ("F32", (2, 2)),
    }
    source = CheckpointSource(path, CastRule(served=DataType.BFLOAT16))
    view = torch.empty(7, 11, dtype=torch.bfloat16)
    source.read(0, 1, [view])
    pushed = tensor_digest(view.view(-1).view(torch.uint8))
    assert local.cast_digest("a", DataType.BFLOAT16) == pushed
    assert local.cast_digest("a", DataType.FLOAT16) != pushed


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_a_copy_where_the_config_says_so(tmp_path: Path, tied: bool) -> None:
    path = checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    assert read_checkpoint(path).tied == ({"lm_head.weight"} if tied else set())


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    assert read_checkpoint(path / "model.safetensors").tensors == read_checkpoint(path).tensors


def test_what_is_no_checkpoint_or_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"holds no \*.safetensors"):
        read_checkpoint(tmp_path)
    with pytest.raises(InvalidRequestError, match="is a PEFT adapter"):
        read_checkpoint(adapter(tmp_path / "adapter"))
    with pytest.raises(InvalidRequestError, match="say --policy base"):
        read_adapter(checkpoint(tmp_path / "model"))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="holds no adapter_model"):
        read_adapter(tmp_path / "adapter")


def test_the_base_is_where_the_config_says(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "model")
    named = adapter(tmp_path / "named", base_model_name_or_path=str(base))
    assert base_dir_of(named) == (base, str(base))
    away = adapter(tmp_path / "away", base_model_name_or_path=str(tmp_path / "gone"))
    assert base_dir_of(away) == (None, str(tmp_path / "gone"))
    assert base_dir_of(adapter(tmp_path / "nameless")) == (None, "")


@pytest.mark.parametrize(
    ("served", "differs"),
    [
        ({}, []),
        ({"target_modules": ["v_proj"], "lora_dropout": 0.1, "use_rslora": False}, []),
        ({"lora_alpha": 32}, ["lora_alpha is 32, here 16"]),
        ({"use_rslora": True}, ["use_rslora is True, here None"]),
        ({"alpha_pattern": {"q_proj": 1}}, ["alpha_pattern is {'q_proj': 1}, here None"]),
    ],
)
def test_settings_that_change_what_the_tensors_mean(
    tmp_path: Path, served: dict[str, object], differs: list[str]
) -> None:
    local = read_adapter(adapter(tmp_path / "adapter"))
    assert differing_settings(json.dumps({**CONFIG, **served}), local) == differs
