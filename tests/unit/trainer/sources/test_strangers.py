"""What strangers wrote, or PEFT in a way that is not served: typed errors, in a bounded time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration.models import Model, peft_of
from trainer_side.params.choose import open_model
from trainer_side.params.merged import MergedParams
from trainer_side.pushes.content import FileAdapter
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources import adapter_source
from trainer_side.sources.adapter_source import adapter_of_model, config_in_names
from trainer_side.sources.file_source import CheckpointSource, adapter_of_dir, base_of_dir
from trainer_side.sources.source import CastRule, make_metas
from weft_rl.checkpoints.files import MAX_JSON_BYTES, weight_files
from weft_rl.contract.errors import (
    InvalidAdapterError,
    InvalidManifestError,
    InvalidRequestError,
    UnsupportedError,
)

_KINDS: dict[str, Any] = {
    "IA3": IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "VERA": VeraConfig(target_modules=["q_proj"], r=2),
    "LOHA": LoHaConfig(target_modules=["q_proj"], r=2),
    "OFT": OFTConfig(target_modules=["q_proj"], r=2, oft_block_size=0),
    "ADALORA": AdaLoraConfig(target_modules=["q_proj"], init_r=2, total_step=10),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("way", ["adapter", "merged", "directory"])
def test_other_kinds_than_lora_are_refused_and_sent_in_no_circle(
    kind: str, way: str, tmp_path: Path
) -> None:
    model: Any = get_peft_model(Model(), _KINDS[kind])  # type: ignore[arg-type]
    opened = open_model(model, OneRank(), "auto")
    model.save_pretrained(tmp_path)
    ways: dict[str, Callable[[], object]] = {
        "adapter": lambda: adapter_of_model(opened, "default", CastRule(), check_base=False),
        "merged": lambda: MergedParams(model, opened.params, "default"),
        "directory": lambda: adapter_of_dir(tmp_path, CastRule()),
    }
    with pytest.raises((InvalidAdapterError, UnsupportedError), match=kind) as caught:
        ways[way]()
    assert "merge_and_unload" in caught.value.message
    for other in ("push the adapter", "push it merged", "push_merged"):
        assert other not in caught.value.message


@pytest.mark.filterwarnings("ignore:`torch.jit")  # a package's of compressed-tensors
def test_an_adapter_may_be_over_a_layer_that_computes_with_quantised_weights() -> None:
    from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized

    model = peft_of(Model())
    layer = next(part for name, part in model.named_modules() if name.endswith("q_proj"))
    set_forward_quantized(layer.base_layer)
    opened = open_model(model, OneRank(), "auto")
    assert adapter_of_model(opened, "default", CastRule(), check_base=False).source.metas
    with pytest.raises(InvalidAdapterError, match="base_layer has a forward of its own"):
        MergedParams(model, opened.params, "default")  # of other weights than it computes with


@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_trainable_tokens_are_sent_in_no_circle(way: str) -> None:
    model = peft_of(Model(), trainable_token_indices={"embed": [1, 2]})
    opened = open_model(model, OneRank(), "auto")
    ways: dict[str, Callable[[], object]] = {
        "adapter": lambda: adapter_of_model(opened, "default", CastRule(), check_base=False),
        "merged": lambda: MergedParams(model, opened.params, "default"),
    }
    with pytest.raises((InvalidAdapterError, UnsupportedError), match="token") as caught:
        ways[way]()
    assert "merge_and_unload" in caught.value.message
    assert "push the adapter" not in caught.value.message


@pytest.mark.filterwarnings("ignore:.*lora_bias=True")
def test_a_lora_bias_without_a_bias_to_merge_it_into_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    peft_model: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], lora_bias=True))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="lora_bias"):
        MergedParams(peft_model, open_model(peft_model, OneRank(), "auto").params, "default")


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
def test_a_directory_with_a_head_is_what_the_live_model_is(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(
        LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **sizes)  # type: ignore[arg-type]
    )
    model: Any = get_peft_model(llama, config)  # type: ignore[arg-type]
    live = adapter_of_model(
        open_model(model, OneRank(), "auto"), "default", CastRule(), check_base=False
    )
    model.save_pretrained(tmp_path)
    assert any("base_layer" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    saved = adapter_of_dir(tmp_path, CastRule())
    assert {m.name for m in saved.source.metas} == {m.name for m in live.source.metas}


# -- files -------------------------------------------------------------------------------------

_HEADER = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
_BROKEN = {
    "empty": b"",
    "junk": os.urandom(200),
    "half": len(_HEADER).to_bytes(8, "little") + _HEADER + b"\0" * 7,
    "endless header": (2**62).to_bytes(8, "little") + b"{}",
    "no object": (2).to_bytes(8, "little") + b"[]",
}


@pytest.mark.parametrize("kind", _BROKEN)
def test_safetensors_files_that_are_none_are_typed_errors(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(_BROKEN[kind])
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors"):
        CheckpointSource(tmp_path, CastRule())
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(_BROKEN[kind])
    with pytest.raises(InvalidRequestError, match=r"adapter_model\.safetensors"):
        adapter_of_dir(adapter, CastRule())


_TEXTS = {
    "empty": b"", "junk": b"\xff\xfe\0", "half": b'{"r": ', "a list": b"[1]",
    "deep": b"[" * 100_000, "long": b" " * (MAX_JSON_BYTES + 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", _TEXTS)
def test_configs_that_are_none_are_typed_errors(kind: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "adapter_model.safetensors")
    for name in ("adapter_config.json", "config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(_TEXTS[kind])
    read: list[Callable[[], object]] = [
        lambda: FileAdapter(tmp_path, True).base,
        lambda: base_of_dir(tmp_path),
        lambda: adapter_of_dir(tmp_path, CastRule()),
        lambda: CheckpointSource(tmp_path, CastRule()),
        lambda: weight_files(tmp_path),
    ]
    for each in read:
        with pytest.raises(InvalidRequestError, match=r"json|config"):
            each()


def test_a_device_in_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").symlink_to("/dev/zero")
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    (tmp_path / "config.json").symlink_to("/dev/zero")
    for read in (
        lambda: base_of_dir(tmp_path),
        lambda: adapter_of_dir(tmp_path, CastRule()),
        lambda: CheckpointSource(tmp_path, CastRule()),
    ):
        with pytest.raises(InvalidRequestError):
            read()


@pytest.mark.parametrize("index", [{}, {"weight_map": 3}, {"weight_map": {"a": "../../etc/x"}}])
def test_an_index_that_names_no_files_beside_it_is_refused(index: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequestError, match="index"):
        weight_files(tmp_path)


def test_a_sparse_weight_is_refused_by_name() -> None:
    with pytest.raises(InvalidManifestError, match=r"'w' is torch\.sparse_coo"):
        make_metas({"w": torch.eye(4).to_sparse().to("meta")}, CastRule())


# -- regular expressions -----------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_a_pattern_that_takes_for_ever_is_given_up(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_source, "_MATCH_SECONDS", 0.5)
    pattern = r"([a-z]+)+!"
    config: dict[str, Any] = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"],
    }  # fmt: skip
    config[setting] = pattern if setting == "target_modules" else {pattern: 3}
    tensors = [f"base_model.model.{'a' * 60}.lora_{side}.weight" for side in "AB"]
    began = time.monotonic()
    with pytest.raises(InvalidAdapterError, match=setting):
        config_in_names(json.dumps(config), tensors, lambda: ["a" * 60])
    assert time.monotonic() - began < 3.0
