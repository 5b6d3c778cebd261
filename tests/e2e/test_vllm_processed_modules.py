"""Copy plans over layers that process what they load, beside vLLM's own reload of the same model.

The layer and its method are the test's, since a CPU has none of vLLM's kernels for them; loaders,
parameters and the reload are vLLM's. tests/gpu/test_pushes.py has FP8 on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import StagedVersion, bucket_starts
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading import prepared_load
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan
from rollout_side.vllm_engine.loading.plan_proof import PlanProof, learn
from rollout_side.vllm_engine.loading.prepared_load import prepare_load
from rollout_side.vllm_engine.loading.reload import reload_layers
from weft_rl.contract.manifest import Manifest, plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta

linear: Any = pytest.importorskip("vllm.model_executor.layers.linear")

# vLLM's and torch's own, at import
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "o": (6, 16), "norm": (6,)}
ROWS = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}
METAS = [TensorMeta(f"{n}.weight", DataType.BFLOAT16, shape) for n, shape in SHAPES.items()]
#: Tensors behind one another in few buckets; and each in several, in another order.
LAYOUTS = {"few": plan_buckets(METAS, 2**20), "many": plan_buckets(METAS[::-1], 128)}


class Quantising(linear.LinearMethodBase):  # type: ignore[misc]
    """Makes int8 and a scale of what was loaded, as FP8 online does."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        from vllm.model_executor.utils import replace_parameter

        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = layer.weight
        scale = weight.abs().amax().float() / 127
        replace_parameter(layer, "weight", (weight / scale).round().to(torch.int8).t())
        replace_parameter(layer, "weight_scale", scale.reshape(1))
        layer._already_called_process_weights_after_loading = True


class Overwriting(Quantising):
    """Writes to what was loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if not getattr(layer, "_already_called_process_weights_after_loading", False):
            layer.weight.data[0] = 0
        super().process_weights_after_loading(layer)


class Keeping(Quantising):
    """Keeps a tensor that its layer does not have."""

    def __init__(self) -> None:
        self.workspace = torch.zeros(2)


class Counting(Quantising):
    """Leaves a number at the layer that depends on the weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.largest = float(layer.weight.max())


class Attaching(Quantising):
    """Leaves a tensor at the layer that is none of its parameters."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.sum = layer.weight.sum()


class Linear(linear.LinearBase):  # type: ignore[misc]
    """Linear layer in its loading form."""

    def __init__(self, method: Quantising, *shape: int) -> None:
        nn.Module.__init__(self)
        value = torch.zeros(shape, dtype=torch.bfloat16)
        self.weight = nn.Parameter(value, requires_grad=False)
        self.quant_method = method


class Model(nn.Module):
    """Fused rows and a whole matrix, both processed, and a plain vector."""

    def __init__(self, method: Callable[[], Quantising] = Quantising) -> None:
        super().__init__()
        self.qkv, self.o = Linear(method(), 16, 6), Linear(method(), 6, 16)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        for name, weight in weights:
            layer = name.partition(".")[0]
            if layer in ROWS:
                parameter: Any = self.qkv.weight
                loader = getattr(parameter, "weight_loader", load_rows)
                loader(parameter, weight, ROWS[layer])
            else:
                parameter = self.get_submodule(layer).weight
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
        return {name for name, _ in self.named_parameters()}

    def values(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


def load_rows(param: Any, weight: torch.Tensor, rows: tuple[int, int]) -> None:
    param.data.narrow(0, *rows).copy_(weight)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """A model as vLLM starts one: its layers hold what they have made of zeros."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    monkeypatch.setattr(bridges, "vllm_config_context", lambda config: contextlib.nullcontext())

    def start(method: Callable[[], Quantising] = Quantising) -> Model:
        model = Model(method)
        qkv: Any = model.qkv.weight
        qkv.weight_loader = load_rows
        record_metadata_for_reloading(model)
        for layer in (model.qkv, model.o):
            layer.quant_method.process_weights_after_loading(layer)
        return model

    return start


def staged(seed: int, manifest: Manifest) -> StagedVersion:
    """The same values of one seed, in any layout."""
    torch.manual_seed(seed)
    values = {meta.name: torch.randn(meta.shape) for meta in METAS}
    segment = HostSegment.allocate(manifest.wire_bytes)
    copy = StagedVersion(f"t{seed}", PolicyVersion("base", seed), manifest, segment, b"")
    for name, tensor in copy.tensors():
        tensor.copy_(values[name])
    return copy


def wires(version: StagedVersion) -> list[torch.Tensor]:
    starts, data = bucket_starts(version.manifest), version.segment.data
    buckets = zip(starts, version.manifest.buckets, strict=True)
    return [data[start : start + bucket.wire_bytes] for start, bucket in buckets]


@torch.no_grad()
def reload(model: Model, version: StagedVersion) -> dict[str, torch.Tensor]:
    """Load a version by vLLM's own reload; return what it makes."""
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        model_config=SimpleNamespace(quantization="toy", dtype=torch.bfloat16),
        vllm_config=None,
        device=torch.device("cpu"),
    )
    reload_layers(worker, model, version.version, version.tensors(), len(METAS))
    return model.values()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def learnt(model: Model, version: StagedVersion) -> CopyPlan:
    reload(model, version)
    plan = learn(model, version)
    assert plan is not None
    return plan


@pytest.mark.parametrize("method", [Quantising, Overwriting])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_plan_makes_what_vllms_reload_makes(
    make: Callable[..., Model], layout: str, in_place: bool, method: type[Quantising]
) -> None:
    first, second = (staged(seed, LAYOUTS[layout]) for seed in (1, 2))
    expected = reload(make(method), second)
    model = make(method)
    plan = learnt(model, first)
    assert (plan.num_processed, plan.is_readable) == (2, False)
    attributes = {name: set(vars(layer)) for name, layer in model.named_modules()}
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert plan.holds(first.segment.data)
    assert not plan.holds(second.segment.data)
    before = second.segment.data.clone()
    if in_place:
        for index, wire in enumerate(wires(second)):
            plan.load_bucket(index, wire)
    else:
        plan.load(second.segment.data)
    assert same(model.values(), expected)
    assert not same(expected, reload(make(method), first))
    assert torch.equal(second.segment.data, before)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert {name: set(vars(layer)) for name, layer in model.named_modules()} == attributes
    # vLLM's own still works afterwards, and in another layout, too.
    assert same(reload(model, first), reload(make(method), first))
    other = staged(2, next(manifest for name, manifest in LAYOUTS.items() if name != layout))
    again = plan.for_layout(other.manifest)
    assert again is not None
    again.load(other.segment.data)
    assert same(model.values(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_is_proven_as_buckets_pass(make: Callable[..., Model], layout: str) -> None:
    first, second = (staged(seed, LAYOUTS[layout]) for seed in (1, 2))
    model = make()
    proof = PlanProof(model, first.manifest)
    for index, wire in enumerate(wires(first)):
        proof.pass_bucket(index, wire)
    reload(model, first)
    plan = proof.plan()
    assert plan is not None
    plan.load(second.segment.data)
    assert same(model.values(), reload(make(), second))


@pytest.mark.parametrize("name", ["qkv.weight", "qkv.weight_scale", "o.weight", "norm.weight"])
def test_another_value_anywhere_disproves_it(make: Callable[..., Model], name: str) -> None:
    model, version = make(), staged(1, LAYOUTS["few"])
    proof = PlanProof(model, version.manifest)
    for index, wire in enumerate(wires(version)):
        proof.pass_bucket(index, wire)
    reload(model, version)
    values = model.get_parameter(name).data
    values[(0,) * values.dim()] += 1
    assert learn(model, version) is None
    assert proof.plan() is None


def test_a_load_that_ended_midway_leaves_nothing_to_the_next(make: Callable[..., Model]) -> None:
    first, second = (staged(seed, LAYOUTS["many"]) for seed in (1, 2))
    model = make()
    plan = learnt(model, first)
    plan.load_bucket(0, wires(first)[0])
    for index, wire in enumerate(wires(second)):
        plan.load_bucket(index, wire)
    assert same(model.values(), reload(make(), second))


@pytest.mark.parametrize("method", [Keeping, Attaching, Counting])
def test_no_plan_where_tensors_lie_elsewhere(
    make: Callable[..., Model], method: type[Quantising]
) -> None:
    model, version = make(method), staged(1, LAYOUTS["few"])
    reload(model, version)
    model.o.largest = -1.0  # of another version
    expected = model.values()
    assert learn(model, version) is None
    assert same(model.values(), expected)


def stepped(version: StagedVersion, *changed: tuple[str, int, float]) -> StagedVersion:
    """Return a copy of a version in which elements have other values."""
    segment = HostSegment.allocate(version.manifest.wire_bytes)
    segment.data.copy_(version.segment.data)
    copy = StagedVersion("step", PolicyVersion("base", 9), version.manifest, segment, b"")
    for name, tensor in copy.tensors():
        for own, place, value in changed:
            if own == name:
                tensor.view(-1)[place] = value
    return copy


@pytest.mark.parametrize("share", [1, prepared_load.WHOLE_SHARE])
@pytest.mark.parametrize("method", [Quantising, Overwriting])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("changed", "num_parts"),
    [
        ((), 0),
        ((("norm.weight", 3, 7.0),), 1),
        ((("q.weight", 20, 0.5), ("v.weight", 1, -0.25), ("o.weight", 40, 0.125)), 2),
        ((("q.weight", 20, 1e3),), 2),  # the scale of all three, and all elements
        ((("k.weight", 0, 1e3), ("o.weight", 95, 2e3), ("norm.weight", 0, 1.0)), 5),
    ],
)
def test_what_is_prepared_beside_the_weights_makes_what_a_reload_makes(
    make: Callable[..., Model],
    method: type[Quantising],
    layout: str,
    changed: tuple[tuple[str, int, float], ...],
    num_parts: int,
    share: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepared_load, "WHOLE_SHARE", share)  # 1: by words, as far as any is left
    first = staged(1, LAYOUTS[layout])
    second = stepped(first, *changed)
    expected = reload(make(method), second)
    model = make(method)
    plan = learnt(model, first)
    before, given = model.values(), second.segment.data.clone()
    attributes = {name: dict(vars(layer)) for name, layer in model.named_modules()}
    called = list[None]()
    prepared = prepare_load(plan, second.segment.data, 10_000, lambda: called.append(None))
    assert prepared is not None
    assert same(model.values(), before)  # nothing is written yet, and no layer was touched
    assert {name: vars(layer) for name, layer in model.named_modules()} == attributes
    assert torch.equal(second.segment.data, given)
    assert len(called) == len(first.manifest.buckets)
    assert prepared.num_parts == num_parts
    assert (prepared.num_bytes > 0) is (num_parts > 0)
    torch.use_deterministic_algorithms(True)  # as a plugin may set
    try:
        prepared.write()
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(model.values(), expected)
    assert plan.holds(second.segment.data)
    if num_parts:
        assert prepare_load(plan, first.segment.data, 1, lambda: None) is None


def test_threads_that_load_and_prepare_share_the_config() -> None:
    """Whichever ends first: vLLM has one variable for it, and raises where it is not set."""
    from vllm.config import get_current_vllm_config_or_none

    config: Any = SimpleNamespace()
    first, second = (bridges.vllm_config_context(config) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert get_current_vllm_config_or_none() is config
    second.__exit__(None, None, None)
    assert get_current_vllm_config_or_none() is None
    with contextlib.suppress(ZeroDivisionError), bridges.vllm_config_context(config):
        assert get_current_vllm_config_or_none() is config
        _ = 1 / 0
    assert get_current_vllm_config_or_none() is None


def test_layers_compute_with_their_weights_while_others_are_made(
    make: Callable[..., Model],
) -> None:
    """A layer is processed as a double of its own, which another thread does not see."""
    model, seen = make(), list[torch.Tensor]()
    plan = learnt(model, first := staged(1, LAYOUTS["few"]))
    served, process = model.qkv.weight, Quantising.process_weights_after_loading

    class Watched(Quantising):
        def process_weights_after_loading(self, layer: Any) -> None:
            seen.append(model.qkv.weight)
            process(self, layer)

    model.qkv.quant_method.__class__ = Watched
    assert plan.holds(first.segment.data)
    assert len(seen) == 1
    assert seen[0] is served


class Scales(nn.Module):
    """Scales that are loaded, and turned to numbers: those of a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = nn.Parameter(torch.ones(6, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("_k", torch.ones(1))  # as vLLM's attention has some
        self.quant_method: Any = SimpleNamespace()

    def process(self) -> None:
        self.k = float(self.k_scale.max())
        del self.k_scale


@pytest.mark.parametrize("brings", [False, True])
def test_no_plan_of_a_base_that_brings_scales_which_layers_process(
    make: Callable[..., Model], brings: bool
) -> None:
    """Such a layer has no parameter left; without scales in the base, it matters to no plan."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    version = staged(1, LAYOUTS["few"])
    model = make()
    reload(model, version)
    scales = Scales()
    record_metadata_for_reloading(scales)
    scales.process()
    model.attn = scales
    load = model.load_weights

    def load_scales(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, weight in weights:
            load([(name, weight)])
            if name.startswith("norm") and brings and hasattr(scales, "k_scale"):
                scales.k_scale.data.copy_(weight)
        return set()

    model.load_weights = load_scales  # type: ignore[method-assign]
    assert (learn(model, version) is None) == brings
    assert not hasattr(scales, "k_scale")
    assert list(scales.state_dict()) == ["_k"]


def test_a_bias_is_copied_beside_what_is_processed(
    make: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 loads biases in place, and its loading forms have none."""
    from vllm.model_executor.model_loader.reload import meta

    assert "bias" in meta.SKIP_TENSORS
    first, second = (staged(seed, LAYOUTS["few"]) for seed in (1, 2))
    ours, theirs = make(), make()
    for model in (ours, theirs):
        bias = torch.zeros(6, dtype=torch.bfloat16)
        model.o.register_parameter("bias", nn.Parameter(bias, requires_grad=False))
        del model.norm.weight
        model.norm.weight = model.o.bias  # loaded by that name
        reload(model, first)
    plan = learn(ours, first)
    assert plan is not None
    plan.load(second.segment.data)
    assert same(ours.values(), reload(theirs, second))


def test_no_plan_where_ranks_agree_on_a_scale(
    make: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a plan would not take part."""
    from vllm.model_executor.layers.quantization.online import fp8

    assert hasattr(fp8, "amax_for_tp_weight_quant")  # whose name says so
    model, version = make(), staged(1, LAYOUTS["few"])
    reload(model, version)
    model.o.tp_size = 2
    assert learn(model, version) is not None
    monkeypatch.setattr(f"{__name__}.amax_for_tp_weight_quant", max, raising=False)
    assert learn(model, version) is None
