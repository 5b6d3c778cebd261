"""Interface of all kinds of trainers: parameters by name, brought to the sender."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Protocol, cast

import torch


class Params(Protocol):
    """Parameters of one model, by their own unwrapped names."""

    kind: str
    """Kind of trainer that holds them, for messages: "plain module", "FSDP2", ..."""
    is_collective: bool
    """True if ``fetch`` needs every rank; the same on all of them."""

    @property
    def metas(self) -> Mapping[str, torch.Tensor]:
        """Meta tensors of whole shape and own dtype by name, in order."""

    def fetch(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        outs: Sequence[torch.Tensor] | None,
    ) -> None:
        """Bring parameters to the sender.

        Args:
            names: Names of the parameters; the same on every rank, in the same order of calls.
            dtypes: Dtype to cast each to; the same on every rank.
            outs: At the sender: contiguous tensors of those dtypes and the whole shapes to
                copy into, owned by the caller, on the CPU or the accelerator that NCCL sends
                from. None elsewhere.

        Blocks for the copies. Collective where ``is_collective``.
        """

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole parameter by reference; only where not ``is_collective``."""

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and elements of what this rank holds, in whatever shape; not collective."""


def is_quantised(param: torch.Tensor) -> bool:
    """Return whether bitsandbytes packs a parameter."""
    return type(param).__name__ in ("Params4bit", "Int8Params")


def is_zero3(param: torch.Tensor) -> bool:
    """Return whether ZeRO-3 manages a parameter; its shape does not tell (small ones stay)."""
    return hasattr(param, "ds_id")


def copy_into(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy and cast; one call for all, which is 3 times faster for many small ones."""
    with torch.no_grad():
        torch._foreach_copy_(list(views), list(tensors))


@lru_cache(maxsize=4096)
def meta_tensor(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of shape and dtype alone; one serves all parameters that share them."""
    return torch.empty(shape, dtype=dtype, device="meta")


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of a tensor's shape and dtype."""
    return meta_tensor(tensor.shape, tensor.dtype)


def whole_tensors(
    params: Params, names: Sequence[str], *, wanted: bool
) -> dict[str, torch.Tensor] | None:
    """Return whole parameters in their own dtypes, or None unless ``wanted``.

    They are references where they lie whole here, else new memory; collective like
    ``Params.fetch``.
    """
    if not params.is_collective:
        held = {name: params.whole(name) for name in names}
        return held if wanted else None
    metas = [params.metas[name] for name in names]
    outs = [torch.empty(m.shape, dtype=m.dtype) for m in metas] if wanted else None
    params.fetch(names, [meta.dtype for meta in metas], outs)
    return None if outs is None else dict(zip(names, outs, strict=True))


class WholeParams:
    """Parameters that the sender holds whole: a plain module, DDP, ZeRO-1 and 2.

    Args:
        tensors: Kept by reference, on any device; they must not change while a push
            reads them.
        kind: Kind of trainer that holds them, for messages.
    """

    is_collective = False

    def __init__(self, tensors: Mapping[str, torch.Tensor], kind: str) -> None:
        self.kind = kind
        self._tensors = tensors
        self.metas = {name: as_meta(tensor) for name, tensor in tensors.items()}

    def fetch(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        outs: Sequence[torch.Tensor] | None,
    ) -> None:
        """See ``Params.fetch``."""
        if outs is not None:
            copy_into(outs, [self._tensors[name] for name in names])

    def whole(self, name: str) -> torch.Tensor:
        """See ``Params.whole``."""
        return self._tensors[name].detach()

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Params.local``."""
        return ((name, tensor.detach()) for name, tensor in self._tensors.items())


def resident_param(params: Params, name: str) -> torch.Tensor | None:
    """Return a parameter that lies whole in this process, by reference. Return None where it is put
    together or computed."""
    return params.whole(name) if type(params) is WholeParams else None


Table = dict[str, object]
_KEPT = "_weft_walk"


class ModelWalk:
    """Modules, parameters and persistent buffers of a model, kept in the model itself, so that they
    live as long. A copy or a pickle of the model is without them."""

    def __init__(self, module: torch.nn.Module) -> None:
        #: By path; a module that has several paths, by one of them.
        self.by_path, self.named, self.buffers, self._tables = _walk(module)
        self.modules = list(self.by_path.values())
        self._sizes, self._keys, self._entries = _state(self._tables)
        #: What was found out about these parameters, by whoever did.
        self.kept: object = None

    def is_true(self) -> bool:
        """Return whether every module still has the same children and parameters, by the same
        names."""
        sizes, keys, entries = _state(self._tables)
        is_shaped_alike = sizes == self._sizes and keys == self._keys
        return is_shaped_alike and all(map(is_, entries, self._entries))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def walk(module: torch.nn.Module) -> ModelWalk:
    """Return all modules, each once; all parameters as ``named_parameters`` names and orders them;
    and the buffers that a checkpoint holds.

    A PEFT model has thousands of modules: to walk it takes longer than to send its adapter; to
    check that it is unchanged takes a fifth of that.
    """
    found = module.__dict__.get(_KEPT)
    if isinstance(found, ModelWalk) and found.modules[0] is module and found.is_true():
        return found
    found = ModelWalk(module)
    if type(module).named_parameters is torch.nn.Module.named_parameters:
        module.__dict__[_KEPT] = found
    else:
        found.named = dict(module.named_parameters())  # the user's own word counts
    return found


def _walk(
    module: torch.nn.Module,
) -> tuple[
    dict[str, torch.nn.Module], dict[str, torch.nn.Parameter], dict[str, torch.Tensor], list[Table]
]:
    """Walk a module in one pass; torch's own generators would walk it thrice."""
    modules: dict[str, torch.nn.Module] = {}
    named: dict[str, torch.nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    tables: list[Table] = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        modules[prefix] = part
        tables += [cast(Table, part._parameters), cast(Table, part._modules)]
        for name, param in part._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                named[prefix + name] = param
        if held := _persistent(part):
            tables.append(cast(Table, part._buffers))
            buffers.update({prefix + name: buffer for name, buffer in held.items()})
        children = [(f"{prefix}{name}.", c) for name, c in part._modules.items() if c is not None]
        waiting.extend(reversed(children))
    return modules, named, buffers, tables


def _persistent(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that its state dict has."""
    passing = part._non_persistent_buffers_set
    return {k: v for k, v in part._buffers.items() if v is not None and k not in passing}


def _state(tables: Sequence[Table]) -> tuple[list[int], list[str], list[object]]:
    """Return sizes, keys and values of all entries, without a step of Python for each."""
    return (
        [*map(len, tables)],
        [*chain.from_iterable(tables)],
        [*chain.from_iterable(map(dict.values, tables))],
    )
