"""Which modules of a base vLLM applies a LoRA to, without vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.worker.state import lora_modules
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

TEXT = ("q_proj", "k_proj", "v_proj", "o_proj")
NAMES = (
    *(f"model.language.layers.{i}.{name}" for i in range(2) for name in TEXT),
    *(f"model.visual.blocks.{i}.{name}" for i in range(2) for name in ("q_proj", "fc1", "o_proj")),
    "model.language.layers.0.mlp.experts.0.q_proj",
    "model.merger.o_proj",
    "lm_head",
)


def adapters(**changes: Any) -> Any:
    """As vLLM's manager of a model whose language part alone is wrapped."""
    layers = [f"language_model.layers.{i}" for i in range(2)]
    wrapped = [f"{layer}.{name}" for layer in layers for name in ("qkv_proj", "o_proj")]
    made = {
        "model": SimpleNamespace(),
        "modules": dict.fromkeys(wrapped),
        "packed_modules": {
            f"{layer}.qkv_proj": [f"{layer}.{name}" for name in TEXT[:3]] for layer in layers
        },
        "supported_lora_modules": ["qkv_proj", "o_proj", "fc1", "experts"],
        "packed_modules_mapping": {"qkv_proj": list(TEXT[:3])},
    }
    return SimpleNamespace(**made, **changes)


@pytest.fixture(autouse=True)
def _parse(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(name: str, mapper: object) -> tuple[str, bool]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        return module.replace("model.language.", "language_model."), True

    utils = SimpleNamespace(parse_fine_tuned_lora_name=parse)
    monkeypatch.setitem(sys.modules, "vllm.lora.utils", utils)


def reference() -> Reference:
    metas = [TensorMeta(f"{name}.weight", DataType.FLOAT32, (4, 4)) for name in NAMES]
    return Reference("M", (*metas, TensorMeta("norm.weight", DataType.FLOAT32, (4,))))


def test_an_encoder_that_is_not_wrapped_is_named_by_what_its_modules_begin_with() -> None:
    modules, unapplied = lora_modules(adapters(), reference())
    assert unapplied == ["model.merger", "model.visual"]
    # "fc1" is wrapped nowhere, and so is no name that can carry a LoRA.
    assert modules == {*TEXT, "experts"}


def test_an_encoder_whose_modules_have_names_of_their_own_is_named_too() -> None:
    """As Qwen3-VL's; one of such a name in each layer of the language model is not."""
    names = ["visual.blocks.0.fc1", "model.language.layers.0.fc1", "model.language.layers.0.o_proj"]
    metas = tuple(TensorMeta(f"{name}.weight", DataType.FLOAT32, (4, 4)) for name in names)
    modules, unapplied = lora_modules(adapters(), Reference("M", metas))
    assert unapplied == ["visual"]
    assert "fc1" not in modules


def test_a_model_that_is_wrapped_whole_has_none_of_these() -> None:
    wrapped = adapters()
    for name in NAMES:
        if "visual" in name or "merger" in name:
            wrapped.modules[name] = None
    assert lora_modules(wrapped, reference()) == ({*TEXT, "fc1", "experts"}, [])


def test_a_layer_that_is_left_out() -> None:
    """By ``--lora-target-modules``, or one that a rank does not have."""
    some = adapters()
    del some.modules["language_model.layers.1.o_proj"]
    unapplied = lora_modules(some, reference())[1]
    assert unapplied == ["model.language.layers.1.o_proj", "model.merger", "model.visual"]


def test_adapters_of_pooling_models_may_do_without_the_prefix() -> None:
    pooling = adapters(is_pooling_model=True)
    pooling.modules = {"model.dense": None}
    assert {"model.dense", "dense"} <= lora_hook.applied_modules(pooling)


@pytest.mark.parametrize(
    ("names", "others", "found"),
    [
        (["a.b.c", "a.b.d"], ["x.y"], ["a"]),
        (["a.b.c", "a.b.d"], ["a.c.c"], ["a.b"]),
        (["a.b1.c"], ["a.b.c"], ["a.b1"]),
        (["a.b"], ["a.b.c"], ["a.b"]),
        ([], ["a"], []),
    ],
)
def test_prefixes_are_of_whole_components(
    names: list[str], others: list[str], found: list[str]
) -> None:
    assert lora_hook.shortest_prefixes(names, others) == found
