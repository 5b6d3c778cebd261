"""Base of a PEFT model with one LoRA adapter merged in, tensor by tensor, on the way out.

The trained weights are read and never written: PEFT's own merge and unmerge leaves
rounding behind each time (31-52 % of a bf16 base changed after 100 pushes). The sum
is formed in float32 or better, a few rows at a time, and rounded once, to the dtype
that travels.

Source: peft.tuners.lora (Linear.get_delta_weight, Embedding, ParamWrapper), and for
DoRA peft.tuners.lora.dora: W' = m * (W + s B A) / |W + s B A|, the norm of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from trainer_side.params.elements import Elements, HeldElements
from trainer_side.params.lora_layers import check_all_sent, lora_layers
from trainer_side.params.merged_elements import (
    LoraFactors,
    MergedElements,
    WeightAddition,
    are_exact,
    factors_of,
    merge_block,
    merges_in_place,
    product,
)
from trainer_side.params.names import LORA, adapter_tensor_name, base_name_in_peft
from trainer_side.params.params import (
    ModelWalk,
    Params,
    last_walk,
    own_class,
    walk,
    whole_tensors,
)
from trainer_side.params.sharded import ShardedParams
from weft_rl.contract.adapter_config import MERGE_A_COPY
from weft_rl.contract.errors import InvalidAdapterError, UnsupportedError

#: Rows that are merged at a time hold at most this much in float32.
_CHUNK_ELEMENTS = 2**19
#: Weights that are brought to the sender together hold at most this much, or the largest.
_MIN_GROUP_BYTES = 2**20


@dataclass(frozen=True)
class _ParamAddition:
    """Addition to one parameter of the base; names are those of ``Params``."""

    form: str
    """Kind of merge: "product", "dora" or "bias"."""
    a: str
    """Name of the factor A; empty for a bias."""
    b: str
    scaling: float
    magnitude: str = ""
    """Name of DoRA's magnitude vector; empty without DoRA."""
    is_transposed: bool = False
    """True if the base's weight is (in, out), as an embedding's, or (experts, in, out)."""

    @property
    def needs(self) -> list[str]:
        """Names of further parameters that must be at the sender."""
        return [name for name in (self.a, self.b, self.magnitude) if name]


class LayerSettings(NamedTuple):
    """Settings of one LoRA layer that its merge depends on, besides parameters."""

    scaling: float | None
    variant: str
    merged: tuple[str, ...]
    """Adapters that are merged into the layer's weight already."""
    is_transposed: bool | None


def merge_settings(model: torch.nn.Module, adapter_name: str) -> dict[str, object]:
    """Return the settings of a PEFT model that ``MergedParams`` depends on, by the layers' paths.
    These are what it is made of besides the parameters."""
    has_adapter = adapter_name in getattr(model, "peft_config", {})
    found: dict[str, object] = {f"having an adapter {adapter_name!r}": has_adapter}
    for path, layer in walk(model).by_path.items():
        own = layer.__dict__  # quicker than asking thousands of modules for what few have
        if "scaling" in own and "lora_variant" in own:
            variant = type(own["lora_variant"].get(adapter_name)).__name__
            merged, transposed = own.get("merged_adapters", ()), own.get("fan_in_fan_out")
            scaling = own["scaling"].get(adapter_name)
            found[path.rstrip(".")] = LayerSettings(scaling, variant, (*merged,), transposed)
    return found


class MergedParams(Params):
    """Merged parameters by the base model's own names; see ``Params``.

    Args:
        model: A PEFT model without wrappers.
        params: Its parameters, with those of the adapter.
        adapter_name: Name of the adapter.

    Raises:
        InvalidAdapterError: No such adapter, or one that is merged already.
        UnsupportedError: A kind of layer or adapter that cannot be merged during a push.
    """

    def __init__(self, model: Any, params: Params, adapter_name: str) -> None:
        self.kind = f"{params.kind} merged"
        self.is_collective = params.is_collective
        self._params = params
        check_mergeable(model, adapter_name)
        self._raw = _base_names(params.metas, adapter_name)
        _check_tied(model, adapter_name)
        self._merges = dict(_merges(model, adapter_name, self._raw, params.metas))
        sent = {*self._raw.values(), *(n for merge in self._merges.values() for n in merge.needs)}
        check_all_sent(last_walk(model), adapter_name, sent, params.metas, MERGE_A_COPY)
        self.metas = {name: params.metas[raw] for name, raw in self._raw.items()}
        #: Names in ``params`` of all that is read.
        self.inputs = {*self._raw.values(), *(n for m in self._merges.values() for n in m.needs)}
        largest = max((_num_bytes(meta) for meta in self.metas.values()), default=0)
        self._group_bytes = max(_MIN_GROUP_BYTES, largest)

    def fetch(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        outs: Sequence[torch.Tensor] | None,
    ) -> None:
        """See ``Params.fetch``; extra memory beyond ``outs`` is that of the largest tensor."""
        plain = [i for i, name in enumerate(names) if name not in self._merges]
        if plain:
            self._params.fetch(
                [self._raw[names[i]] for i in plain],
                [dtypes[i] for i in plain],
                None if outs is None else [outs[i] for i in plain],
            )
        group: list[int] = []
        used = 0
        for i, name in enumerate(names):
            if name not in self._merges:
                continue
            size = _num_bytes(self.metas[name])
            if group and used + size > self._group_bytes:
                self._merge(group, names, outs)
                group, used = [], 0
            group.append(i)
            used += size
        if group:
            self._merge(group, names, outs)

    def whole(self, name: str) -> torch.Tensor:
        """See ``Params.whole``: return a merged copy, in the parameter's own dtype."""
        if name not in self._merges:
            return self._params.whole(self._raw[name])
        out = torch.empty_like(self.metas[name], device="cpu")
        self._merge([0], [name], [out])
        return out

    def elements(self, name: str) -> Elements | None:
        """See ``Params.elements``: each rank merges its own elements. None where one rank must have
        it whole: DoRA, biases."""
        base, merge = self._params.elements(self._raw[name]), self._merges.get(name)
        if merge is None:
            return base
        if not isinstance(base, HeldElements) or merge.a not in self._factors:
            return None
        shape, factors = self.metas[name].shape, self._factors
        delta = WeightAddition(shape, factors, merge.a, merge.b, merge.scaling, merge.is_transposed)
        in_place = merges_in_place(base, delta.width)
        return MergedElements(base, delta, base.rank) if in_place else None

    def why_gathered(self, name: str) -> str:
        if why := self._params.why_gathered(self._raw[name]):
            return why
        if (merge := self._merges.get(name)) is None:
            return ""
        if merge.form in _WHY_WHOLE:
            return _WHY_WHOLE[merge.form]
        for factor in (merge.a, merge.b):
            if why := self._params.why_gathered(factor):
                return f"LoRA's factors: {why}"
        return "its ranks hold neither rows nor columns of it, which LoRA is merged into"

    def prepare(self) -> None:
        """See ``Params.prepare``: bring the factors."""
        if self.is_collective:
            self._factors.bring()

    def release(self) -> None:
        if self.is_collective:
            self._factors.release()

    @cached_property
    def _factors(self) -> LoraFactors:
        """Factors of all weights that can be merged where they lie."""
        held: dict[str, HeldElements] = {}
        for merge in self._merges.values():
            if merge.form == "product":
                pair = {name: self._params.elements(name) for name in (merge.a, merge.b)}
                found = {n: each for n, each in pair.items() if isinstance(each, HeldElements)}
                held.update(found if len(found) == len(pair) else {})
        assert isinstance(self._params, ShardedParams)
        return LoraFactors(held, self._params.metas, self._params.ranks)

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Params.local``: yield the inputs of the sums."""
        return self._params.local()

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            more = self._merges[name].needs if name in self._merges else ()
            self._params.check((self._raw[name], *more))

    def _merge(
        self, group: Sequence[int], names: Sequence[str], outs: Sequence[torch.Tensor] | None
    ) -> None:
        wanted = [
            need for i in group for need in (self._raw[names[i]], *self._merges[names[i]].needs)
        ]
        tensors = whole_tensors(self._params, list(dict.fromkeys(wanted)), wanted=outs is not None)
        if tensors is None or outs is None:
            return
        with torch.no_grad():
            for i in group:
                merge, weight = self._merges[names[i]], tensors[self._raw[names[i]]]
                # Where it is packed, if that is an accelerator: copies lie on the host.
                device = weight.device if outs[i].device.type == "cpu" else outs[i].device
                factors = {name: tensors[name].to(device) for name in merge.needs}
                _FORMS[merge.form](merge, weight.to(device), factors, outs[i])


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- which parameter gets what ---------------------------------------------------


def _base_names(metas: Mapping[str, torch.Tensor], adapter: str) -> dict[str, str]:
    """Map the base model's names to the PEFT model's. Trained copies of whole modules
    (``modules_to_save``) replace the originals."""
    names: dict[str, str] = {}
    for raw in metas:
        if "token_adapter" in raw.split("."):
            raise UnsupportedError(
                f"trainable tokens cannot be merged during a push: {MERGE_A_COPY}"
            )
        name = base_name_in_peft(raw, adapter)
        if name is not None:
            names[name] = raw
    for raw in metas:  # originals of modules that only other adapters have copies of
        name = base_name_in_peft(raw)
        if name is not None:
            names.setdefault(name, raw)
    return names


def check_mergeable(model: Any, adapter: str) -> None:
    """Refuse an adapter that is not there, of another kind, or whose layers cannot be merged; no
    tensor is read.

    Raises:
        InvalidAdapterError: No such adapter, or it is merged already.
        UnsupportedError: Another kind of adapter or layer.
    """
    configs = getattr(model, "peft_config", {})
    if adapter not in configs:
        known = ", ".join(sorted(configs)) or "none"
        raise InvalidAdapterError(f"the model has no adapter {adapter!r}; it has {known}")
    kind = configs[adapter].peft_type
    kind = str(getattr(kind, "value", kind))
    if kind != "LORA":
        raise UnsupportedError(
            f"the adapter {adapter!r} is of PEFT's kind {kind}, which cannot be merged during a "
            f"push: {MERGE_A_COPY}",
            metadata={"setting": "peft_type"},
        )
    lora_layers(last_walk(model), adapter, "merged")


def _check_tied(model: Any, adapter: str) -> None:
    """Refuse trained copies of tied modules that are not tied in the same way: the pool's base is
    told of one of them alone."""
    own: dict[str, int] = {}
    for raw, param in model.named_parameters(remove_duplicate=False):
        name = base_name_in_peft(raw, adapter)
        if name is not None:
            own[name] = id(param)
    for names in _tied_names(model):
        if len({own.get(name) for name in names}) > 1:
            first, second, *_ = sorted(names)
            raise UnsupportedError(
                f"{first} and {second} are one weight in the base, and the adapter {adapter!r} has "
                "a trained copy for one of them (modules_to_save): train both tied "
                "(ensure_weight_tying=True), or untie the base"
            )


def _merges(
    model: Any, adapter: str, raw_names: Mapping[str, str], metas: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, _ParamAddition]]:
    tied = {name for names in _tied_names(model) for name in names}
    for path in _lora_paths(metas, adapter):
        layer: Any = walk(model).at(path)
        for name, merge in _merges_of(layer, path, adapter, metas):
            if name in tied:
                raise UnsupportedError(
                    f"{name} is tied to another weight, which the merge would change as well: "
                    "leave it out of target_modules, or untie them"
                )
            if name not in raw_names and merge.form == "bias":
                raise UnsupportedError(
                    f"{path}: the bias of its LoRA (lora_bias=True) cannot be merged into a layer "
                    "that has none, nor can PEFT: train with lora_bias=False, or on a layer with a "
                    "bias"
                )
            if name not in raw_names:
                raise UnsupportedError(
                    f"{path}: its base has no parameter {name!r} to merge into (a parametrization "
                    "of it?): remove that (torch.nn.utils.parametrize.remove_parametrizations)"
                )
            yield name, merge


def _lora_paths(metas: Iterable[str], adapter: str) -> list[str]:
    """Return the paths of an adapter's LoRA layers, told by its parameters. Walking all modules of
    a model costs more than merging small ones."""
    paths: dict[str, None] = {}
    for name in metas:
        if adapter_tensor_name(name, adapter) is not None:
            parts = name.split(".")
            paths[".".join(parts[: next(i for i, p in enumerate(parts) if p in LORA)])] = None
    return list(paths)


def _merges_of(
    layer: Any, path: str, adapter: str, metas: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, _ParamAddition]]:
    kind, scaling = own_class(layer).__name__, float(layer.scaling[adapter])
    is_dora = type(layer.lora_variant.get(adapter)).__name__.startswith("Dora")
    magnitude = f"{path}.lora_magnitude_vector.{adapter}.weight" if is_dora else ""
    a, b = f"{path}.lora_A.{adapter}.weight", f"{path}.lora_B.{adapter}.weight"
    if kind in ("Linear", "Linear4bit", "Linear8bitLt"):
        transposed = bool(getattr(layer, "fan_in_fan_out", False))
        form = "dora" if is_dora else "product"
        yield _base(path, "weight"), _ParamAddition(form, a, b, scaling, magnitude, transposed)
        bias = f"{path}.lora_B.{adapter}.bias"
        if bias in metas:
            yield _base(path, "bias"), _ParamAddition("bias", "", bias, scaling)
    elif kind == "Embedding" and not is_dora:
        a, b = f"{path}.lora_embedding_A.{adapter}", f"{path}.lora_embedding_B.{adapter}"
        yield _base(path, "weight"), _ParamAddition("product", a, b, scaling, is_transposed=True)
    elif kind == "ParamWrapper":
        name = _base(path, layer.parameter_name)
        is_swapped = bool(getattr(layer, "_did_swap_in_out_features", False))
        is_transposed = layer.num_experts > 1 and not is_swapped
        yield name, _ParamAddition("product", a, b, scaling, is_transposed=is_transposed)
    else:
        raise UnsupportedError(
            f"{path}: LoRA on a layer of kind {kind}{' with DoRA' if is_dora else ''} cannot be "
            f"merged during a push: {MERGE_A_COPY}"
        )


def _base(path: str, name: str) -> str:
    found = base_name_in_peft(f"{path}.base_layer.{name}")
    assert found is not None
    return found


_TIED: WeakKeyDictionary[ModelWalk, list[set[str]]] = WeakKeyDictionary()


def _tied_names(model: torch.nn.Module) -> list[set[str]]:
    """Return base names of parameters that several modules share; searched anew once the model has
    other ones."""
    found = walk(model)
    if found not in _TIED:
        _TIED[found] = _find_tied(model)
    return _TIED[found]


def _find_tied(model: torch.nn.Module) -> list[set[str]]:
    by_id: dict[int, set[str]] = {}
    for raw, param in model.named_parameters(remove_duplicate=False):
        name = base_name_in_peft(raw)
        if name is not None:
            by_id.setdefault(id(param), set()).add(name)
    return [names for names in by_id.values() if len(names) > 1]


# -- the sums ----------------------------------------------------------------------


def _accumulated(*tensors: torch.Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _product(
    merge: _ParamAddition,
    weight: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Merge ``weight`` with a product of factors into ``out``.

    Both are (out features, in features), or transposed, or have a dim of experts in front.
    """
    a, b = tensors[merge.a], tensors[merge.b]
    dtype, is_exact = _accumulated(weight, a, b), are_exact(a, b)
    a, b = a.to(dtype), b.to(dtype)
    parts = [(weight, out, b, a)]
    if weight.dim() == 3:
        num = len(weight)
        parts = [(weight[i], out[i], *factors_of(i, num, b, a)) for i in range(num)]
    for own, to, own_b, own_a in parts:
        merge_block(
            own,
            to,
            own_b,
            own_a,
            merge.scaling,
            is_exact=is_exact,
            is_transposed=merge.is_transposed,
            on_device=weight.device.type != "cpu",
        )


def _dora(
    merge: _ParamAddition,
    weight: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Merge ``weight`` with DoRA's factors into ``out``; both (out features, in features), or
    transposed."""
    a, b = tensors[merge.a], tensors[merge.b]
    dtype, is_exact = _accumulated(weight, a, b), are_exact(a, b)
    a = a.to(dtype)
    if merge.is_transposed:
        weight, out = weight.t(), out.t()
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        sums = product(b[rows].to(dtype), a, is_exact=is_exact)
        total = weight[rows].to(dtype) + sums * merge.scaling
        norm = torch.linalg.vector_norm(total, dim=1)
        total *= (tensors[merge.magnitude][rows].to(dtype) / norm)[:, None]
        out[rows].copy_(total)


def _bias(
    merge: _ParamAddition,
    weight: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    bias = tensors[merge.b]
    dtype = _accumulated(weight, bias)
    out.copy_(weight.to(dtype) + bias.to(dtype) * merge.scaling)


_FORMS = {"product": _product, "dora": _dora, "bias": _bias}
# Why a form is not merged where the shards lie.
_WHY_WHOLE = {
    "dora": "DoRA needs whole rows, and is merged at rank 0",
    "bias": "lora_bias is merged at rank 0",
}
