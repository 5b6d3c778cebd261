"""A replica learns at its start how its model is reloaded, and whether each parameter gets a value,
the same that a start gives it.

Models of a few tensors, over vLLM's own reload; real ones are in ``test_models.py``. One file: the
rehearsal and the proof are asked of the same toys, and a new toy must pass or fail both.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading import rehearsal, reload_proof
from rollout_side.vllm_engine.loading.drafted_model import DraftedModel
from rollout_side.vllm_engine.loading.layerwise import ReloadFacts, facts_of
from rollout_side.vllm_engine.loading.plan_proof import make_plan
from rollout_side.vllm_engine.loading.rehearsal import drafted_model, why_not_reloaded
from rollout_side.vllm_engine.loading.reload import reload_layers
from rollout_side.vllm_engine.loading.reload_proof import engine_identity
from tests.e2e.engine_process import LORA_ARGS, EngineProcess, run_child
from tests.e2e.logprobs import PROMPT
from tests.models import make_adapter, make_model
from weft_rl.contract.errors import LoadFailedError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

AttentionLayerBase = pytest.importorskip(
    "vllm.model_executor.layers.attention_layer_base"
).AttentionLayerBase
QuantizeMethodBase = pytest.importorskip(
    "vllm.model_executor.layers.quantization.base_config"
).QuantizeMethodBase

# vLLM's and torch's own, at import
pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            value = torch.arange(4, dtype=torch.float32)
            setattr(self, name, nn.Parameter(value, requires_grad=False))


def by_loader(parameter: Any, weight: torch.Tensor) -> None:
    """As vLLM's models do."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


def past_loader(parameter: Any, weight: torch.Tensor) -> None:
    """As gpt-oss does with its experts."""
    parameter.data.copy_(weight)


def past_loader_in_parts(parameter: Any, weight: torch.Tensor) -> None:
    """Writes go through views, as where several ranks hold parts."""
    parameter.data.zero_()
    parameter.view(2, 2)[0].copy_(weight[:2])
    parameter.narrow(0, 2, 2).copy_(weight[2:])


def overwriting(parameter: Any, weight: torch.Tensor) -> None:
    """Tensors are zeroed, as at ranks that are to add nothing."""
    past_loader(parameter, weight.clone())
    weight.zero_()


class Model(nn.Module):
    """Three layers and what is loaded into them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Layer("weight", "bias"), Layer("weight")
        self.scale = torch.ones(1)  # of no module's, and not a buffer
        self.load: Callable[[Any, torch.Tensor], None] = by_loader
        self.does: Callable[[Model], object] = lambda model: None
        self.unreported: frozenset[str] = frozenset()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            self.load(self.get_parameter(name), weight)
            loaded.add(name)
        self.does(self)
        return loaded - self.unreported


NAMES = ("up.weight", "up.bias", "down.weight")


def worker_of(
    model: nn.Module,
    quantization: str | None = None,
    load_format: str = "auto",
    device: str = "cpu",
    num_ranks: int = 1,
) -> Any:
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        model_config=SimpleNamespace(quantization=quantization, dtype=torch.float32),
        vllm_config=SimpleNamespace(
            load_config=SimpleNamespace(load_format=load_format),
            parallel_config=SimpleNamespace(world_size=num_ranks, data_parallel_size=1),
        ),
        device=torch.device(device),
    )


def rehearse(model: Model, *, quantization: str | None = None) -> str:
    metas = tuple(TensorMeta(name, DataType.FLOAT32, (4,)) for name in NAMES)
    return why_not_reloaded(worker_of(model, quantization), Reference("Model", metas))


@torch.no_grad()
def reload(model: Model) -> dict[str, torch.Tensor]:
    """Load other values; returns these by name."""
    tensors = {name: torch.rand(4) for name in NAMES}
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    reload_layers(worker_of(model), model, PolicyVersion("base", 1), given.items(), len(given))
    assert all(torch.equal(given[name], tensor) for name, tensor in tensors.items())
    return tensors


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    monkeypatch.setattr(bridges, "vllm_config_context", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(bridges, "model_files", lambda worker: [Path(__file__)])
    made = Model()
    record_metadata_for_reloading(made)
    return made


@pytest.mark.parametrize("stays", [False, True])
def test_what_is_held_as_float32_is_sent_so(
    model: Model, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router's bias, say: rounded, it would choose other experts than at the start."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model.up.weight.data = torch.ones(4).bfloat16()
    if stays:  # a reload leaves it where it is
        reload_meta = "vllm.model_executor.model_loader.reload.meta"
        monkeypatch.setattr(f"{reload_meta}.SKIP_TENSORS", {"weight"})
    else:
        model.down.weight.data = torch.ones(4).bfloat16()
    record_metadata_for_reloading(model)
    metas = tuple(TensorMeta(name, DataType.BFLOAT16, (4,)) for name in NAMES)
    reference = Reference("Model", metas)
    assert why_not_reloaded(worker_of(model), reference) == ""
    sent = reference.sent_as_float32(facts_of(model).held_as_float32)
    wide = {meta.name for meta in sent.tensors if meta.dtype is DataType.FLOAT32}
    assert wide == {"up.bias"} | ({"down.weight"} if stays else set())
    assert sent.fingerprint == reference.fingerprint


def test_a_parameter_that_was_made_something_else_is_named(model: Model) -> None:
    """MXFP4 experts for Triton's kernels become objects of another package."""
    del model.down.weight
    model.down.weight = SimpleNamespace()  # type: ignore[assignment]
    assert "down.weight is made a SimpleNamespace once it is loaded" in rehearse(model)
    assert isinstance(vars(model.down)["weight"], SimpleNamespace)


def derive(model: Model) -> None:
    """Nothing computes the parameter of a layer that loads weights anew."""
    model.down.register_parameter("W_UV", nn.Parameter(torch.ones(2), requires_grad=False))


class Attention(AttentionLayerBase, nn.Module):
    """Derives a parameter from those of another layer, as MLA does."""

    def __init__(self, source: Layer, *, derives: bool = True) -> None:
        super().__init__()
        self.source, self.derives, self.kv_cache = source, derives, None
        self.W_UV = nn.Parameter(source.weight.data * 2, requires_grad=False)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        if self.derives:
            self.W_UV.copy_(self.source.weight * 2)

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


def attend(model: Model, *, derives: bool = True) -> None:
    model.attn = Attention(model.down, derives=derives)


def write_to_attention(model: Model) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model.down.kv_cache = None
    record_metadata_for_reloading(model)
    model.load = past_loader


def write_twice(model: Model) -> None:
    """A write after its layer was built is lost."""
    model.load = lambda p, w: (past_loader(p, w), past_loader(p, w))


def grow_a_part(model: Model) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model.up.register_parameter("sinks", nn.Parameter(torch.ones(4), requires_grad=False))
    record_metadata_for_reloading(model)
    model.load_weights = lambda weights: {  # type: ignore[method-assign]
        *Model.load_weights(model, weights), "up.sinks",
    }  # fmt: skip


def fail(model: Model) -> None:
    raise KeyError("layers.0.mlp.experts")


CANNOT: dict[str, tuple[Callable[[Model], object], str]] = {
    "derives a parameter": (derive, "'down.W_UV' and 0 more get no value"),
    "does not derive a parameter again": (
        lambda m: attend(m, derives=False), "'attn.W_UV' and 0 more get no value"
    ),
    "writes to its attention itself": (
        write_to_attention, "'weight' of a Layer is loaded past its weight loader"
    ),
    "writes to a layer that is whole": (
        write_twice, "'weight' of a Layer is written to once its layer has all its weights"
    ),
    "has a part that nothing comes for": (grow_a_part, "'up.sinks' and 0 more"),
    "does not report a parameter": (
        lambda m: setattr(m, "unreported", frozenset({"down.weight"})), "'down.weight'"
    ),
    "fails": (lambda m: setattr(m, "does", fail), "KeyError: 'layers.0.mlp.experts'"),
    "ends a start by more than layers do": (
        lambda m: setattr(m, "process_weights_after_loading", lambda: None),
        "it does not call the model's own process_weights_after_loading",
    ),
}  # fmt: skip


DIRECTLY: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "whole": past_loader,
    "in parts": past_loader_in_parts,
    "one layer alone": lambda p, w: (past_loader if hasattr(p, "is_down") else by_loader)(p, w),
    "overwriting": overwriting,
}


def state(model: Model) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers(), ("scale", model.scale)]
    return [
        *((name, id(t), t.data_ptr(), t.tolist(), sorted(vars(t))) for name, t in tensors),
        *((name, sorted(vars(m)), sorted(m._parameters)) for name, m in model.named_modules()),
    ]


def test_a_model_that_can_be_reloaded_is_left_as_it_is(model: Model) -> None:
    before = state(model)
    for _ in range(2):  # and so it is rehearsed again
        assert rehearse(model) == ""
        assert state(model) == before


@pytest.mark.parametrize("kind", CANNOT)
def test_what_a_reload_would_leave_without_a_value(model: Model, kind: str) -> None:
    change, text = CANNOT[kind]
    change(model)
    before = state(model)
    why = rehearse(model)
    assert why.startswith("vLLM's reload of Model would leave mixed weights: ")
    assert text in why
    assert state(model) == before


@pytest.mark.parametrize(
    "does",
    [
        lambda m: m.scale.fill_(0),
        lambda m: m.up.bias.zero_(),
        lambda m: setattr(m, "scale", torch.zeros(1)),
        lambda m: setattr(m.up, "noted", True),
        lambda m: setattr(m.up.bias, "data", torch.zeros(4)),
        lambda m: m.down.register_buffer("seen", torch.zeros(1)),
        lambda m: m.add_module("more", Layer("weight")),
        lambda m: torch.add(m.scale, 1, out=m.scale),
    ],
)
def test_what_loading_changes_by_the_way_is_held_back(
    model: Model, does: Callable[[Model], object]
) -> None:
    model.does = does
    before = state(model)
    assert rehearse(model) == ""
    assert state(model) == before


def test_quantised_models_report_what_they_like(model: Model) -> None:
    derive(model)
    assert rehearse(model, quantization="fp8") == ""


@pytest.mark.parametrize("how", DIRECTLY)
def test_what_is_written_past_the_loaders_is_loaded(model: Model, how: str) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model.down.weight.is_down = True
    record_metadata_for_reloading(model)
    model.load = DIRECTLY[how]
    before = state(model)
    for _ in range(2):
        assert rehearse(model) == ""
        assert state(model) == before
        assert facts_of(model).writes_directly
        for name, tensor in reload(model).items():
            assert torch.equal(model.get_parameter(name), tensor)
        places = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
        assert [x[:3] for x in before[: len(places)]] == places
        before = state(model)


def test_a_model_that_was_not_rehearsed_is_watched_too(model: Model) -> None:
    model.load = past_loader
    for name, tensor in reload(model).items():
        assert torch.equal(model.get_parameter(name), tensor)


def test_one_that_uses_its_loaders_alone_is_not_watched(model: Model) -> None:
    assert rehearse(model) == ""
    assert facts_of(model) == ReloadFacts(writes_directly=False)
    model.load = past_loader  # which it did not do then
    with pytest.raises(LoadFailedError, match="got no weights"):
        reload(model)


def test_what_attention_derives_is_derived_again(model: Model) -> None:
    attend(model)
    before = state(model)
    assert rehearse(model) == ""
    assert state(model) == before
    assert facts_of(model).derived == {"attn.W_UV"}
    tensors = reload(model)
    assert torch.equal(model.attn.W_UV, tensors["down.weight"] * 2)


def test_layers_that_lora_wraps_are_loaded_by_their_own_names(model: Model) -> None:
    """The loader looks them up by name, as DeepSeek's does."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapper = BaseLayerWithLoRA()
    wrapper.base_layer = model.down
    model.down = wrapper
    before = state(model)
    assert rehearse(model) == ""
    assert state(model) == before
    tensors = reload(model)
    assert model.down is wrapper
    assert torch.equal(wrapper.base_layer.weight, tensors["down.weight"])


def test_experts_that_lora_wraps_are_loaded_by_their_own_names(model: Model) -> None:
    """vLLM's LoRA sets a prefix, by which its experts' loader changes the names that it knows."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapper = BaseLayerWithLoRA()
    wrapper.base_layer = experts = model.down
    model.down = wrapper
    experts.lora_base_layer_prefix = "base_layer."

    def load(parameter: Any, weight: torch.Tensor) -> None:
        if parameter is not experts.weight or not experts.lora_base_layer_prefix:
            by_loader(parameter, weight)

    model.load = load
    assert rehearse(model) == ""
    tensors = reload(model)
    assert torch.equal(experts.weight, tensors["down.weight"])
    assert experts.lora_base_layer_prefix == "base_layer."


def test_a_weight_that_was_released_after_its_use_is_loaded(model: Model) -> None:
    """As MLA's AMX backend does with ``kv_b_proj``."""
    model.down._cpu_skip_gemm_dispatch = True
    model.down.weight.data = torch.empty(0)
    assert rehearse(model) == ""
    assert not model.down.weight.numel()
    assert torch.equal(model.down.weight, reload(model)["down.weight"])


@pytest.mark.parametrize("large_bytes", [1, 2**16])
def test_loaders_may_look_at_values(
    model: Model, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_LARGE_BYTES", large_bytes)
    seen: list[str] = []

    def look(parameter: Any, weight: torch.Tensor) -> None:
        seen.append(weight.device.type)
        assert not weight.sum().item()
        past_loader(parameter, weight)

    model.load = look
    before = state(model)
    assert rehearse(model) == ""
    assert state(model) == before
    assert seen == ["meta"] * (large_bytes == 1) + ["cpu"] * 3


def test_a_model_may_call_at_the_end_of_loading_what_a_start_calls(model: Model) -> None:
    model.process_weights_after_loading = lambda: None
    model.does = lambda m: m.process_weights_after_loading()  # type: ignore[operator]
    assert rehearse(model) == ""


class Drafter(Model):
    """Drafts with the served model's last layer, and one of its own."""

    def __init__(self, served: Model) -> None:
        nn.Module.__init__(self)
        self.fc, self.down = Layer("weight"), served.down
        self.table = torch.ones(4)
        self.does = lambda model: None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        found = {name: weight for name, weight in weights if name != "t2d"}  # all at once
        for name, weight in found.items():
            by_loader(self.get_parameter(name), weight)
        self.does(self)
        return set(found)


DRAFT = tuple(
    TensorMeta(f"draft_model.{name}", DataType.FLOAT32, (4,))
    for name in ("down.weight", "fc.weight", "t2d")
)


def drafting(
    model: Model, *names: str, does: Callable[[Any], object] = id
) -> tuple[Any, DraftedModel | None]:
    """A worker whose model is drafted for, and what it learns of a draft with such files."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    worker, drafter = worker_of(model), Drafter(model)
    drafter.does = does
    record_metadata_for_reloading(drafter)
    worker.model_runner.get_draft_model = lambda: drafter
    metas = tuple(TensorMeta(name, DataType.FLOAT32, (4,)) for name in NAMES)
    files = [meta for meta in DRAFT if meta.name.removeprefix("draft_model.") in names]
    return worker, drafted_model(worker, Reference("Model", metas), files)


def test_a_draft_takes_what_it_loads_into_layers_of_its_own(model: Model) -> None:
    before = state(model)
    _, found = drafting(model, "down.weight", "fc.weight", "t2d")
    assert found is not None
    assert list(found.reference.draft_by_name) == ["draft_model.fc.weight"]
    assert state(model) == before
    assert found.draft.fc.weight.tolist() == [0, 1, 2, 3]


@torch.no_grad()
def test_a_draft_is_loaded_with_its_model(model: Model) -> None:
    worker, found = drafting(model, "fc.weight")
    assert found is not None
    place = found.draft.fc.weight.data_ptr()
    tensors = {name: torch.rand(4) for name in (*NAMES, "draft_model.fc.weight")}
    reload_layers(worker, found, PolicyVersion("base", 1), tensors.items(), len(tensors))
    for name in NAMES:
        assert torch.equal(model.get_parameter(name), tensors[name])
    assert torch.equal(found.draft.fc.weight, tensors["draft_model.fc.weight"])
    assert found.draft.fc.weight.data_ptr() == place
    assert found.draft.down is model.down


def compute_anew(model: Any) -> None:
    model.fused = [model.fc.weight.data * 2]


def write_to_an_attribute(model: Any) -> None:
    model.table.copy_(torch.zeros(4))


@pytest.mark.parametrize("does", [compute_anew, write_to_an_attribute])
def test_a_draft_that_computes_from_its_weights_stays(
    model: Model, does: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = drafting(model, "fc.weight", does=does)[1]
    assert found is None
    assert "is computed from its weights while they are loaded" in caplog.text


def test_what_a_served_model_computes_no_copies_replace(model: Model) -> None:
    model.does = lambda m: m.scale.fill_(2.0)
    assert rehearse(model) == ""
    assert facts_of(model).computed == ("scale",)
    manifest = plan_buckets([TensorMeta(name, DataType.FLOAT32, (4,)) for name in NAMES])
    found = make_plan(model, manifest, torch.empty(0))
    assert found == (None, "loading computes 'scale', which is no parameter")


def test_a_draft_that_cannot_be_loaded_stays(model: Model) -> None:
    assert drafting(model)[1] is None
    assert drafting(model, "down.weight")[1] is None  # its own layer gets nothing
    worker, _ = drafting(model, "fc.weight")
    worker.model_runner.drafter = SimpleNamespace(parallel_drafting_hidden_state_tensor=1)
    reference = Reference("Model", tuple(TensorMeta(n, DataType.FLOAT32, (4,)) for n in NAMES))
    assert drafted_model(worker, reference, DRAFT[1:2]) is None


# -- the same files again, value by value


class Method(QuantizeMethodBase):
    """Keeps weights doubled, and counts; ``process`` may do otherwise."""

    def __init__(self) -> None:
        self.num_processed = 0
        self.process: Callable[[Any], object] = lambda layer: layer.weight.data.mul_(2)

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.num_processed += 1
        self.process(layer)


class Started(nn.Module):
    """Two lists of like layers, an embedding and a head; started from ``FILES``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Layer("weight"), Layer("weight", "bias")
        self.layers = nn.ModuleList(Layer("weight", "bias") for _ in range(4))
        self.layers[3] = Layer("weight")  # of another kind
        for layer in self.layers:
            layer.quant_method = Method()
        self.given: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.given.append(name)
            by_loader(self.get_parameter(name), weight)


FILES = {name: torch.rand(4) for name, _ in Started().named_parameters()}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return start(monkeypatch)


@torch.no_grad()
def start(monkeypatch: pytest.MonkeyPatch, change: Callable[[Started], object] = id) -> Started:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    monkeypatch.setattr(bridges, "vllm_config_context", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(bridges, "model_files", lambda worker: [Path(__file__)])
    monkeypatch.setattr(bridges, "checkpoint_tensors", lambda worker, **how: iter(FILES.items()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**40))
    made = Started()
    change(made)
    record_metadata_for_reloading(made)
    made.load_weights(FILES.items())
    for layer in made.layers:
        layer.quant_method.process_weights_after_loading(layer)
    made.given.clear()
    return made


def compare(model: nn.Module, worker: Any = None) -> str | None:
    metas = tuple(TensorMeta(name, DataType.FLOAT32, (4,)) for name in FILES)
    return reload_proof.why_not_repeated(worker or worker_of(model), Reference("Started", metas))


def all_values(model: nn.Module) -> list[Any]:
    return [
        *((name, id(t), t.data_ptr(), t.tolist(), sorted(vars(t)))
          for name, t in model.named_parameters()),
        *((name, sorted(vars(m))) for name, m in model.named_modules()),
        *(sorted(vars(m.quant_method).items(), key=str)
          for m in model.modules() if hasattr(m, "quant_method")),
    ]  # fmt: skip


def test_one_layer_of_each_kind_is_loaded_again_beside_the_model(started: Started) -> None:
    before = all_values(started)
    for _ in range(2):
        assert compare(started) == ""
        assert all_values(started) == before
    once = {name for name in FILES if not name.startswith(("layers.1.", "layers.2."))}
    assert sorted(started.given) == sorted([*once, *once])


def add_up(layer: Any) -> None:
    layer.quant_method.sum = getattr(layer.quant_method, "sum", 0) + layer.weight.data
    layer.weight.data.copy_(layer.quant_method.sum)


def of_every_layer(process: Callable[[Any], object]) -> Callable[[Started], object]:
    return lambda m: [setattr(layer.quant_method, "process", process) for layer in m.layers]


def share_a_parameter(model: Started) -> None:
    """As LFM2's head and embedding do, whatever the files hold."""
    model.head.weight = model.embed.weight


NOT_REPEATED: dict[str, tuple[Callable[[Started], object], str]] = {
    "processing that depends on what was before": (
        of_every_layer(add_up), "'layers.0.weight' and 3 more"
    ),
    "processing that makes another shape": (
        of_every_layer(lambda layer: layer.quant_method.num_processed > 1
                       and setattr(layer, "weight", nn.Parameter(torch.ones(5)))),
        "'layers.0.weight' and 3 more",
    ),
    "a parameter of two tensors": (share_a_parameter, "'embed.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_REPEATED)
def test_what_a_reload_would_give_other_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, text = NOT_REPEATED[kind]
    started = start(monkeypatch, change)
    before = all_values(started)
    why = compare(started)
    assert why is not None
    assert why.startswith(f"vLLM's reload of Started gives {text} other values than")
    assert all_values(started) == before


def test_tensors_that_are_loaded_where_they_lie_are_compared(started: Started) -> None:
    """vLLM never builds a bias anew."""
    started.head.bias.data[2] += 1
    before = all_values(started)
    why = compare(started)
    assert why is not None
    assert "gives 'head.bias' other values" in why
    assert all_values(started) == before


def test_what_attention_would_derive_is_compared(started: Started) -> None:
    started.attn = Attention(started.embed)  # type: ignore[arg-type]
    assert compare(started) == ""
    started.attn.W_UV.data[1] += 1
    why = compare(started)
    assert why is not None
    assert "gives 'attn.W_UV' other values" in why


@torch.no_grad()
def test_padding_is_zero_after_a_reload_as_at_a_start(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader import reload as vllm_reload

    def load_in_part(param: Any, weight: torch.Tensor) -> None:
        param.data[:3].copy_(weight[:3])

    def make_of_garbage(meta: Any) -> torch.Tensor:
        made = make(meta)
        made.fill_(7)
        return made

    make = vllm_reload.meta.materialize_meta_tensor
    monkeypatch.setattr(vllm_reload.meta, "materialize_meta_tensor", make_of_garbage)
    files = {name: torch.rand(4) for name in NAMES}
    monkeypatch.setattr(bridges, "checkpoint_tensors", lambda worker, **how: iter(files.items()))
    model.down.weight.data.zero_()
    model.down.weight.weight_loader = load_in_part
    vllm_reload.record_metadata_for_reloading(model)
    model.load_weights(files.items())
    assert rehearse(model) == ""
    assert compare(model) == ""
    tensors = reload(model)
    assert torch.equal(model.down.weight[:3], tensors["down.weight"][:3])
    assert model.down.weight[3] == 0


def test_files_that_number_layers_otherwise_are_loaded_whole(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Started.load_weights
    swap = {"layers.0.bias": "layers.1.bias", "layers.1.bias": "layers.0.bias"}
    files = {swap.get(name, name): tensor for name, tensor in FILES.items()}
    monkeypatch.setattr(bridges, "checkpoint_tensors", lambda worker, **how: iter(files.items()))
    monkeypatch.setattr(Started, "load_weights", lambda model, weights: load(
        model, ((swap.get(name, name), tensor) for name, tensor in weights)
    ))  # fmt: skip
    assert compare(started) == ""


def test_what_cannot_be_told(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert compare(started, worker_of(started, load_format="dummy")) is None
    assert not started.given
    before = all_values(started)

    def unreadable(worker: Any, **how: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", FILES["embed.weight"]
        raise OSError("the files have gone")

    monkeypatch.setattr(bridges, "checkpoint_tensors", unreadable)
    assert compare(started) is None
    assert all_values(started) == before
    # Nothing was read a second time, and the cause is told.
    assert started.given == ["embed.weight"]
    assert "was not compared with it: OSError: the files have gone" in caplog.text


def grow_embedding(model: Started) -> None:
    model.embed = Layer("weight")
    model.embed.weight = nn.Parameter(torch.zeros(1024), requires_grad=False)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each tensor that vLLM makes memory for."""
    from vllm.model_executor.model_loader import reload as vllm_reload

    def note(meta: torch.Tensor) -> torch.Tensor:
        built.append(meta.nbytes)
        return make(meta)

    built: list[int] = []
    make = vllm_reload.meta.materialize_meta_tensor
    monkeypatch.setattr(vllm_reload.meta, "materialize_meta_tensor", note)
    return built


def test_a_layer_without_room_beside_the_model_is_not_built(
    built: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(FILES, "embed.weight", torch.rand(1024))
    started = start(monkeypatch, grow_embedding)
    before = all_values(started)
    assert compare(started) == ""
    assert max(built) == 4096
    built.clear()
    monkeypatch.setattr(reload_proof, "_MAX_HOST_BYTES", 4095)
    assert compare(started) is None
    assert built == [16] * 3  # two kinds of layers, and the head
    assert "no room beside the model, or no time, for 'embed' (0.0 GiB)" in caplog.text
    assert all_values(started) == before
    # On a GPU, what is free there counts: a layer is held up to four times.
    worker = worker_of(started, device="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free_bytes, verdict in ((4 * 4096, ""), (4 * 4095, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, n=free_bytes: (n, 2**40))
        assert compare(started, worker) == verdict
    # What is compared beside it is believed.
    started.layers[0].weight.data[1] += 1
    why = compare(started)
    assert why is not None
    assert "gives 'layers.0.weight' other values" in why


def test_layers_of_many_bytes_in_all_are_not_built(
    built: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(FILES, "embed.weight", torch.rand(1024))
    started = start(monkeypatch, grow_embedding)
    monkeypatch.setattr(reload_proof, "_MAX_PART_BYTES", 3 * 16)  # without the largest
    assert compare(started) is None
    assert built == [16] * 3
    built.clear()
    monkeypatch.setattr(reload_proof, "_MAX_PART_BYTES", 16)
    assert compare(started) is None
    assert built == [16]
    assert "for 'embed' (0.0 GiB) and 2 more" in caplog.text


class UnquantizedLinearMethod(Method):
    """Known by its name."""


def hold_plainly(model: Started) -> None:
    for layer in model.layers:
        layer.quant_method = UnquantizedLinearMethod()
        layer.quant_method.process = id


def test_nothing_is_read_where_a_gpu_holds_what_was_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = start(monkeypatch, hold_plainly)
    monkeypatch.setattr(bridges, "checkpoint_tensors", None)  # which cannot be called
    before = all_values(started)
    assert compare(started, worker_of(started, device="cuda")) == ""
    assert all_values(started) == before


def test_a_gpu_holds_two_tensors_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    started = start(monkeypatch, lambda m: (hold_plainly(m), share_a_parameter(m)))
    why = compare(started, worker_of(started, device="cuda"))
    assert why is not None
    assert "gives 'embed.weight' other values" in why


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpus_memory_is_given_back(
    started: Started, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    if fails:
        monkeypatch.setattr(bridges, "checkpoint_tensors", lambda worker, **how: 1 / 0)
    assert compare(started, worker_of(started, device="cuda")) == (None if fails else "")
    assert calls == [None]


def test_what_a_part_has_shown_is_not_believed_where_all_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = start(monkeypatch, of_every_layer(add_up))
    num_passes = 0

    def once(worker: Any, **how: Any) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_passes
        num_passes += 1
        if num_passes > 1:
            raise MemoryError("no room")
        return iter(FILES.items())

    monkeypatch.setattr(bridges, "checkpoint_tensors", once)
    assert compare(started) is None
    assert "MemoryError: no room" in caplog.text
    num_passes = 0
    monkeypatch.setattr(reload_proof, "_MAX_BYTES", 0)
    assert compare(started) is None
    assert num_passes == 1
    assert "may give 'layers.0.weight' other values" in caplog.text


def test_ranks_that_agree_on_scales_compare_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert compare(started, worker_of(started, num_ranks=2)) == ""
    monkeypatch.setattr(sys.modules[__name__], "amax_for_tp_weight_quant", max, raising=False)
    assert compare(started) == ""
    started.given.clear()
    assert compare(started, worker_of(started, num_ranks=2)) is None
    assert not started.given
    assert "the ranks agree on scales in Method" in caplog.text


def test_files_that_are_read_whole_are_not_read_again(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for load_format in ("fastsafetensors", "instanttensor", "runai_streamer", "pt", "npcache"):
        assert compare(started, worker_of(started, load_format=load_format)) is None
    assert "--load-format npcache cannot read a part" in caplog.text
    worker = worker_of(started)
    worker.vllm_config.load_config.model_loader_extra_config = {"enable_multithread_load": True}
    assert compare(started, worker) is None
    assert "enable_multithread_load reads all" in caplog.text
    monkeypatch.setattr(bridges, "model_files", lambda worker: [])
    assert compare(started) is None
    assert "no safetensors files on disk" in caplog.text
    assert not started.given


def test_files_are_found_where_vllm_downloads_them_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    repo = tmp_path / "models--nobody--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    folder = repo / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    save_file(FILES, folder / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    load_config = LoadConfig(download_dir=str(tmp_path))
    found = get_model_loader(load_config)._prepare_weights("nobody/tiny", None, None, True, None)
    assert found[0] == str(folder)
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(load_config=load_config),
        model_config=SimpleNamespace(model="nobody/tiny", revision=None),
    )
    assert list(map(str, bridges.model_files(worker))) == found[1]


@pytest.mark.parametrize(
    ("change", "why"), [(lambda t: t.add_(1), None), (lambda t: t.add_(0), "")]
)
def test_what_is_changed_by_more_than_copies_is_unknown(
    started: Started,
    change: Callable[[torch.Tensor], object],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bias, load = started.head.bias, Started.load_weights

    def load_and_change(model: Started, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load(model, weights)
        change(bias.data)

    monkeypatch.setattr(Started, "load_weights", load_and_change)
    before = all_values(started)
    assert compare(started) == why
    assert all_values(started) == before


def test_what_a_method_keeps_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(layer: Any) -> None:
        vars(layer.quant_method).setdefault("by_name", {})["weight"] = layer.weight.data
        vars(layer.quant_method).setdefault("all", [])[:] = [layer.weight.data]

    started = start(monkeypatch, of_every_layer(note))
    methods = [layer.quant_method for layer in started.layers]
    kept = [(m.by_name, m.all, m.by_name["weight"], m.all[0]) for m in methods]
    assert compare(started) == ""
    for method, (by_name, held, first, second) in zip(methods, kept, strict=True):
        assert (method.by_name, method.all) == (by_name, held)
        assert by_name["weight"] is first
        assert held[0] is second


def test_a_start_is_the_same_by_its_files_vllm_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(settings: str = "a", text: str = "{}", load_format: str = "auto") -> Any:
        hf_config = SimpleNamespace(to_json_string=lambda: text)
        return SimpleNamespace(
            compute_hash=lambda: settings,
            load_config=SimpleNamespace(load_format=load_format),
            model_config=SimpleNamespace(hf_config=hf_config),
        )

    def identity() -> str:
        return engine_identity(config(), "0.32.0", tmp_path)

    assert engine_identity(config(), "0.32.0", tmp_path) == ""  # no files
    assert engine_identity(config(), "0.32.0", None) == ""
    save_file(FILES, tmp_path / "model.safetensors")
    same = engine_identity(config(), "0.32.0", tmp_path)
    assert same
    assert engine_identity(config(), "0.32.0", tmp_path) == same
    others = [
        engine_identity(config(), "0.31.0", tmp_path),
        engine_identity(config(settings="b"), "0.32.0", tmp_path),
        engine_identity(config(text="{ }"), "0.32.0", tmp_path),
        engine_identity(config(load_format="hf"), "0.32.0", tmp_path),
    ]
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    others.append(identity())
    for name in ("consolidated.safetensors", "modeling_own.py"):
        (tmp_path / name).touch()
        others.append(identity())
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"of {package}")
    others.append(identity())
    assert len({same, *others}) == 9


# -- a real engine


def run_with_own_cache(pipe: Any, argv: list[str], *args: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = str(Path(argv[0]).parent / "cache")
    run_child(pipe, argv, *args)


def test_an_engine_that_cannot_reload_says_so_and_serves_on(tmp_path: Path) -> None:
    """vLLM's LFM2 has one parameter for the two tensors that these files have."""
    base = make_model("lfm2", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", seed=1, targets=("q_proj", "w1", "w2"))
    args = (*LORA_ARGS, "--lora-modules", f"disk={adapter}")
    engine = EngineProcess(base, args, child=run_with_own_cache).start()
    try:
        why = engine.facts["capabilities"].base_refusal
        assert why.startswith("vLLM's reload of Lfm2ForCausalLM gives 'lm_head' and 1 more other")
        before = engine.complete("tiny", PROMPT)
        with pytest.raises(LoadFailedError, match="can load no base: vLLM's reload") as refused:
            engine.push_base("base@1", base)
        assert "dirty" not in refused.value.metadata
        assert not engine.call("dirty_reason")
        assert engine.complete("tiny", PROMPT) == before
        engine.push_adapter("math@1", adapter)
        adapted = engine.complete("math@1", PROMPT)
        assert adapted.logprobs == engine.complete("disk", PROMPT).logprobs != before.logprobs
    finally:
        engine.stop()
    # The next start of the same engine loads nothing again: it is told.
    (kept,) = (tmp_path / "cache" / "weft" / "reloads").iterdir()
    entry = json.loads(kept.read_text())
    assert entry["found"] == why
    kept.write_text(json.dumps({**entry, "found": "as was found before"}))
    engine = EngineProcess(base, args, child=run_with_own_cache).start()
    try:
        assert engine.facts["capabilities"].base_refusal == "as was found before"
        assert engine.complete("tiny", PROMPT) == before
    finally:
        engine.stop()
