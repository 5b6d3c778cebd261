"""Named tensors as a framework yields them: full, one by one, in step on every rank.

Frameworks gather inside the iterator, so every rank must ask it for a tensor, or none: before
each, the ranks agree that all go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer_side.ranks.ranks import Ranks
from trainer_side.sources.source import CastRule
from weft_rl.contract.errors import InvalidManifestError, InvalidRequestError
from weft_rl.contract.tensors import DataType, TensorMeta, shape_text
from weft_rl.transport.digests.wsum64 import tensor_digest

#: What ``push_base(named_tensors=)`` takes: pairs of a checkpoint name and a full tensor.
NamedTensors = (
    Iterable[tuple[str, torch.Tensor]]
    | Mapping[str, torch.Tensor]
    | Callable[[], Iterable[tuple[str, torch.Tensor]]]
)
#: What ``metadata=`` takes: names with anything that has a shape and a dtype.
Metadata = Mapping[str, Any] | Iterable[tuple[str, Any]]

# What a rank tells the others: it was given a tensor, its iterator has ended.
_HAS, _ENDED = 1, 2
# Tensors of one shape that a tied duplicate is compared with, and duplicates of one push, at
# most: what has more is not tied, its names are other ones.
_MAX_CANDIDATES = 16
_MAX_TIED = 16


def check_named(given: object) -> None:
    """Refuse a value that is not an iterator of named tensors; ask it for nothing.

    Raises:
        InvalidRequestError: Says what to give.
    """
    is_wrong = isinstance(given, torch.nn.Module | torch.Tensor | str | bytes)
    if is_wrong or not (isinstance(given, Iterable) or callable(given)):
        raise InvalidRequestError(
            f"named_tensors={type(given).__name__}: give an iterator of (name, tensor) pairs, or "
            "a function that makes one"
        )


class NamedSteps:
    """Iteration of one rank over its named tensors, in step with the other ranks.

    Args:
        given: Named tensors of this rank; None where it has none, and follows.
        ranks: Ranks of the trainer.
    """

    def __init__(self, given: NamedTensors | None, ranks: Ranks) -> None:
        self._given, self._ranks = given, ranks
        self._iterator: Iterator[object] | None = None
        self._flags = 0
        self.num_tensors = 0
        """Number of tensors that were taken from the iterator."""

    @property
    def can_begin_again(self) -> bool:
        """True if another push of the same argument would get all its tensors. False once a given
        iterator was begun; a function or a collection makes a new one."""
        return self._iterator is None or not isinstance(self._given, Iterator)

    def advance(self) -> tuple[str, torch.Tensor] | None:
        """Return the next pair, once all ranks go on; None once all have ended. Collective.

        The tensor is the framework's: it may be overwritten at the next call.

        Raises:
            InvalidRequestError: The iterator gives something else; or the ranks' iterators are not
                of one length.
            BaseException: The iterator's own error; at other ranks as ``Ranks.agree``.
        """
        assert self._given is not None
        self._agree()
        try:
            if self._iterator is None:
                self._iterator = _begin(self._given)
            item = next(self._iterator, None)
            pair = None if item is None else _pair(item)
        except Exception as error:
            self._ranks.agree(error)
            raise
        self._flags = _ENDED if pair is None else _HAS
        if pair is None:
            self._agree()
        else:
            self.num_tensors += 1
        return pair

    def follow(self) -> None:
        """Take part until all ranks have ended, at a rank other than the sender. Collective.

        Raises:
            WeftError: The error that ended the push, the same at every rank.
        """
        if self._given is not None:
            while self.advance() is not None:
                pass
            return
        while not self._agree() & _ENDED:
            pass

    def _agree(self) -> int:
        told = self._ranks.agree(None, self._flags)
        if told == _HAS | _ENDED:
            error = InvalidRequestError(
                "named_tensors ended on one rank of this trainer and not on another, about "
                f"{self.num_tensors} tensors in: every rank must give as many"
            )
            self._ranks.agree(error)
            raise error
        return told


def _begin(given: NamedTensors) -> Iterator[object]:
    if isinstance(given, Mapping):
        return iter(given.items())
    if isinstance(given, Iterable):
        return iter(given)
    made = given()
    check_named(made)
    return _begin(made)


def _pair(item: object) -> tuple[str, torch.Tensor]:
    if not (isinstance(item, tuple | list) and len(item) == 2):
        raise InvalidRequestError(
            f"named_tensors gave {type(item).__name__}: it must give pairs of a name and a tensor"
        )
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(
            f"named_tensors gave a pair of {type(name).__name__} and {type(tensor).__name__}: it "
            "must be a name and a tensor"
        )
    if type(tensor).__name__ == "DTensor" or tensor.is_meta or tensor.layout is not torch.strided:
        raise InvalidRequestError(
            f"tensor {name!r} is not here whole ({type(tensor).__name__} on {tensor.device}, "
            f"{tensor.layout}): give the full tensor, gathered (full_tensor() of a DTensor)"
        )
    return name, tensor.detach()


def check_tensor(name: str, tensor: Any, want: TensorMeta, *, cast: bool) -> None:
    """Refuse a tensor that does not match a layout's tensor of its name.

    Args:
        tensor: Anything with a shape and a dtype.
        cast: Whether a float is cast to the layout's.

    Raises:
        InvalidManifestError: Another shape, or a dtype that is not cast to the layout's.
    """
    if tuple(tensor.shape) != want.shape:
        raise InvalidManifestError(
            f"{name!r} has shape ({shape_text(tuple(tensor.shape))}), the served model has "
            f"({shape_text(want.shape)})"
        )
    own = CastRule(enabled=False).wire_dtype(name, tensor.dtype)
    is_cast = own.is_float and want.dtype.is_float
    if own is not want.dtype and not (cast and is_cast):
        raise InvalidManifestError(
            f"{name!r} is {own.torch_name}, the served model takes {want.dtype.torch_name}"
            + (": push with cast=True" if is_cast else "")
        )


class TiedDuplicates:
    """Tensors that the served model has only under another name; dropped if they are equal.

    Equality is told by digest, since neither they nor the tensors that they are tied to are kept.

    Args:
        metas: Metas of all tensors that are sent.
    """

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._dtypes = {meta.name: meta.dtype for meta in metas}
        self._by_shape: dict[tuple[int, ...], list[str]] = {}
        for meta in metas:
            self._by_shape.setdefault(meta.shape, []).append(meta.name)
        self._digests: dict[str, int] = {}
        self._whole: set[str] = set()
        self._waiting: dict[str, dict[str, int]] = {}

    def candidates(self, shape: tuple[int, ...]) -> list[str]:
        """Return the tensors that one of a shape may be tied to."""
        found = self._by_shape.get(shape, [])
        return found if len(found) <= _MAX_CANDIDATES else []

    def sent(self, name: str, digest: int, *, is_last: bool) -> None:
        """Add the digest of a part of a sent tensor; the parts' digests add up."""
        self._digests[name] = (self._digests.get(name, 0) + digest) % 2**64
        if is_last:
            self._whole.add(name)

    def drop(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor that the served model lacks; it is read now, and not kept.

        Raises:
            InvalidManifestError: No tensor is there that it could be tied to; or all such tensors
                were sent, and none equals it.
        """
        if name in self._waiting:
            raise InvalidManifestError(f"{name!r} came twice")
        candidates = self.candidates(tuple(tensor.shape))
        if not candidates or len(self._waiting) == _MAX_TIED:
            raise InvalidManifestError(f"{name!r} is not a tensor of the served model")
        own = {of: self._digest_as(of, tensor) for of in candidates}
        self._waiting[name] = own
        if self._whole.issuperset(own):
            self._settle(name)

    def finish(self) -> None:
        """Check that every dropped tensor equals a sent one, once all were sent.

        Raises:
            InvalidManifestError: See ``drop``.
        """
        for name in self._waiting:
            self._settle(name)

    def _settle(self, name: str) -> None:
        own = self._waiting[name]
        if any(self._digests.get(of) == digest for of, digest in own.items()):
            return
        raise InvalidManifestError(
            f"{name!r} is not a tensor of the served model, nor equal to "
            f"{' or '.join(map(repr, own))}, which it could be tied to"
        )

    def _digest_as(self, name: str, tensor: torch.Tensor) -> int:
        cast = tensor.to(torch_dtype(self._dtypes[name])).contiguous()
        return tensor_digest(cast.view(-1).view(torch.uint8))


def torch_dtype(dtype: DataType) -> torch.dtype:
    """Return an element type as a torch dtype."""
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found
