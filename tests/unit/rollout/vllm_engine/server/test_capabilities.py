"""Which tensors a model has, by its files or its configuration, and what adapters may name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout_side.vllm_engine.server.capabilities import (
    build_reference,
    draft_files,
    draft_method,
    lora_modules,
    served_dtypes,
    with_draft,
)
from weft_rl.contract.tensors import DataType, Reference, TensorMeta


def test_experts_are_not_named_as_modules() -> None:
    assert lora_modules(["q_proj", "experts", "experts.0.up_proj", "k_proj"]) == (
        "k_proj",
        "q_proj",
    )


@pytest.mark.parametrize(
    ("method", "declared"),
    [("ngram", ""), ("suffix", ""), ("eagle3", "eagle3"), ("mtp", "mtp"), ("new", "new")],
)
def test_a_draft_with_weights_is_declared(method: str, declared: str) -> None:
    assert draft_method(SimpleNamespace(method=method)) == declared
    assert draft_method(None) == ""


def _config(**settings: Any) -> Any:
    config = SimpleNamespace(architectures=["TinyForCausalLM"], **settings)
    config.get_text_config = lambda: config
    return config


def test_the_reference_is_read_from_headers(tmp_path: Path) -> None:
    save_file(
        {
            "b.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
            "a.weight": torch.zeros(4, dtype=torch.bfloat16),
            "router.bias": torch.zeros(4, dtype=torch.float32),
            "packed": torch.zeros(4, dtype=torch.int32),
            "lm_head.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
            "model.rotary_emb.inv_freq": torch.zeros(4),
        },
        tmp_path / "model.safetensors",
    )
    save_file({"other": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    reference = build_reference(tmp_path, _config(tie_word_embeddings=True), DataType.FLOAT16)
    assert reference.architecture == "TinyForCausalLM"
    assert {m.name: (m.dtype, m.shape) for m in reference.tensors} == {
        "a.weight": (DataType.FLOAT16, (4,)),
        "b.weight": (DataType.FLOAT16, (2, 3)),
        "packed": (DataType.INT32, (4,)),
        "router.bias": (DataType.FLOAT32, (4,)),
    }
    untied = build_reference(tmp_path, _config(tie_word_embeddings=False), DataType.FLOAT16)
    assert "lm_head.weight" in untied.by_name


def test_layers_for_drafts_are_no_part_of_the_reference(tmp_path: Path) -> None:
    names = ["model.layers.0.up.weight", "model.layers.1.up.weight", "mtp.fc.weight"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    config = _config(num_hidden_layers=1)
    reference = build_reference(tmp_path, config, DataType.FLOAT32)
    assert [meta.name for meta in reference.tensors] == names[:1]
    assert reference.draft_prefixes == ("model.layers.1.", "mtp.")


def _drafting(path: Path | str, method: str, served: Path, download_dir: str | None = None) -> Any:
    config = SimpleNamespace(model=str(path), revision=None, dtype=torch.float32)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, draft_model_config=config),
        model_config=SimpleNamespace(model=str(served)),
        load_config=SimpleNamespace(download_dir=download_dir),
    )


def test_a_draft_is_of_the_checkpoint_or_has_files_of_its_own(tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    for path, names in ((base, ["a.weight", "mtp.b", "mtp.a"]), (own, ["fc.weight", "t2d"])):
        path.mkdir()
        save_file({name: torch.zeros(1) for name in names}, path / "model.safetensors")
    reference = build_reference(base, _config(), DataType.FLOAT16)

    def files(path: Path | str, method: str, download_dir: str | None = None) -> list[str]:
        config = _drafting(path, method, base, download_dir)
        return [meta.name for meta in draft_files(config, base, reference)]

    assert files(base, "mtp") == ["mtp.a", "mtp.b"]
    assert files(own, "eagle3") == ["draft_model.fc.weight", "draft_model.t2d"]
    assert files(base, "draft_model")[0] == "draft_model.a.weight"
    assert files(own, "ngram") == files(tmp_path / "none", "eagle") == []
    without = SimpleNamespace(speculative_config=None)
    assert draft_files(without, base, reference) == ()
    repo = tmp_path / "models--nobody--drafts"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    own.rename(repo / "snapshots" / ("0" * 40))
    assert files("nobody/drafts", "eagle3") == []
    assert files("nobody/drafts", "eagle3", str(tmp_path)) == [
        "draft_model.fc.weight", "draft_model.t2d",
    ]  # fmt: skip


def test_a_draft_that_is_left_out_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Reference("Tiny", ())
    missing = _drafting(tmp_path / "none", "eagle", tmp_path)
    assert not draft_files(missing, tmp_path, reference)
    assert "no safetensors files on this machine" in caplog.text
    tensors = {f"{i:0500}": torch.zeros(1, dtype=torch.int8) for i in range(2200)}
    save_file(tensors, tmp_path / "model.safetensors")
    large = _drafting(tmp_path, "draft_model", tmp_path)
    assert not draft_files(large, tmp_path, reference)
    assert "names of more than 1048576 bytes" in caplog.text


def test_a_reference_has_of_a_draft_what_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    own = TensorMeta("a", DataType.FLOAT32, (1,))
    files = [TensorMeta(f"draft_model.{name}", DataType.FLOAT32, (1,)) for name in ("fc", "t2d")]
    reference = Reference("Tiny", (own,), draft_prefixes=("mtp.",))
    assert with_draft(reference, files, []) is reference
    drafted = with_draft(reference, files, ["draft_model.fc"])
    assert drafted.draft == (files[0],)
    assert drafted.draft_prefixes == ("mtp.", "draft_model.t2d")
    many = [TensorMeta(f"draft_model.{i}", DataType.FLOAT32, (1,)) for i in range(70)]
    assert with_draft(reference, many, ["draft_model.1"]) is reference
    assert "it does not load 69 tensors of its files ('draft_model.0' is one)" in caplog.text


def test_only_the_files_of_an_index_count(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({f"{name}.weight": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"x.weight": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    reference = build_reference(tmp_path, _config(), DataType.FLOAT32)
    assert [meta.name for meta in reference.tensors] == ["x.weight"]


def test_without_files_the_names_are_those_transformers_saves() -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        architectures=["MixtralForCausalLM"],
    )
    reference = build_reference(None, config, DataType.BFLOAT16)
    expert = reference.by_name["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    assert expert == TensorMeta(expert.name, DataType.BFLOAT16, (8, 16))


def test_without_files_buffers_that_transformers_saves_are_among_them() -> None:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        first_k_dense_replace=0,
        n_routed_experts=8,
        architectures=["DeepseekV3ForCausalLM"],
    )
    names = build_reference(None, config, DataType.BFLOAT16).by_name
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in names
    assert "model.rotary_emb.inv_freq" not in names


def test_floats_wider_than_most_keep_their_width() -> None:
    metas = [
        TensorMeta(f"{n}.weight", d, (1,))
        for n, d in (
            ("a", DataType.FLOAT32),
            ("b", DataType.FLOAT32),
            ("c", DataType.BFLOAT16),
            ("d", DataType.FLOAT8_E4M3FN),
            ("e", DataType.FLOAT64),
        )
    ]
    dtypes = [meta.dtype for meta in served_dtypes(metas, DataType.BFLOAT16)]
    assert dtypes == [
        DataType.BFLOAT16,
        DataType.BFLOAT16,
        DataType.BFLOAT16,
        DataType.FLOAT8_E4M3FN,
        DataType.FLOAT64,
    ]


@pytest.mark.parametrize(
    ("packed", "scale"),
    [
        (("weight", DataType.FLOAT8_E4M3FN), ("weight_scale", DataType.FLOAT32)),
        (("weight", DataType.FLOAT8_E4M3FN), ("weight_scale_inv", DataType.FLOAT32)),
        (("weight_packed", DataType.UINT8), ("weight_global_scale", DataType.FLOAT32)),
        (("qweight", DataType.INT32), ("scales", DataType.FLOAT16)),
    ],
)
def test_scales_of_quantised_weights_keep_their_own_dtype(
    packed: tuple[str, DataType], scale: tuple[str, DataType]
) -> None:
    """However many there are beside few weights that are not quantised."""
    metas = [TensorMeta("model.embed_tokens.weight", DataType.BFLOAT16, (64, 8))]
    for layer in range(4):
        module = f"model.layers.{layer}.mlp.up_proj"
        metas += [TensorMeta(f"{module}.{name}", dtype, (8, 8)) for name, dtype in (packed, scale)]
        metas.append(TensorMeta(f"model.layers.{layer}.attn.k_scale", DataType.FLOAT32, ()))
    served = {meta.name: meta.dtype for meta in served_dtypes(metas, DataType.BFLOAT16)}
    assert served == {meta.name: meta.dtype for meta in metas}


def test_the_usual_width_is_that_of_most_elements() -> None:
    metas = [TensorMeta(f"layers.{n}.gate.bias", DataType.FLOAT32, (4,)) for n in range(9)]
    metas.append(TensorMeta("embed.weight", DataType.BFLOAT16, (64, 8)))
    assert served_dtypes(metas, DataType.FLOAT16) == (
        *metas[:-1],
        TensorMeta("embed.weight", DataType.FLOAT16, (64, 8)),
    )
