"""A replica learns at its start how its model is reloaded, and whether each parameter gets a value.

Models of a few tensors, over vLLM's own reload; real ones are in ``test_models.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading import rehearsal
from rollout_side.vllm_engine.loading.drafted_model import DraftedModel
from rollout_side.vllm_engine.loading.layerwise import ReloadFacts, facts_of
from rollout_side.vllm_engine.loading.rehearsal import drafted_model, why_not_reloaded
from rollout_side.vllm_engine.loading.reload import reload_layers
from tests.e2e.conftest import TinyModels
from tests.e2e.engine_process import EngineProcess, run_child
from tests.e2e.logprobs import PROMPT
from weft_rl.contract.errors import LoadFailedError
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

AttentionLayerBase = pytest.importorskip(
    "vllm.model_executor.layers.attention_layer_base"
).AttentionLayerBase

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


def worker_of(model: Model, quantization: str | None = None) -> Any:
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        model_config=SimpleNamespace(quantization=quantization, dtype=torch.float32),
        vllm_config=None,
        device=torch.device("cpu"),
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
    made = Model()
    record_metadata_for_reloading(made)
    return made


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


class Drafter(Model):
    """Drafts with the served model's last layer, and one of its own."""

    def __init__(self, served: Model) -> None:
        nn.Module.__init__(self)
        self.fc, self.down = Layer("weight"), served.down

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        found = {name: weight for name, weight in weights if name != "t2d"}  # all at once
        for name, weight in found.items():
            by_loader(self.get_parameter(name), weight)
        return set(found)


DRAFT = tuple(
    TensorMeta(f"draft_model.{name}", DataType.FLOAT32, (4,))
    for name in ("down.weight", "fc.weight", "t2d")
)


def drafting(model: Model, *names: str) -> tuple[Any, DraftedModel | None]:
    """A worker whose model is drafted for, and what it learns of a draft with such files."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    worker, drafter = worker_of(model), Drafter(model)
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


def test_a_draft_that_cannot_be_loaded_stays(model: Model) -> None:
    assert drafting(model)[1] is None
    assert drafting(model, "down.weight")[1] is None  # its own layer gets nothing
    worker, _ = drafting(model, "fc.weight")
    worker.model_runner.drafter = SimpleNamespace(parallel_drafting_hidden_state_tensor=1)
    reference = Reference("Model", tuple(TensorMeta(n, DataType.FLOAT32, (4,)) for n in NAMES))
    assert drafted_model(worker, reference, DRAFT[1:2]) is None


WHY = "vLLM's reload of a model would leave mixed weights: 'up.sinks' and 0 more get no weights"


def run_without_reload(pipe: Any, *args: Any) -> None:
    """Serve a model that this vLLM cannot reload; workers are forks of this process."""
    from rollout_side.vllm_engine.worker import state as worker_state

    worker_state.why_not_reloaded = lambda worker, reference: WHY
    run_child(pipe, *args)


@pytest.mark.matrix
def test_an_engine_that_cannot_reload_says_so_and_serves_on(qwen2: TinyModels) -> None:
    engine = EngineProcess(qwen2.base, child=run_without_reload).start()
    try:
        assert engine.facts["capabilities"].base_refusal == WHY
        before = engine.complete("tiny", PROMPT)
        with pytest.raises(LoadFailedError, match="can load no base: vLLM's reload") as refused:
            engine.push_base("base@1", qwen2.other)
        assert "dirty" not in refused.value.metadata
        assert not engine.call("dirty_reason")
        assert engine.complete("tiny", PROMPT) == before
    finally:
        engine.stop()
