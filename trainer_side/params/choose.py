"""Detection of the kind of trainer that holds a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist

from trainer_side.params.elements import HeldRun
from trainer_side.params.names import unwrapped_name
from trainer_side.params.params import (
    Params,
    TensorWatcher,
    WholeParams,
    is_pefts,
    is_quantised,
    is_zero3,
    walk,
    wrapper_of,
)
from trainer_side.params.quantised import DequantisedParams
from trainer_side.params.sharded import GatheredParam, Sharded, ShardedParams, of_zero3
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.ranks.torch_ranks import TorchRanks
from weft_rl.containers import LruMapping
from weft_rl.contract.errors import InvalidRequestError

#: How a trainer holds its model; "auto" looks. "whole" is plain, DDP, ZeRO-1 and 2.
Kind = Literal["auto", "whole", "fsdp1", "fsdp2", "zero3"]
#: Sources of one model that are kept: its base, that merged, some adapters.
_MAX_SOURCES = 8
_SHARDED = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "zero3": "DeepSpeed ZeRO-3"}


@dataclass(frozen=True)
class OpenedModel:
    """Trainer's model without its wrappers, and where its parameters are."""

    module: torch.nn.Module
    """The user's own module: a PreTrainedModel, a PEFT model, any other."""
    params: Params
    """Parameters by their names without wrappers, tied ones once, and persistent buffers."""
    buffers: frozenset[str] = frozenset()
    """Names of the buffers among them; a checkpoint may hold them."""
    sources: LruMapping[object, Any] = field(init=False, repr=False, compare=False,
                                      default_factory=lambda: LruMapping(_MAX_SOURCES))  # fmt: skip
    """Sources made of these parameters, kept for later pushes while the parameters stay the
    same."""

    watchers: dict[str, TensorWatcher] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Watchers of some of these parameters, by what they are of."""

    @property
    def is_adapted(self) -> bool:
        """True if the module has adapters of PEFT's."""
        return is_adapted(self.module)

    @property
    def base(self) -> torch.nn.Module:
        """Module that the adapters are on; the module itself if it has none."""
        return base_model(self.module)

    def watcher(
        self, of: str, names: Callable[[], Mapping[str, str]] | None = None
    ) -> TensorWatcher:
        """Return the watcher of parameters and buffers, or of some of them; kept for later pushes.

        Args:
            of: Name of the watcher.
            names: Returns the parameters to watch, with what they are called there.
        """
        found = self.watchers.get(of)
        if found is None:
            held = self.held()
            if names is not None:
                held = {called: held[own] for own, called in names().items() if own in held}
            found = self.watchers[of] = TensorWatcher(held)
        return found

    def held(self) -> dict[str, torch.Tensor]:
        """Return the tensors with this rank's elements of parameters and buffers, by reference."""
        if isinstance(self.params, ShardedParams):
            return dict(self.params.local())
        walked = walk(self.module)
        return {**walked.named, **walked.buffers}


def open_model(model: torch.nn.Module, ranks: Ranks, kind: Kind = "auto") -> OpenedModel:
    """Open a model as its trainer holds it: plain, DDP, FSDP1, FSDP2 or DeepSpeed.

    Not collective; parameters are by reference.

    Raises:
        InvalidRequestError: It is not of the ``kind`` that it should be.
        UnsupportedError: It is sharded over ranks that do not push together.
    """
    opened = _open(model, ranks)
    found = opened.params.kind
    if kind not in ("auto", _kind_of(opened.params)):
        raise InvalidRequestError(
            f"the model is held as {found!r}, not as {kind!r}: wrap it before it is pushed, or "
            "leave the kind to be found out"
        )
    return opened


def _open(model: torch.nn.Module, ranks: Ranks) -> OpenedModel:
    module, wrapper = unwrap(model)
    rank_of = _rank_of(ranks)
    found = walk(module)
    buffers = frozenset(found.buffers)
    if wrapper == "FSDP1" or _has_fsdp1(found.modules):
        placed = _fsdp1(model, found.buffers, rank_of)
        return OpenedModel(module, ShardedParams(placed, _SHARDED["fsdp1"], ranks), buffers)
    state = None
    if _has_fsdp2(found.modules):
        from trainer_side.params.dtensor import reshard

        reshard(found.modules)
        found = walk(module)
        state = _state([*found.named.values(), *found.buffers.values()])
    else:
        state = _whole_state([*found.named.values(), *found.buffers.values()])
    kept, key = found.kept, (wrapper, ranks, state)
    if state is not None and isinstance(kept, _KeptModel) and kept.key == key:
        return kept.opened
    held = {**found.named, **found.buffers}
    opened = replace(_opened(module, held, ranks, wrapper, rank_of), buffers=buffers)
    found.kept = None if state is None else _KeptModel(opened, key)
    return opened


@dataclass(frozen=True)
class _KeptModel:
    """Opened model, kept for the next push if every parameter has the same elements in the same
    places. To find out anew takes longer than to send it. Its parameters are referenced, so that
    identities hold."""

    opened: OpenedModel
    key: tuple[str, Ranks, list[object] | None]


def _whole_state(parameters: Collection[torch.Tensor]) -> list[object] | None:
    """Return shapes, dtypes and devices of parameters that are whole here and packed by no library.
    Return None where there are others."""
    has_zero3 = _is_loaded("deepspeed") and any(map(is_zero3, parameters))
    if has_zero3 or {*map(type, parameters)} - {torch.nn.Parameter, torch.Tensor}:
        return None
    return [*chain.from_iterable(map(attrgetter("shape", "dtype", "device"), parameters))]


def _state(parameters: Iterable[torch.Tensor]) -> list[object] | None:
    """Return a fingerprint of where parameters' elements are; None if only their framework
    knows."""
    state: list[object] = []
    for param in parameters:
        local: Any = getattr(param, "_local_tensor", param)
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or is_zero3(param):
            return None
        state += (getattr(param, "_spec", None), id(param), id(local), local.data_ptr(),
                  local.shape, local.dtype)  # fmt: skip
    return state


def _opened(
    module: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    ranks: Ranks,
    wrapper: str,
    rank_of: Mapping[int, int],
) -> OpenedModel:
    named = dict(parameters)
    places = _ParamPlaces(rank_of)
    kinds = {places.kind(param) for param in named.values()} - {""}
    if not kinds and any(map(is_quantised, named.values())):
        return OpenedModel(module, DequantisedParams(module, named, wrapper or "plain"))
    if not kinds:
        return OpenedModel(module, WholeParams(named, wrapper or "plain"))
    placed = {name: places.of(param) for name, param in named.items()}
    return OpenedModel(module, ShardedParams(placed, " and ".join(sorted(kinds)), ranks))


def _kind_of(params: Params) -> str:
    if not params.is_collective:
        return "whole"
    return next((kind for kind, name in _SHARDED.items() if name in params.kind), "auto")


def _is_loaded(name: str) -> bool:
    """Return whether the application has imported a module that would take long to import."""
    return name in sys.modules


class _ParamPlaces:
    """Locations of one model's parameters over the ranks."""

    def __init__(self, rank_of: Mapping[int, int]) -> None:
        self._rank_of = rank_of
        self._dtensors: Any = None  # made for the first

    def kind(self, param: torch.Tensor) -> str:
        """Return the framework that shards a parameter; empty if it is whole here."""
        if is_zero3(param):
            return _SHARDED["zero3"]
        return _SHARDED["fsdp2"] if _is_dtensor(param) else ""

    def of(self, param: torch.Tensor) -> Sharded | GatheredParam:
        """Return the location of a parameter's elements."""
        if is_zero3(param):
            return of_zero3(param, self._rank_of)
        if _is_dtensor(param):
            if self._dtensors is None:
                from trainer_side.params.dtensor import DTensorPlaces

                self._dtensors = DTensorPlaces(self._rank_of)
            placed: Sharded | GatheredParam = self._dtensors.of(param)
            return placed
        return Sharded(param.shape, param.dtype, (HeldRun(SENDER, 0, param.numel()),), param)


def _is_dtensor(param: torch.Tensor) -> bool:
    if not _is_loaded("torch.distributed.tensor"):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(param, DTensor)


def _has_fsdp2(modules: Iterable[torch.nn.Module]) -> bool:
    if not _is_loaded("torch.distributed.fsdp"):
        return False
    from torch.distributed.fsdp import FSDPModule

    return _has(modules, FSDPModule)


def _has_fsdp1(modules: Iterable[torch.nn.Module]) -> bool:
    if not _is_loaded("torch.distributed.fsdp"):
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return _has(modules, FullyShardedDataParallel)


def _has(modules: Iterable[torch.nn.Module], kind: type) -> bool:
    """Return whether any module is of a class. Distinct classes are checked: modules are thousands,
    classes few."""
    return any(issubclass(own, kind) for own in set(map(type, modules)))


def _fsdp1(
    model: torch.nn.Module, buffers: Mapping[str, torch.Tensor], rank_of: Mapping[int, int]
) -> dict[str, Sharded | GatheredParam]:
    from torch.distributed.fsdp import FlatParameter

    from trainer_side.params.fsdp1 import units_of

    placed: dict[str, Sharded | GatheredParam] = {
        unwrapped_name(name): shard for name, shard in units_of(model, rank_of)
    }
    for raw, param in model.named_parameters():  # those that FSDP was told to ignore
        name = unwrapped_name(raw)
        if name not in placed and not isinstance(param, FlatParameter):
            placed[name] = _ParamPlaces(rank_of).of(param)
    for raw, buffer in buffers.items():  # which FSDP does not shard
        placed[raw] = _ParamPlaces(rank_of).of(buffer)
    return placed


def unwrap(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return the user's own module, and the name of its outermost wrapper."""
    wrapper = ""
    while True:
        kind, child = wrapper_of(model)
        inner = model._modules.get(child) if child else _tuned(model)
        if inner is None:
            return model, wrapper
        wrapper = wrapper or kind
        model = inner


def is_peft_model(module: torch.nn.Module) -> bool:
    """Return whether a module is PEFT's own around a base, as ``get_peft_model`` makes it."""
    kind: Any = type(module)
    return is_pefts(kind, "PeftModel", "PeftMixedModel")


def is_adapted(module: torch.nn.Module) -> bool:
    """Return whether a module has adapters of PEFT's: it is a model of PEFT's, or they were put
    into its own layers (``add_adapter``, ``inject_adapter_in_model``)."""
    if is_peft_model(module):
        return True
    if not isinstance(getattr(module, "peft_config", None), dict):
        return False
    kinds: set[Any] = {*map(type, module.modules())}
    return any(is_pefts(kind, "BaseTunerLayer", "AuxiliaryTrainingWrapper") for kind in kinds)


def base_model(module: Any) -> torch.nn.Module:
    """Return the base of a model with adapters of PEFT's, without wrappers; another module, and one
    whose own layers have them, is its own base."""
    return unwrap(module.base_model)[0] if is_peft_model(module) else module


def _tuned(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the model inside a tuner of PEFT's (``LoraModel``), which lies in a PEFT model."""
    kind: Any = type(model)
    return model._modules.get("model") if is_pefts(kind, "BaseTuner") else None


def _rank_of(ranks: Ranks) -> dict[int, int]:
    """Map the application's ranks to the trainer's."""
    if isinstance(ranks, TorchRanks):
        return {member: rank for rank, member in enumerate(ranks.members)}
    is_distributed = dist.is_available() and dist.is_initialized()
    return {dist.get_rank() if is_distributed else 0: SENDER}
