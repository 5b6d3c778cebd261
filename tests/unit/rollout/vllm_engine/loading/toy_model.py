"""A toy model that loads as vLLM's models do, versions of it, and how its loading may be more
than copying."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch import nn

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import StagedVersion
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan
from rollout_side.vllm_engine.loading.plan_proof import learn
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta

Loader = Callable[[torch.Tensor, torch.Tensor], object]
Change = Callable[["Model"], object]

BF16, F32 = torch.bfloat16, torch.float32
VOCAB, PADDED, HIDDEN, RANKS, RANK = 7, 16, 6, 2, 1
LARGE = (1024, 1024)  # 2 MiB: copied by itself
SHAPES: dict[str, tuple[DataType, tuple[int, ...]]] = {
    "embed.weight": (DataType.BFLOAT16, (VOCAB, HIDDEN)),
    "layers.0.q.weight": (DataType.BFLOAT16, (8, HIDDEN)),
    "layers.0.k.weight": (DataType.BFLOAT16, (4, HIDDEN)),
    "layers.0.v.weight": (DataType.BFLOAT16, (4, HIDDEN)),
    "layers.0.down.weight": (DataType.BFLOAT16, (HIDDEN, 4 * RANKS)),
    "layers.0.up.weight": (DataType.BFLOAT16, LARGE),
    "norm.weight": (DataType.FLOAT32, (HIDDEN,)),
    "scale.weight": (DataType.FLOAT32, ()),
}
#: Small buckets, so that tensors lie in several of them.
MANIFEST = plan_buckets([TensorMeta("wire." + n, d, s) for n, (d, s) in SHAPES.items()], 512)
ROWS = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}


class UnquantizedLinearMethod:
    """Of a class in the plan's list, as vLLM's."""


class Fp8LinearMethod:
    """Of a class that is not."""


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.quant_method: object = UnquantizedLinearMethod()


class RotaryMLAWrapper(Layer):
    """Of a name that says that it derives matrices."""


class Model(nn.Module):
    """Loads as vLLM's models do: fused rows, a rank's columns, padding, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Layer(BF16, PADDED, HIDDEN), Layer(BF16, 1)
        self.head.weight = self.embed.weight
        self.qkv, self.down = Layer(BF16, 16, HIDDEN), Layer(BF16, HIDDEN, 4)
        self.up, self.norm, self.scale = Layer(BF16, *LARGE), Layer(F32, HIDDEN), Layer(F32)
        self.loaders: dict[str, Loader] = {"embed": load_vocab, "down": load_columns}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, weight in weights:
            layer = name.split(".")[-2]
            names.add(name)
            if layer in ROWS:
                self.qkv.weight.data.narrow(0, *ROWS[layer]).copy_(weight)
            else:
                loader = self.loaders.get(layer, load_plain)
                loader(self.get_submodule(layer).weight, weight)
        return names

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.state_dict().items()}


def load_plain(param: torch.Tensor, weight: torch.Tensor) -> None:
    param.data.copy_(weight)


def load_vocab(param: torch.Tensor, weight: torch.Tensor) -> None:
    param[: weight.shape[0]].data.copy_(weight)
    param[weight.shape[0] :].data.fill_(0)


def load_columns(param: torch.Tensor, weight: torch.Tensor) -> None:
    size = param.shape[1]
    param.data.copy_(weight.narrow(1, RANK * size, size))


def load_twice(param: torch.Tensor, weight: torch.Tensor) -> None:
    load_plain(param, weight)
    load_plain(param, weight)


def load_nothing(_param: torch.Tensor, _weight: torch.Tensor) -> None:
    pass


def refuse(_param: torch.Tensor, _weight: torch.Tensor) -> None:
    raise RuntimeError("no such weight")


def digest(tensor: torch.Tensor) -> str:
    """Of its bytes: a NaN equals itself there."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(octets.numpy()).hexdigest()


def staged(seed: int, *, any_bits: bool = False) -> StagedVersion:
    """A version with values of its own; ``any_bits`` has every kind of NaN."""
    generator = torch.Generator().manual_seed(seed)
    segment = HostSegment.allocate(MANIFEST.wire_bytes)
    copy = StagedVersion(f"t{seed}", PolicyVersion("base", seed), MANIFEST, segment, b"")
    if any_bits:
        noise = torch.randint(0, 256, (segment.num_bytes,), generator=generator)
        segment.data.copy_(noise.to(torch.uint8))
        assert any(tensor.isnan().any() for _, tensor in copy.tensors())
    else:
        for _, tensor in copy.tensors():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return copy


def load_own_way(model: Model, version: StagedVersion) -> Model:
    with torch.no_grad():
        model.load_weights(version.tensors())
    return model


def learnt(model: Model, version: StagedVersion) -> CopyPlan:
    plan = learn(model, version)
    assert plan is not None
    return plan


def _loader(loader: Loader, layer: str = "norm") -> Change:
    return lambda model: model.loaders.update({layer: loader})


def _quantise(model: Model) -> None:
    model.down.quant_method = Fp8LinearMethod()


def _widen(model: Model) -> None:
    model.norm = Layer(torch.float64, HIDDEN)


def _narrow(model: Model) -> None:
    model.norm = Layer(BF16, HIDDEN)


def _derive(model: Model) -> None:
    model.norm = RotaryMLAWrapper(F32, HIDDEN)


def _grow(model: Model) -> None:
    model.more = Layer(F32, 2)


def _attend_to_sinks(model: Model) -> None:
    model.norm.impl = SimpleNamespace(sinks=model.norm.weight)


CHANGES: dict[str, Change] = {
    "computes": _loader(lambda p, w: p.data.copy_(w * 2)),
    "computes, and copies the same": _loader(lambda p, w: p.data.copy_(w.clone())),
    "adds": _loader(lambda p, w: p.data.zero_().add_(w)),
    "scatters": _loader(lambda p, w: p.data.index_copy_(0, torch.arange(HIDDEN), w)),
    "casts": _loader(lambda p, w: p.data.copy_(w.to(F32)), "up"),
    "casts to a wider type while copying": _widen,
    "casts to a smaller type while copying": _narrow,
    "is not filled": _loader(load_nothing),
    "is filled in part": _loader(lambda p, w: p.data[:3].copy_(w[:3])),
    "is never sent": _grow,
    "is filled twice": _loader(load_twice),
    "is quantised": _quantise,
    "derives matrices": _derive,
    "attends to sinks": _attend_to_sinks,
}
