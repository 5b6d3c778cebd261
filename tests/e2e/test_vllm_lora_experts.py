"""LoRA of experts, as vLLM packs it; its layers for them need a GPU (tests/gpu/test_models.py)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import AdapterEntry, StagedVersion
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.loading.lora_copy_plan import AdapterLoader
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta

weights: Any = pytest.importorskip("vllm.lora.lora_weights")

# vLLM's and torch's own, at import
pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS, RANK, HIDDEN, INNER = 3, 2, 6, 4
LAYER = "model.layers.0.mlp.experts"
MODULES = [f"{LAYER}.{e}.{n}_proj" for e in range(EXPERTS) for n in ("gate", "down", "up")]


def packed(loras: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pack a layer's experts as vLLM's manager does for its ``set_lora``."""
    lora = SimpleNamespace(loras=loras)
    adapters = SimpleNamespace(packed_modules={LAYER: MODULES})
    lora_hook._prepare_experts(lora, adapters)
    assert all(lora.loras[name].lora_alpha == lora.loras[name].rank for name in MODULES)
    found = weights.PackedLoRALayerWeights.pack_moe([lora.loras[name] for name in MODULES], LAYER)
    found.optimize()
    return found.lora_a, found.lora_b


@pytest.mark.parametrize("down", [0.5, 1.0])
def test_experts_at_once_are_packed_as_one_by_one(down: float) -> None:
    """With a scaling for each kind of projection, which rsLoRA and patterns may give; vLLM before
    0.32 takes alpha / rank."""
    a_up, b_up = torch.randn(EXPERTS, RANK, HIDDEN), torch.randn(EXPERTS, 2 * INNER, RANK)
    a_down, b_down = torch.randn(EXPERTS, RANK, INNER), torch.randn(EXPERTS, HIDDEN, RANK)
    scalings = {"gate": 3.0, "up": 3.0, "down": down}
    one_by_one = {}
    for expert in range(EXPERTS):
        for name, a, b in (
            ("gate", a_up, b_up[:, :INNER]),
            ("up", a_up, b_up[:, INNER:]),
            ("down", a_down, b_down),
        ):
            module = f"{LAYER}.{expert}.{name}_proj"
            one_by_one[module] = weights.LoRALayerWeights(
                module, RANK, 7, a[expert].clone(), b[expert].clone(), scaling=scalings[name]
            )
    at_once = {
        name: weights.LoRALayerWeights(
            name, RANK, 7, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), scaling=scaling
        )
        for name, a, b, scaling in (
            (f"{LAYER}.base_layer", a_up, b_up, 3.0),
            (LAYER, a_down, b_down, down),
        )
    }
    expected = (
        [a_up, a_down, a_up],
        [b_up[:, :INNER] * 3, b_down * down, b_up[:, INNER:] * 3],
    )
    for loras in (one_by_one, at_once):
        for found, right in zip(packed(loras), expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


SLOTS, MAX_RANK, SCALING = 2, 4, 3.0


def layer_of_experts() -> Any:
    """vLLM's layer with the tensors that take an adapter, without its base layer and kernels."""
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA

    class Layer(FusedMoEWithLoRA):  # type: ignore[misc]
        use_ep = False
        intermediate_size_per_partition = INNER
        hidden_size = HIDDEN

    def slots(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(SLOTS, EXPERTS, rows, columns, dtype=torch.bfloat16)

    layer = Layer.__new__(Layer)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.tp_rank, layer._w13_slices, layer.fully_sharded = 1, 0, 2, False
    layer.enable_moe_shared_loras = False
    layer.adapter_enabled = torch.zeros(SLOTS + 1, dtype=torch.int)
    layer.w13_lora_a_stacked = (slots(MAX_RANK, HIDDEN), slots(MAX_RANK, HIDDEN))
    layer.w13_lora_b_stacked = (slots(INNER, MAX_RANK), slots(INNER, MAX_RANK))
    layer.w2_lora_a_stacked = (slots(MAX_RANK, INNER),)
    layer.w2_lora_b_stacked = (slots(HIDDEN, MAX_RANK),)
    whole = (*layer.w13_lora_a_stacked, *layer.w2_lora_a_stacked)
    layer.lora_a_stacked = [expert for stacked in whole for slot in stacked for expert in slot]
    return layer


class Engine:
    """A worker with vLLM's manager of adapters, over one layer of experts."""

    def __init__(self) -> None:
        from vllm.lora import model_manager

        made = model_manager.LRUCacheLoRAModelManager
        manager = made.__new__(made)
        self.layer = layer_of_experts()
        cache = model_manager.AdapterLRUCache
        manager._registered_adapters = cache(8, manager.deactivate_adapter)
        manager._active_adapters = cache(SLOTS, manager._deactivate_adapter)
        manager.lora_index_to_id = [None] * SLOTS
        manager.lora_config = SimpleNamespace(max_loras=SLOTS, max_cpu_loras=8)
        manager.modules, manager.packed_modules = {LAYER: self.layer}, {LAYER: MODULES}
        manager.is_pooling_model = manager._is_non_gated_moe = False
        manager._enable_moe_shared_loras = manager._enable_mixed_moe_lora_format = False
        manager._last_mapping = manager._last_slot_layout = None
        self.adapters = manager
        self.lora_manager = SimpleNamespace(_adapter_manager=manager, engine=self)
        self.model_runner = SimpleNamespace(lora_manager=self.lora_manager)
        self.entries: dict[str, AdapterEntry] = {}
        self.num_made = 0

    def add_lora(self, request: Any) -> None:
        """Add and activate an adapter, as vLLM's worker does."""
        if request.lora_int_id not in self.adapters._registered_adapters:
            ready = lora_hook._instead.get(request.lora_path)
            self.adapters.add_adapter(ready or self.make(request))
        self.adapters.activate_adapter(request.lora_int_id)

    def make(self, request: Any) -> Any:
        """Make vLLM's model of an adapter from its bytes, as the hook does."""
        from vllm.lora.lora_model import LoRAModel

        self.num_made += 1
        entry, sides = self.entries[request.lora_path], {}
        for name, tensor in entry.staged.tensors(entry.staged.own_bytes()):
            module, _, side = name.rpartition(".")
            sides.setdefault(module, {})[side] = tensor
        loras = {
            module: weights.LoRALayerWeights(
                module, RANK, RANK * SCALING, own["A"], own["B"], scaling=SCALING
            )
            for module, own in sides.items()
        }
        lora = LoRAModel(request.lora_int_id, RANK, loras)
        lora_hook._prepare_experts(lora, self.adapters)
        return lora

    def slots(self) -> list[torch.Tensor]:
        """All that an adapter sets."""
        layer = self.layer
        return [
            *layer.w13_lora_a_stacked, *layer.w13_lora_b_stacked,
            *layer.w2_lora_a_stacked, *layer.w2_lora_b_stacked, layer.adapter_enabled,
        ]  # fmt: skip


def adapter(number: int, *, at_once: bool) -> AdapterEntry:
    """The same values of one number, however they are given."""
    torch.manual_seed(number)
    a_up, b_up = torch.randn(EXPERTS, RANK, HIDDEN), torch.randn(EXPERTS, 2 * INNER, RANK)
    a_down, b_down = torch.randn(EXPERTS, RANK, INNER), torch.randn(EXPERTS, HIDDEN, RANK)
    values: dict[str, torch.Tensor] = {}
    if at_once:
        for module, a, b in ((f"{LAYER}.base_layer", a_up, b_up), (LAYER, a_down, b_down)):
            values[f"{module}.A"] = a.flatten(0, 1)
            values[f"{module}.B"] = b.permute(1, 2, 0).flatten(1)
    else:
        for expert in range(EXPERTS):
            for name, a, b in (
                ("gate", a_up, b_up[:, :INNER]),
                ("up", a_up, b_up[:, INNER:]),
                ("down", a_down, b_down),
            ):
                values[f"{LAYER}.{expert}.{name}_proj.A"] = a[expert]
                values[f"{LAYER}.{expert}.{name}_proj.B"] = b[expert]
    metas = [TensorMeta(n, DataType.BFLOAT16, tuple(v.shape)) for n, v in values.items()]
    manifest = plan_buckets(metas, 2**20)
    segment = HostSegment.allocate(manifest.wire_bytes)
    staged = StagedVersion(f"t{number}", PolicyVersion("math", number), manifest, segment, b"")
    for name, tensor in staged.tensors():
        tensor.copy_(values[name])
    return AdapterEntry(json.dumps({"r": RANK, "lora_alpha": RANK * SCALING}), staged)


@pytest.mark.parametrize("at_once", [False, True])
def test_slots_of_experts_are_filled_by_copies(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what vLLM's own way puts there, however the experts are given."""
    monkeypatch.setattr(
        lora_hook, "load_from_store", lambda manager, request: manager.engine.make(request)
    )
    ours, theirs, loader = Engine(), Engine(), AdapterLoader()
    for number in (1, 2, 3, 4):
        for engine in (ours, theirs):
            entry = adapter(number, at_once=at_once and engine is ours)
            path = f"weft://math@{number}"
            engine.entries[path] = entry
            request = SimpleNamespace(lora_path=path, lora_int_id=number)
            if engine is ours:
                loader.load(engine, entry, request)
            else:
                engine.add_lora(request)
        pairs = zip(ours.slots(), theirs.slots(), strict=True)
        assert all(torch.equal(own, right) for own, right in pairs), number
        assert ours.layer.adapter_enabled.sum() == min(number, SLOTS)
    assert (ours.num_made, theirs.num_made) == (1, 4)  # the first one is learnt from
