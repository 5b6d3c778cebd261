"""Parameters of all kinds of trainers, by name: how they are read, and what changed since.

One file: what is read and what is watched is found by one walk over the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, Protocol, cast

import torch
from torch.nn.parameter import is_lazy

from trainer_side.params.elements import Elements, HeldRun
from trainer_side.params.names import unwrapped_name
from trainer_side.ranks.ranks import SENDER
from weft_rl.contract.errors import InvalidManifestError, ModelChangedError
from weft_rl.contract.tensors import DataType, is_output_layer

_DTYPES = {getattr(torch, dtype.torch_name): dtype for dtype in DataType}


class Params(Protocol):
    """Parameters of one model, by their own unwrapped names."""

    kind: str
    """Kind of trainer that holds them, for messages: "plain module", "FSDP2", ..."""
    is_collective: bool
    """True if ``fetch`` needs every rank; the same on all of them."""

    metas: Mapping[str, torch.Tensor]
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

    def elements(self, name: str) -> Elements | None:
        """Return a parameter's elements as the ranks hold it; None where ``fetch`` must gather or
        compute it."""

    def why_gathered(self, name: str) -> str:
        """Return the reason why ``elements`` is None, for messages; empty if it is not."""
        return ""

    def prepare(self) -> None:
        """Bring inputs of ``elements`` to every rank, before any is read. Collective, blocks."""
        return

    def release(self) -> None:
        """Free what ``prepare`` brought, after a push."""
        return

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole parameter by reference; only where not ``is_collective``."""

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and elements of what this rank holds, in whatever shape; not collective."""

    def check(self, names: Iterable[str]) -> None:
        """Refuse parameters whose elements cannot be read as they are; not collective.

        Raises:
            InvalidManifestError: See ``check_readable``.
        """


def own_dtype(name: str, dtype: torch.dtype) -> DataType:
    """Return the dtype of a tensor as it is.

    Raises:
        InvalidManifestError: It cannot travel.
    """
    own = _DTYPES.get(dtype)
    if own is None:
        raise InvalidManifestError(f"tensor {name!r} is {dtype}, which cannot be sent")
    return own


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor, real or meta, whose elements do not lie in rows.

    Raises:
        InvalidManifestError: It is sparse, or in a library's own layout.
    """
    if getattr(tensor, "layout", torch.strided) is not torch.strided:
        raise InvalidManifestError(
            f"tensor {name!r} is {tensor.layout}, which cannot be sent: make it dense "
            "(to_dense()) before the push"
        )


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements are not in its memory as torch's own are.

    Raises:
        InvalidManifestError: They are elsewhere (meta, lazy), made up (FakeTensor), of a dtype that
            cannot travel, or held by a class that computes them (torchao's, say).
    """
    kind = type(tensor)
    if is_lazy(tensor):
        raise InvalidManifestError(f"{name!r} has no elements yet: call its lazy module once first")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.is_nested:
        held = "a nested tensor" if tensor.is_nested else f"of the class {kind.__name__}"
        raise InvalidManifestError(
            f"{name!r} is {held}, whose elements cannot be sent as they are: push the plain "
            "tensors that it stands for by push_tensors (dequantised, unwrapped), or train on such"
        )
    if tensor.is_meta:
        raise InvalidManifestError(
            f"parameter {name!r} is on the meta device: its values are elsewhere "
            "(offloaded?); load it first"
        )
    check_layout(name, tensor)
    own_dtype(name, tensor.dtype)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether ``check_readable`` lets a tensor pass."""
    try:
        check_readable("", tensor)
    except InvalidManifestError:
        return False
    return True


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


class WholeElements:
    """Elements of a parameter that lies whole at the sender, or of a part; see ``Elements``.

    Args:
        param: By reference: it may have other memory at the next push.
        span: First element of the part, and the one behind the last; None for all.
    """

    def __init__(self, param: torch.Tensor, span: tuple[int, int] | None = None) -> None:
        self._param, self._span = param, span

    @property
    def runs(self) -> Sequence[HeldRun]:
        begin, end = self._span or (0, self._param.numel())
        return (HeldRun(SENDER, 0, end - begin),)

    def held(self, number: int) -> torch.Tensor | None:
        if self._span is None:
            return self._param
        is_row = self._param.is_contiguous()
        return self._param.detach().view(-1)[slice(*self._span)] if is_row else None

    def fill(self, number: int, out: torch.Tensor) -> None:
        """See ``Elements``; copies a parameter that does not lie in a row."""
        begin, end = self._span or (0, None)
        out.copy_(self._param.detach().reshape(-1)[begin:end])

    def cut(self, blocks: Sequence[tuple[int, int]]) -> list[WholeElements | None]:
        """Cut as ``HeldElements.cut`` does; None where the parameter does not lie in a row."""
        is_row = self._param.is_contiguous()
        return [WholeElements(self._param, block) if is_row else None for block in blocks]


class WholeParams(Params):
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
        if outs is not None:
            copy_into(outs, [self._tensors[name] for name in names])

    def elements(self, name: str) -> WholeElements:
        return WholeElements(self._tensors[name])

    def whole(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.detach()) for name, tensor in self._tensors.items())

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            check_readable(name, self._tensors[name])


# -- what a model consists of ----------------------------------------------------
#
# Wrappers are told by their classes. A user's module may be called ``module``, too, and wrappers
# hand attributes of what they wrap through.

# Package and class of each wrapper: what it is called in messages, and its inner module's name.
_WRAPPERS = {
    ("torch", "DistributedDataParallel"): ("DDP", "module"),
    ("torch", "DataParallel"): ("DataParallel", "module"),
    ("torch", "FullyShardedDataParallel"): ("FSDP1", "_fsdp_wrapped_module"),
    ("torch", "OptimizedModule"): ("compiled", "_orig_mod"),
    ("torch", "ActivationWrapper"): ("checkpointed", "_checkpoint_wrapped_module"),
    ("torch", "AveragedModel"): ("averaged", "module"),
    ("deepspeed", "DeepSpeedEngine"): ("DeepSpeed", "module"),
    ("megatron", "DistributedDataParallel"): ("DDP", "module"),
    ("megatron", "Float16Module"): ("Float16Module", "module"),
}


def wrapper_of(module: torch.nn.Module) -> tuple[str, str]:
    """Return a wrapper's name in messages, and that of its inner module; empty for others."""
    kind: Any = type(module)
    return _wrapper_of_class(kind)


@lru_cache(maxsize=4096)
def _wrapper_of_class(kind: Any) -> tuple[str, str]:
    known = (_WRAPPERS.get((_package(c), c.__name__)) for c in kind.__mro__)
    return next((found for found in known if found is not None), ("", ""))


def own_class(module: torch.nn.Module) -> type:
    """Return the class of a module without those that torch derives from it to change the module in
    its place: ``FSDPLinear`` of FSDP2, say."""
    kind = type(module)
    while len(kind.__bases__) == 2 and _package(kind.__bases__[0]) == "torch":
        inner = kind.__bases__[1]
        if kind.__name__ not in (f"FSDP{inner.__name__}", f"DDP{inner.__name__}"):
            break
        kind = inner
    return kind


@lru_cache(maxsize=4096)
def is_pefts(kind: Any, *names: str) -> bool:
    return any(c.__name__ in names and _package(c) == "peft" for c in kind.__mro__)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


Table = dict[str, object]
_KEPT = "_weft_walk"


class ModelWalk:
    """Modules, parameters and persistent buffers of a model, kept in the model itself, so that they
    live as long. A copy or a pickle of the model is without them."""

    def __init__(self, module: torch.nn.Module) -> None:
        #: By path; of a wrapper and what it wraps, the latter.
        self.by_path, self.modules, self.named, self.buffers, self._tables = _walk(module)
        self._sizes, self._keys, self._entries = _state(self._tables)
        #: What was found out about these parameters, by whoever did.
        self.kept: object = None

    def at(self, path: str) -> torch.nn.Module:
        """Return the module of a path without the names of wrappers, itself without wrappers."""
        return self.by_path[f"{path}." if path else ""]

    def is_true(self) -> bool:
        """Return whether every module still has the same children and parameters, by the same
        names."""
        sizes, keys, entries = _state(self._tables)
        is_shaped_alike = sizes == self._sizes and keys == self._keys
        return is_shaped_alike and all(map(is_, entries, self._entries))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def walk(module: torch.nn.Module) -> ModelWalk:
    """Return all modules, each once and by its path; all parameters as ``named_parameters`` names
    and orders them, without the names of wrappers, and by the embedding's name where an output
    layer is tied to it; and the buffers that a checkpoint holds.

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
        own = module.named_parameters()  # the user's own word counts
        found.named = {unwrapped_name(name): param for name, param in own}
    return found


def last_walk(module: torch.nn.Module) -> ModelWalk:
    """Return the walk of a model that was opened a moment ago, without looking at it again."""
    found = module.__dict__.get(_KEPT)
    if isinstance(found, ModelWalk) and found.modules[0] is module:
        return found
    return walk(module)


def _walk(
    module: torch.nn.Module,
) -> tuple[
    dict[str, torch.nn.Module],
    list[torch.nn.Module],
    dict[str, torch.nn.Parameter],
    dict[str, torch.Tensor],
    list[Table],
]:
    """Walk a module in one pass; torch's own generators would walk it thrice."""
    by_path: dict[str, torch.nn.Module] = {}
    modules: list[torch.nn.Module] = []
    named: dict[str, torch.nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    tables: list[Table] = []
    seen: set[int] = set()
    first: dict[int, str] = {}
    waiting = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        modules.append(part)
        by_path[prefix] = part
        tables += [cast(Table, part._parameters), cast(Table, part._modules)]
        for name, param in part._parameters.items():
            if param is None:
                continue
            known = first.setdefault(id(param), prefix + name)
            if known == prefix + name:
                named[known] = param
            elif is_output_layer(known.rpartition(".")[0]):  # checkpoints have the embedding's name
                first[id(param)] = prefix + name
                named[prefix + name] = named.pop(known)
        if held := _persistent(part):
            tables.append(cast(Table, part._buffers))
            buffers.update({prefix + name: buffer for name, buffer in held.items()})
        wrapped = wrapper_of(part)[1]
        children = [
            (prefix if name == wrapped else f"{prefix}{name}.", child)
            for name, child in part._modules.items()
            if child is not None
        ]
        waiting.extend(reversed(children))
    return by_path, modules, named, buffers, tables


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


# -- what changed since a moment -----------------------------------------------------
#
# Nothing is copied: of each tensor its place, its version counter and a few of its elements are
# kept. torch counts in-place changes, but not those by ``.data``, by fused optimizers, or by
# kernels that are given an address: the elements tell of these.

#: Elements of each tensor that are kept, from its middle.
_NUM_ELEMENTS = 16
_MAX_NAMED = 3

#: Settings of a model that a push depends on, by what they are called in messages.
Settings = Mapping[str, object]


@dataclass(frozen=True)
class TensorStates:
    """States of tensors at one moment, as values; they keep no tensor alive."""

    names: tuple[str, ...]
    places: list[tuple[object, ...]]
    """Object, address, shape, dtype and device of each tensor."""
    versions: list[int]
    """Number of in-place changes of each that torch has counted."""
    elements: list[bytes]
    """Some elements of all tensors, end to end for each dtype and device."""
    spans: Mapping[str, tuple[int, int, int]]
    """Entry of ``elements``, first byte, and the one behind the last, of each tensor that lies in
    a row."""

    def moved(self, now: TensorStates) -> dict[str, str]:
        """Map the names of tensors that changed since to what became of them."""
        if self == now:
            return {}
        index, found = {name: i for i, name in enumerate(now.names)}, dict[str, str]()
        for own, name in enumerate(self.names):
            if (other := index.get(name)) is None:
                found[name] = "is gone"
            elif now.places[other] != self.places[own]:
                found[name] = "was replaced"
            elif now.versions[other] != self.versions[own] or now._of(name) != self._of(name):
                found[name] = "was changed in place"
        return found

    def has_elements_of(self, other: TensorStates) -> bool:
        """Return whether the tensors of both have the same elements, wherever they lie."""
        names = self.spans.keys() & other.spans.keys()
        return all(self._of(name) == other._of(name) for name in names)

    def _of(self, name: str) -> bytes:
        entry, begin, end = self.spans.get(name, (0, 0, 0))
        return self.elements[entry][begin:end] if self.elements else b""


@dataclass(frozen=True)
class _TensorPlaces:
    """Places of tensors, and of the elements of each that are kept."""

    held: dict[str, tuple[torch.Tensor, bool]]
    """Each tensor, and whether it has an address."""
    places: list[tuple[object, ...]]
    spans: dict[str, tuple[int, int, int]]
    parts: list[list[torch.Tensor]]
    """Elements that are kept, for each dtype and device."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> _TensorPlaces:
        """Find the places of tensors."""
        held = {
            own: (tensor, is_readable(tensor))
            for name, param in tensors.items()
            for own, tensor in ((name, param), *_packed_parts(name, param))
        }
        spans: dict[str, tuple[int, int, int]] = {}
        parts: dict[object, list[torch.Tensor]] = {}
        ends: dict[object, int] = {}
        for name, (tensor, has_elements) in held.items():
            if not (has_elements and tensor.numel() and tensor.is_contiguous()):
                continue
            flat = tensor.detach().view(-1)
            begin = max(0, flat.numel() // 2 - _NUM_ELEMENTS // 2)
            part = flat[begin : begin + _NUM_ELEMENTS]
            key = tensor.dtype, tensor.device
            at = ends.setdefault(key, 0)
            ends[key] = at + part.numel() * part.element_size()
            parts.setdefault(key, []).append(part)
            spans[name] = [*parts].index(key), at, ends[key]
        return cls(held, _places(held), spans, [*parts.values()])


class TensorWatcher:
    """Watcher of the states of tensors; kept with the model that they are of. Thread-safe.

    Args:
        tensors: Tensors by the names of their parameters; referenced.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._found: _TensorPlaces | None = None

    def states(self) -> TensorStates:
        """Return the states now; waits for an accelerator."""
        found = self._found
        if found is None or _places(found.held) != found.places:
            found = self._found = _TensorPlaces.of(self.tensors)
        versions = [-1 if t.is_inference() else t._version for t, _ in found.held.values()]
        elements = [
            torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in found.parts
        ]
        return TensorStates(tuple(found.held), found.places, versions, elements, found.spans)


def _places(held: Mapping[str, tuple[torch.Tensor, bool]]) -> list[tuple[object, ...]]:
    return [
        (id(t), t.data_ptr() if has_address else 0, t.shape, t.dtype, t.device)
        for t, has_address in held.values()
    ]


class ModelWatcher:
    """Watcher of those tensors and settings of a model that a push reads in place.

    Args:
        tensors: Watcher of the tensors that are read. Whatever takes their place in the
            model is not read.
        settings: Function that returns the settings, then and later.
        now: Settings now, if they are known.
    """

    def __init__(
        self,
        tensors: TensorWatcher,
        settings: Callable[[], Settings] = dict,
        now: Settings | None = None,
    ) -> None:
        self._watched, self._read_settings = tensors, settings
        self._settings = dict(settings() if now is None else now)
        self.states = tensors.states()

    def moved(self) -> list[str]:
        """Return a phrase for each tensor and setting that changed since; empty if none did."""
        moved = self.states.moved(self._watched.states())
        found = [f"{name!r} {how}" for name, how in moved.items()]
        now = self._read_settings()
        return found + [
            f"{name} was {value!s:.100}, is {now.get(name)!s:.100}"
            for name, value in self._settings.items()
            if now.get(name) != value
        ]

    def check(self) -> None:
        """Refuse a model that changed since.

        Raises:
            ModelChangedError: Names what changed.
        """
        try:
            moved = self.moved()
        except Exception as error:  # noqa: BLE001 (a model that cannot be looked at any more)
            moved = [f"it cannot be looked at any more ({error!r:.200})"]
        if moved:
            raise model_changed(moved)


def model_changed(moved: Collection[str]) -> ModelChangedError:
    """Return the error of a push whose content changed while it was read."""
    named = list(moved)
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return ModelChangedError(
        f"what is pushed was changed while it was read: {'; '.join(named[:_MAX_NAMED])}{more}. "
        "Nothing was committed: push again, and let nothing change it until the push has returned "
        "(an async push copies it first, where the host has room)",
        metadata={"first": named[0][:200], "num_changed": str(len(named))},
    )


def _packed_parts(name: str, param: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a packed parameter's values are computed with, besides its own."""
    if not is_quantised(param):
        return []
    found: list[tuple[str, torch.Tensor]] = []
    waiting = [("state", getattr(param, "quant_state", None)), ("SCB", getattr(param, "SCB", None))]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append((f"{name} ({key})", value))
        elif value is not None:
            waiting += [(key, getattr(value, own, None)) for own in ("absmax", "code", "offset")]
            waiting.append((f"{key}2", getattr(value, "state2", None)))
    return found
