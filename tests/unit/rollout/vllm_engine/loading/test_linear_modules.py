"""Names and full shapes of the served model's linear modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.loading.linear_modules import MemoryModule, ModuleTable, vllm_namer
from rollout_side.vllm_engine.server.architecture import ArchitectureModel
from rollout_side.vllm_engine.server.capabilities import build_reference, memory_modules
from tests.models import make_quantised
from tests.vision_models import make_vision_model
from weft_rl.contract.tensors import DataType, LinearModule, Reference, TensorMeta

F32 = DataType.FLOAT32


class Mapper:
    """vLLM's ``WeightsMapper`` of prefixes."""

    def __init__(self, **prefixes: str) -> None:
        self._prefixes = {f"{a.replace('_', '.')}.": b for a, b in prefixes.items()}

    def _map_name(self, key: str) -> str:
        for prefix, other in self._prefixes.items():
            if key.startswith(prefix):
                key = key.replace(prefix, other, 1)
        return key


def namer(mapper: object) -> Any:
    return vllm_namer(SimpleNamespace(hf_to_vllm_mapper=mapper))


def reference(names: Iterable[str]) -> Reference:
    return Reference("M", tuple(TensorMeta(f"{name}.weight", F32, (4, 4)) for name in names))


def test_a_module_has_the_names_of_files_of_memory_and_of_vllm() -> None:
    mapper = Mapper(**{"model.language": "language_model.model.", "model": "language_model.model."})
    names = ModuleTable(
        reference(["model.up", "visual.fc"]),
        [
            MemoryModule("model.language.up", "model.up", (4, 4)),
            MemoryModule("model.visual.fc", "visual.fc", (4, 4)),
        ],
        namer(mapper),
    )
    assert names.untold == (
        LinearModule("model.up", (4, 4), ("model.language.up", "language_model.model.up")),
        LinearModule("visual.fc", (4, 4), ("model.visual.fc",)),
    )
    # vLLM itself would look for what is not there.
    assert names.renames() == {"model.visual.fc": "visual.fc"}


def test_one_name_everywhere_is_told_by_the_tensors() -> None:
    names = ModuleTable(reference(["up"]), [MemoryModule("up", "up", (4, 4))], namer(None))
    assert names.untold == ()
    assert names.renames() == {}


def test_a_name_that_vllm_takes_for_another_modules_is_one_of_both() -> None:
    names = ModuleTable(
        reference(["text.up", "visual.up"]),
        [MemoryModule("inner.up", "text.up", (4, 4))],
        namer(Mapper(inner="visual.")),
    )
    found = Reference("M", reference(["text.up", "visual.up"]).tensors, names.untold)
    assert {m.name for m in found.modules_by_name["inner.up"]} == {"text.up", "visual.up"}


def test_the_loader_takes_names_that_vllms_mapper_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = SimpleNamespace(hf_to_vllm_mapper=Mapper(a="b."))
    monkeypatch.setattr(lora_hook, "_renames", {})
    mapper = lora_hook._name_mapper
    assert mapper(model) is model.hf_to_vllm_mapper
    lora_hook.set_renames({"memory.up": "b.up"})
    for of, name, renamed in (
        (model, "memory.up.lora_A.weight", "b.up.lora_A.weight"),
        (model, "a.up.lora_B.weight", "b.up.lora_B.weight"),
        (SimpleNamespace(), "a.b", "a.b"),
    ):
        assert mapper(of)._map_name(name) == renamed


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_packed_weights_have_their_full_shapes(method: str, tmp_path: Path) -> None:
    model = make_quantised(method, tmp_path / "model", tmp_path / "plain")
    config = transformers.AutoConfig.from_pretrained(model)
    served = build_reference(model, config, DataType.BFLOAT16)
    names = ModuleTable(served, memory_modules(config, served), namer(None))
    whole = Reference(served.architecture, served.tensors, names.untold)
    plain = build_reference(tmp_path / "plain", config, DataType.BFLOAT16)
    assert {m.name: m.shape for m in whole.modules} == {m.name: m.shape for m in plain.modules}
    assert set(whole.quantised_modules) == {m.name for m in names.untold}
    assert len(names.untold) == 14


def test_packed_experts_have_their_full_shapes() -> None:
    """In memory they are parts of one tensor."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=2,
        architectures=["Qwen3MoeForCausalLM"],
    )
    expert = "model.layers.0.mlp.experts.1.down_proj"
    packed = Reference("M", (TensorMeta(f"{expert}.qweight", DataType.INT32, (8, 2)),))
    names = ModuleTable(packed, memory_modules(config, packed), namer(None))
    assert names.untold == (LinearModule(expert, (16, 8)),)
    plain = [
        m.name for m in ArchitectureModel(config).linear_modules(build_reference(None, config, F32))
    ]
    assert not any(".experts." in name for name in plain)


def test_memorys_names_are_those_of_transformers_own_model(tmp_path: Path) -> None:
    model = make_vision_model("qwen2_5_vl", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(model)
    served = build_reference(model, config, F32)
    found = {m.name: m.saved_name for m in memory_modules(config, served)}
    layer = "layers.0.mlp.up_proj"
    assert found[f"model.language_model.{layer}"] == f"model.{layer}"
    assert f"model.{layer}.weight" in served.by_name


def test_an_encoders_names_are_those_of_the_files_that_people_have(tmp_path: Path) -> None:
    """transformers saves them without one component."""
    model = make_vision_model("llava", tmp_path / "model")
    served = build_reference(model, transformers.AutoConfig.from_pretrained(model), F32)
    found = memory_modules(transformers.AutoConfig.from_pretrained(model), served)
    table = ModuleTable(served, found, namer(None))
    (module,) = [
        m for m in table.untold if m.name.endswith("vision_model.encoder.layers.0.mlp.fc1")
    ]
    assert module.names == (
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
        "model.vision_tower.encoder.layers.0.mlp.fc1",
    )


def test_an_architecture_that_transformers_does_not_know_has_the_names_of_files() -> None:
    unknown = SimpleNamespace(architectures=["NobodyForCausalLM"])
    assert memory_modules(unknown, reference(["up"])) == []
