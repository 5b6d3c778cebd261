"""Sources of a push's tensors, read bucket by bucket.

A source never copies the model: its metas say what will be sent, and ``read``
fills the packer's views. In a sharded trainer every rank has one, and they gather
inside ``read``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainer_side.params.elements import Elements, held_elements, why_not_held
from trainer_side.params.params import (
    Params,
    WholeParams,
    check_layout,
    own_dtype,
    resident_param,
)
from weft_rl.contract.errors import InvalidManifestError, UnsupportedError, WeftError
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

    def by_reference(self, first: int, count: int) -> Sequence[torch.Tensor | None]:
        """Return the tensors of a range that lie whole in this process's memory, in their own
        dtypes; None for the others. Not collective."""


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


class ParamsSource:
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
        self.shards: Any = None
        params.check(names)
        self.metas = make_metas([(name, params.metas[own]) for own, name in names.items()], cast)
        self._dtypes = torch_dtypes(self.metas)

    def cast_by(self, cast: CastRule) -> ParamsSource:
        """Return a source of the same parameters by another rule."""
        names = dict(zip(self._names, self._travel_names, strict=True))
        return ParamsSource(self._params, names, cast, self.description)

    def elements(self, index: int) -> Elements | None:
        """See ``HeldSource``."""
        return held_elements(self._params, self._names[index])

    def why_gathered(self, index: int) -> str:
        """See ``HeldSource``."""
        return why_not_held(self._params, self._names[index])

    def prepare(self) -> None:
        """See ``HeldSource``: nothing is computed."""

    def release(self) -> None:
        """See ``HeldSource``."""

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        """See ``Source.read``."""
        wanted = slice(first, first + count)
        self._params.fetch(self._names[wanted], self._dtypes[wanted], views)

    def end_reading(self) -> None:
        """See ``Source.end_reading``: nothing is kept."""

    def by_reference(self, first: int, count: int) -> Sequence[torch.Tensor | None]:
        """See ``Source.by_reference``."""
        return [resident_param(self._params, name) for name in self._names[first : first + count]]


def tensor_source(
    tensors: Mapping[str, torch.Tensor], cast: CastRule, description: str
) -> ParamsSource:
    """Return a source of tensors by their final names; they are kept by reference."""
    params = WholeParams(tensors, "tensors")
    return ParamsSource(params, {name: name for name in tensors}, cast, description)


def torch_dtypes(metas: Sequence[TensorMeta]) -> list[torch.dtype]:
    """Return the wire dtypes as torch dtypes."""
    return [_TORCH_DTYPES[meta.dtype] for meta in metas]
