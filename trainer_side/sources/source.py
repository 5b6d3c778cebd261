"""Sources of a push's tensors, read bucket by bucket.

A source never copies the model: its metas say what will be sent, and ``read``
fills the packer's views. In a sharded trainer every rank has one, and they gather
inside ``read``.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainer_side.params.elements import Elements, HeldRun
from trainer_side.params.params import (
    Params,
    WholeParams,
    check_layout,
    own_dtype,
)
from trainer_side.ranks.ranks import SENDER, Ranks
from weft_rl.contract.adapter import TrainedBase
from weft_rl.contract.errors import InvalidManifestError, UnsupportedError, WeftError
from weft_rl.contract.manifest import Run, why_not
from weft_rl.contract.tensors import DataType, TensorMeta

_TORCH_DTYPES = {dtype: getattr(torch, dtype.torch_name) for dtype in DataType}


class Source(Protocol):
    """Source of the ordered tensors of one push."""

    description: str
    """Description of what is read, for logs: "plain module", "PEFT adapter", ..."""
    metas: tuple[TensorMeta, ...]
    """Names on the wire, wire dtypes and full shapes, in the order of sending. They are the same on
    every rank of the trainer."""
    is_collective: bool
    """True if every rank of the trainer must call ``read``, and not the sender alone."""
    held: Any = None
    """Result of ``held_tensors`` for this source, and what it was made for."""

    def elements(self, index: int) -> Elements | None:
        """Return tensor ``index`` as the ranks hold it; None where ``read`` must gather or compute
        it."""
        return None

    def why_gathered(self, index: int) -> str:
        """Return the reason why ``elements`` is None, for messages."""
        return "it lies in a file"

    def prepare(self) -> None:
        """Bring inputs of the computation to every rank, before any of ``elements`` is read.
        Collective, blocks."""
        return

    def release(self) -> None:
        """Free what ``prepare`` brought, after a push."""
        return

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        """Fill ``views[i]`` with tensor ``first + i``, cast to the view's dtype.

        Args:
            first: First tensor of the range; ranges ascend without gaps, the same on every rank.
            count: Number of tensors in the range.
            views: At the sender: ``count`` contiguous tensors of the metas' shapes, owned by
                the caller, on the device that buckets are packed on: CPU, or the
                accelerator that NCCL sends from. None at the trainer's other ranks, which
                only give what they hold.

        Blocks for the copies.
        """

    def end_reading(self) -> None:
        """Free what was kept between ranges, once a push has read its last one, or has failed. The
        next push may find other values. Not collective."""
        return


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Give a type to the errors of the libraries that hold the weights, inside the ``with``: nobody
    knows all that a tensor's class, or a wrapper, may raise.

    Raises:
        UnsupportedError: The error of another one, which is its cause.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{what} cannot be read: {type(error).__name__}: {str(error)[:500]}"
        ) from error


@dataclass(frozen=True)
class CastRule:
    """Rule for the dtype that a tensor travels in: floats in the served one, others as they are."""

    enabled: bool = True
    """True if a float of another dtype is cast; False refuses it."""
    served: DataType | None = None
    """Dtype that floats are served in; None keeps every tensor as it is."""
    exceptions: Mapping[str, DataType] = field(default_factory=dict)
    """Dtypes of the floats that are served in another one, by name."""

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for equal rules."""
        return self.enabled, self.served, frozenset(self.exceptions.items())

    def wire_dtype(self, name: str, dtype: torch.dtype) -> DataType:
        """Return the wire dtype of tensor ``name``.

        Raises:
            InvalidManifestError: The dtype cannot travel, or is a float's that is not cast to the
                served one.
        """
        own = own_dtype(name, dtype)
        served = self.exceptions.get(name, self.served)
        if served is None or not (own.is_float and served.is_float):
            return own
        if own is not served and not self.enabled:
            raise InvalidManifestError(
                f"{name!r} is {own.torch_name}, the pool takes {served.torch_name}: push with "
                "cast=True, or cast it before the push"
            )
        return served


def make_metas(
    tensors: Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]], cast: CastRule
) -> tuple[TensorMeta, ...]:
    """Describe tensors (real or meta) as they will travel.

    Raises:
        InvalidManifestError: One is sparse, or of a dtype that cannot travel.
    """
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    for name, tensor in items:
        check_layout(name, tensor)
    return tuple(
        TensorMeta(name, cast.wire_dtype(name, t.dtype), tuple(t.shape)) for name, t in items
    )


class ParamsSource(Source):
    """Source of parameters by their final names, as they are.

    Args:
        params: Parameters that they are fetched from.
        names: Name in ``params`` to name on the wire, in the order of sending.
        cast: Rule for the dtype that each of them travels in.
        description: Description of what is read, for logs.

    Raises:
        InvalidManifestError: See ``Params.check``.
    """

    def __init__(
        self, params: Params, names: Mapping[str, str], cast: CastRule, description: str
    ) -> None:
        self.description = description
        self.is_collective = params.is_collective
        self._params, self._names, self._travel_names = params, list(names), list(names.values())
        params.check(names)
        self.metas = make_metas([(name, params.metas[own]) for own, name in names.items()], cast)
        self._dtypes = torch_dtypes(self.metas)

    def cast_by(self, cast: CastRule) -> ParamsSource:
        """Return a source of the same parameters by another rule."""
        names = dict(zip(self._names, self._travel_names, strict=True))
        return ParamsSource(self._params, names, cast, self.description)

    def elements(self, index: int) -> Elements | None:
        return self._params.elements(self._names[index])

    def why_gathered(self, index: int) -> str:
        return self._params.why_gathered(self._names[index])

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        wanted = slice(first, first + count)
        self._params.fetch(self._names[wanted], self._dtypes[wanted], views)


@dataclass(frozen=True)
class Adapter:
    """Adapter that is ready to push."""

    source: ParamsSource
    config_json: str
    base: TrainedBase | None
    """Base that it is on, to be compared with the pool's; None where that is not to be done."""


def tensor_source(
    tensors: Mapping[str, torch.Tensor], cast: CastRule, description: str
) -> ParamsSource:
    """Return a source of tensors by their final names; they are kept by reference."""
    params = WholeParams(tensors, "tensors")
    return ParamsSource(params, {name: name for name in tensors}, cast, description)


def torch_dtypes(metas: Sequence[TensorMeta]) -> list[torch.dtype]:
    """Return the wire dtypes as torch dtypes."""
    return [_TORCH_DTYPES[meta.dtype] for meta in metas]


# -- what the ranks hold ----------------------------------------------------------

#: Tensors that must be gathered are brought to one rank before anything is sent: more of them
#: than this, and all are gathered bucket by bucket.
MAX_GATHERED_BYTES = 2 * 2**30

#: Elements of one tensor that a rank of the trainer holds.
Held = tuple[int, Run]


@dataclass(frozen=True)
class HeldTensors:
    """Tensors of a source as the ranks hold them; alike on every rank but for the elements."""

    elements: Sequence[Elements | None]
    """Elements of each tensor at this rank; None for one that rank 0 must read whole."""
    held: Sequence[Sequence[Held]] = ()
    """Holders of each tensor's elements; empty where rank 0 has every tensor whole."""
    numbers: Mapping[Run, int] = field(default_factory=dict)
    """Number of each run of this rank among its own runs of the tensor; empty where each is 0."""
    remarks: tuple[str, ...] = ()
    """Remarks that the push's success does not show."""

    @classmethod
    def of(
        cls, elements: Sequence[Elements | None], metas: Sequence[TensorMeta], rank: int
    ) -> HeldTensors:
        """Return tensors of which ranks send what they hold, as ``rank`` has them."""
        held = [
            _held(index, each, meta.num_elements)
            for index, (each, meta) in enumerate(zip(elements, metas, strict=True))
        ]
        gathered = [m.name for each, m in zip(elements, metas, strict=True) if each is None]
        return cls(elements, held, _numbers(held, rank), _remarks(gathered))

    @property
    def num_holders(self) -> int:
        """Number of ranks that hold some of it."""
        return len({rank for tensor in self.held for rank, _ in tensor}) or 1

    @property
    def gathered(self) -> list[int]:
        """Tensors that are brought to rank 0 before anything is sent."""
        return [i for i, each in enumerate(self.elements) if each is None] if self.held else []


def held_tensors(source: Source, ranks: Ranks, max_senders: int) -> HeldTensors | str:
    """Return the tensors of a source as the ranks hold them; or where rank 0 gathers all, the
    reason for that, empty if it was told to. The same on every rank.

    Args:
        max_senders: Most ranks that may send.
    """
    # Of a source that is kept, parameters have not moved.
    if source.held is None or source.held[0] != (ranks, max_senders):
        source.held = (ranks, max_senders), _found(source, ranks, max_senders)
    found: HeldTensors | str = source.held[1]
    return found


def _found(source: Source, ranks: Ranks, max_senders: int) -> HeldTensors | str:
    if not source.is_collective and ranks.rank != SENDER:
        return HeldTensors(())
    every = [source.elements(i) for i in range(len(source.metas))]
    if not source.is_collective or (ranks.size == 1 and all(map(_is_whole, every, source.metas))):
        return HeldTensors(every)
    if max_senders == 1:
        return ""
    found = [_sendable(i, each, source) for i, each in enumerate(every)]
    missing = [i for i, each in enumerate(found) if each is None]
    left = sum(source.metas[i].num_bytes for i in missing)
    total = sum(meta.num_bytes for meta in source.metas)
    if left > MAX_GATHERED_BYTES or 2 * left > total:
        return (
            f"{len(missing)} of {len(found)} tensors could not be sent by the ranks that hold "
            f"them, {source.metas[missing[0]].name!r} first: "
            f"{_why_gathered(missing[0], every[missing[0]], source)}"
        )
    tensors = HeldTensors.of(found, source.metas, ranks.rank)
    if tensors.num_holders > max_senders:
        return f"{tensors.num_holders} ranks hold parts of it, and at most {max_senders} may send"
    return tensors


def _is_whole(elements: Elements | None, meta: TensorMeta) -> bool:
    return elements is None or [*elements.runs] == [HeldRun(SENDER, 0, meta.num_elements)]


def _remarks(gathered: Sequence[str]) -> tuple[str, ...]:
    if not gathered:
        return ()
    more = f" and {len(gathered) - 3} more" if len(gathered) > 3 else ""
    return (
        f"{', '.join(gathered[:3])}{more} could not be sent as the ranks hold them, and were "
        "brought together at rank 0 first",
    )


def _why_gathered(index: int, elements: Elements | None, source: Source) -> str:
    if elements is None:
        return source.why_gathered(index)
    found = (why_not(_run(index, run), source.metas[index]) for run in elements.runs)
    return f"it cannot travel as it is cut: {next(filter(None, found), 'into nothing')}"


def _sendable(index: int, elements: Elements | None, source: Source) -> Elements | None:
    """Return the elements if their runs can travel as they are; else None."""
    if elements is None:
        return None
    meta = source.metas[index]
    is_wrong = any(why_not(_run(index, run), meta) for run in elements.runs)
    return None if is_wrong or not elements.runs else elements


def _held(index: int, elements: Elements | None, numel: int) -> list[Held]:
    if elements is None:
        return [(SENDER, Run(index, 0, numel))]
    return [(run.rank, _run(index, run)) for run in elements.runs]


def _run(index: int, run: HeldRun) -> Run:
    return Run(index, run.begin, run.numel, run.stride, run.repeats)


def _numbers(held: Sequence[Sequence[Held]], rank: int) -> Mapping[Run, int]:
    """Map each run of this rank to its number among its tensor's own runs."""
    numbers: dict[Run, int] = {}
    for tensor in held:
        own = defaultdict[int, int](int)
        for holder, run in tensor:
            if holder == rank:
                numbers[run] = own[run.tensor]
                own[run.tensor] += 1
    return numbers
