"""Sources of ``push_tensors``, in order of arrival or in an order known beforehand.

One file: whatever the order, each tensor is checked by the same rules as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer_side.params.names import unwrapped_name
from trainer_side.params.params import WholeParams, check_readable
from trainer_side.ranks.ranks import Ranks
from trainer_side.sources.source import CastRule, ParamsSource, Source, make_metas
from trainer_side.sources.tied_heads import are_equal
from weft_rl.contract.errors import (
    InvalidManifestError,
    InvalidRequestError,
    UnsupportedError,
)
from weft_rl.contract.manifest import Manifest, Run, TensorSlot, align_up
from weft_rl.contract.tensors import (
    DataType,
    Reference,
    TensorMeta,
    check_base,
    check_scales_missing,
    shape_text,
)
from weft_rl.transport.digests.wsum64 import part_digests, tensor_digest
from weft_rl.transport.wire.buckets import run_parts

#: What ``push_tensors`` takes: pairs of a checkpoint name and a full tensor.
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
            "push_tensors takes an iterator of (name, tensor) pairs, or a function that makes one, "
            f"not {type(given).__name__}"
        )


class NamedSteps:
    """Iteration of one rank over its named tensors, in step with the other ranks.

    Frameworks gather inside the iterator, so every rank must ask it for a tensor, or none: before
    each, the ranks agree that all continue.

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
    def collection(self) -> NamedTensors | None:
        """The named tensors, if they are all there at once, and no other rank takes part; else
        None."""
        return self._given if self._ranks.size == 1 and is_collection(self._given) else None

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
                "the iterator of push_tensors ended on one rank of this trainer and not on "
                f"another, about {self.num_tensors} tensors in: every rank must give as many"
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
            f"push_tensors was given {type(item).__name__} by the iterator: it must give pairs of "
            "a name and a tensor"
        )
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(
            f"push_tensors was given a pair of {type(name).__name__} and "
            f"{type(tensor).__name__}: it must be a name and a tensor"
        )
    if type(tensor).__name__ == "DTensor" or tensor.is_meta or tensor.layout is not torch.strided:
        raise InvalidRequestError(
            f"tensor {name!r} is not here whole ({type(tensor).__name__} on {tensor.device}, "
            f"{tensor.layout}): give the full tensor, gathered (full_tensor() of a DTensor)"
        )
    check_readable(name, tensor)
    return name, tensor.detach()


def _described(metadata: Metadata) -> Iterator[tuple[str, Any]]:
    """Yield the names of ``metadata``, each with what has its shape and dtype."""
    is_many = isinstance(metadata, Iterable) and not isinstance(metadata, str | bytes)
    items: Iterable[Any] = _begin(metadata) if is_many else (metadata,)
    for item in items:
        if not _is_described(item):
            raise InvalidRequestError(
                "metadata= takes pairs of a name and something that has its shape and a torch "
                f"dtype, or a mapping of them; this is {type(item).__name__}"
            )
        yield item


def _is_described(item: Any) -> bool:
    if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
        return False
    shape = getattr(item[1], "shape", None)
    is_shape = isinstance(shape, Sequence) and all(type(n) is int and n >= 0 for n in shape)
    return is_shape and isinstance(getattr(item[1], "dtype", None), torch.dtype)


def _known_name(name: str, known: Collection[str]) -> str:
    """Return a tensor's name without the components of the wrappers that the model was in when it
    was named, where the served model has the tensor so."""
    if name in known:
        return name
    unwrapped = unwrapped_name(name)
    return unwrapped if unwrapped in known else name


def check_tensor(name: str, tensor: Any, want: TensorMeta, *, cast: bool) -> None:
    """Refuse a tensor that does not match a layout's tensor of its name.

    Args:
        tensor: Anything with a shape and a dtype.
        cast: Whether a float is cast to the layout's.
    """
    if tuple(tensor.shape) != want.shape:
        raise InvalidManifestError(
            f"{name!r} has shape ({shape_text(tuple(tensor.shape))}), the served model has "
            f"({shape_text(want.shape)})"
        )
    own = CastRule(cast, want.dtype).wire_dtype(name, tensor.dtype)
    if own is not want.dtype:
        raise InvalidManifestError(
            f"{name!r} is {own.torch_name}, the served model takes {want.dtype.torch_name}"
        )


class TensorReader(Protocol):
    """Reader of the tensors of a layout, each once."""

    def take(self, index: int, tensor: torch.Tensor) -> None:
        """Read a tensor, in any dtype and shape. It may be overwritten afterwards: on a GPU by what
        comes later on the calling thread's current stream.

        Raises:
            NotFiniteError: Names the tensor.
        """

    def digests(self) -> Sequence[int]:
        """Return the digest of each tensor as it travels, once all were taken; blocks."""


class TiedTensors:
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


#: What ``PushReport.source`` says.
DESCRIPTION = "named tensors"


def _check_draft(reference: Reference, draft: bool) -> None:
    if draft and not reference.draft:
        raise UnsupportedError(
            "draft=True: no replica of the pool takes a model that drafts tokens; push without it"
        )


def _is_for_drafts(name: str, reference: Reference) -> bool:
    return name in reference.draft_by_name or reference.ignores(name)


class RunSource:
    """Source of named tensors in any order; each is read before the next is asked for.

    Args:
        steps: The sender's iteration over them.
        reference: Tensors that they must match.
        cast: Cast floats to the dtypes of the reference.
        draft: True if the tensors of the model that drafts tokens are among them.

    Raises:
        UnsupportedError: The pool takes no such model.
    """

    description = DESCRIPTION

    def __init__(
        self, steps: NamedSteps, reference: Reference, cast: bool, draft: bool = False
    ) -> None:
        _check_draft(reference, draft)
        self._steps, self._reference, self._cast = steps, reference, cast
        self.metas = reference.tensors + (reference.draft if draft else ())
        self._slots: Mapping[str, tuple[int, TensorSlot]] = {}
        self._seen: set[str] = set()
        self._tied = TiedTensors([])
        self._open: tuple[int, TensorSlot, torch.Tensor] | None = None
        self._done = 0  # elements of it

    def begin(self, manifest: Manifest) -> None:
        """Begin with a layout that was planned of ``metas``; called once."""
        self._manifest = manifest
        self._slots = {slot.meta.name: (i, slot) for i, slot in enumerate(manifest.tensors)}
        self._tied = TiedTensors([slot.meta for slot in manifest.tensors])

    def fill(
        self, payload: torch.Tensor, on_progress: Callable[[], None]
    ) -> tuple[list[Run], list[int]]:
        """Fill a bucket's payload with the next tensors, cast; collective. Return the runs that lie
        there, in order, and the digest of each.

        Filling the last payload also ends the iteration: nothing may follow.

        Args:
            payload: uint8, a multiple of 256 bytes, on any device; overwritten. All payloads
                together are as long as the layout's.
            on_progress: Called after each tensor.

        Raises:
            InvalidManifestError: A tensor is missing, came twice, or is not the reference's.
            BaseException: The error that ended the iteration, or another rank.
        """
        runs: list[Run] = []
        at = 0
        while at < payload.numel():
            if self._open is None:
                self._open = self._next()
                if self._open is None:
                    raise self._missing()
                self._done = 0
                on_progress()
            index, slot, tensor = self._open
            room = (payload.numel() - at) // slot.meta.dtype.itemsize_bytes
            run = Run(index, self._done, min(tensor.numel() - self._done, room))
            runs.append(run)
            at += self._copy(slot.meta, tensor[run.first : run.end], payload[at:])
            self._done = run.end
            if run.end == tensor.numel():
                self._open = None
        digests = part_digests(payload, run_parts(self._manifest, runs))
        for run, digest in zip(runs, digests, strict=True):
            meta = self._manifest.tensors[run.tensor].meta
            self._tied.sent(meta.name, digest, is_last=run.end == meta.num_elements)
        if self._open is None and len(self._seen) == len(self._slots):
            assert self._next() is None  # else it would have been refused
            self._tied.finish()
        return runs, digests

    def read_once(self, reader: TensorReader) -> None:
        """Have all tensors read, as they come, in their own dtypes; collective. In place of
        ``fill``.

        Raises:
            BaseException: See ``fill``.
        """
        while (found := self._next()) is not None:
            index, _, tensor = found
            reader.take(index, tensor)
        if len(self._seen) < len(self._slots):
            raise self._missing()
        digests = reader.digests()
        for name, (index, _) in self._slots.items():
            self._tied.sent(name, digests[index], is_last=True)
        self._tied.finish()

    @staticmethod
    def _copy(meta: TensorMeta, part: torch.Tensor, payload: torch.Tensor) -> int:
        """Cast a part of a tensor into a payload's free bytes; return the bytes it takes,
        padded."""
        num_bytes = part.numel() * meta.dtype.itemsize_bytes
        end = align_up(num_bytes)
        payload[:num_bytes].view(torch_dtype(meta.dtype)).copy_(part)
        payload[num_bytes:end].zero_()  # digested with it
        return end

    def _next(self) -> tuple[int, TensorSlot, torch.Tensor] | None:
        """Return the next tensor of the reference, with index and slot; None after the last."""
        while (pair := self._steps.advance()) is not None:
            name, tensor = _known_name(pair[0], self._slots), pair[1]
            found = self._slots.get(name)
            if found is None:
                if not _is_for_drafts(name, self._reference):
                    self._tied.drop(name, tensor)
                continue
            index, slot = found
            if name in self._seen:
                raise InvalidManifestError(f"{name!r} came twice")
            self._seen.add(name)
            check_tensor(name, tensor, slot.meta, cast=self._cast)
            return index, slot, tensor.reshape(-1)
        return None

    def _missing(self) -> InvalidManifestError:
        missing = [meta.name for meta in self.metas if meta.name not in self._seen]
        check_scales_missing(missing)
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return InvalidManifestError(
            f"{missing[0]!r} is missing{more}: the iterator ended after "
            f"{self._steps.num_tensors} tensors, and the served model expects it",
            metadata={"num_problems": str(len(missing)), "first": missing[0]},
        )


class OrderedSource(Source):
    """Source of named tensors with names, shapes, dtypes and order known beforehand.

    Args:
        metadata: Names in order, with shapes and dtypes.
        draft: True if ``metadata`` must list the tensors of the model that drafts tokens.
        others: See ``RunSource``.

    Raises:
        InvalidManifestError: ``metadata`` does not list exactly the reference's tensors, tied
            duplicates aside. Nothing was asked for.
        UnsupportedError: The pool takes no model that drafts tokens.
    """

    description = DESCRIPTION
    is_collective = False

    def __init__(
        self,
        steps: NamedSteps,
        metadata: Metadata,
        reference: Reference,
        cast: bool,
        draft: bool = False,
    ) -> None:
        _check_draft(reference, draft)
        self._steps, self._cast = steps, cast
        self._reference = reference
        by_shape = TiedTensors(reference.tensors)
        self._known = known = {**reference.by_name, **reference.draft_by_name}
        pairs = [(_known_name(name, known), said) for name, said in _described(metadata)]
        metas: list[TensorMeta] = []
        tied_to: set[str] = set()
        for name, said in pairs:
            if reference.ignores(name):
                continue
            want = known.get(name)
            candidates = by_shape.candidates(tuple(said.shape)) if want is None else []
            tied_to.update(candidates)
            if want is not None:
                check_tensor(name, said, want, cast=cast)
                metas.append(want)
            elif not candidates:
                metas += make_metas([(name, said)], CastRule())  # refused below
        check_base(metas, reference)
        if draft and not reference.brings_draft(metas):
            raise InvalidManifestError(
                f"draft=True: metadata lists no {reference.draft[0].name!r}, which is a tensor of "
                "the model that drafts tokens"
            )
        self.metas = tuple(metas)
        self._order = [name for name, _ in pairs]
        self._tied_to = tied_to
        self._tied = TiedTensors([m for m in metas if m.name in tied_to])

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        """See ``Source.read``; collective, though the other ranks follow tensor by tensor."""
        assert views is not None
        for meta, view in zip(self.metas[first : first + count], views, strict=True):
            tensor = self._next(meta.name)
            assert tensor is not None
            check_tensor(meta.name, tensor, meta, cast=self._cast)
            view.copy_(tensor)
            if meta.name in self._tied_to:
                content = view.reshape(-1).view(torch.uint8)
                self._tied.sent(meta.name, tensor_digest(content), is_last=True)
        if first + count == len(self.metas):
            self._next(None)
            self._tied.finish()

    def _next(self, wanted: str | None) -> torch.Tensor | None:
        """Return the tensor of a name, after dropping duplicates before it. Where ``wanted`` is
        None, return None once all tensors have come."""
        while (pair := self._steps.advance()) is not None:
            name, tensor = _known_name(pair[0], self._known), pair[1]
            index = self._steps.num_tensors - 1
            said = self._order[index] if index < len(self._order) else "no more"
            if name != said:
                raise InvalidManifestError(
                    f"{name!r} came where metadata says {said!r}: metadata must list what "
                    "the iterator gives, in its order"
                )
            if name == wanted:
                return tensor
            if not self._reference.ignores(name):
                self._tied.drop(name, tensor)
        if wanted is not None or self._steps.num_tensors < len(self._order):
            raise InvalidManifestError(
                f"{self._order[self._steps.num_tensors]!r} is missing: the iterator ended after "
                f"{self._steps.num_tensors} tensors of {len(self._order)}"
            )
        return None


# -- named tensors that lie in a collection --------------------------------------


def is_collection(given: object) -> bool:
    """Return whether named tensors lie in a dict, a list or a tuple: all are there, and each can be
    read at any time."""
    return isinstance(given, dict | list | tuple)


def collected_source(
    given: NamedTensors, reference: Reference, cast: bool, draft: bool = False
) -> ParamsSource:
    """Return a source of named tensors that lie in a collection, in the reference's order. Reads
    none but tied duplicates.

    Args:
        given: A collection; its tensors are kept by reference.
        others: See ``RunSource``.

    Raises:
        InvalidManifestError: They are not exactly the reference's tensors, tied duplicates aside.
        InvalidRequestError: An entry is no pair of a name and a tensor that is here whole.
        UnsupportedError: The pool takes no model that drafts tokens.
    """
    _check_draft(reference, draft)
    metas = reference.tensors + (reference.draft if draft else ())
    wanted = {meta.name: meta for meta in metas}
    found: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for item in _begin(given):
        name, tensor = _pair(item)
        name = _known_name(name, wanted)
        if name not in wanted and _is_for_drafts(name, reference):
            continue
        if name in found or name in others:
            raise InvalidManifestError(f"{name!r} came twice")
        (found if name in wanted else others)[name] = tensor
        if name in wanted:
            check_tensor(name, tensor, wanted[name], cast=cast)
    by_shape = TiedTensors(metas)
    for name, tensor in others.items():
        _check_tied(name, tensor, {of: found.get(of) for of in by_shape.candidates(tensor.shape)})
    check_base([wanted[name] for name in found], reference)
    tensors = {name: found[name] for name in wanted}
    rule = CastRule(cast, exceptions={meta.name: meta.dtype for meta in metas})
    return ParamsSource(
        WholeParams(tensors, "tensors"), {name: name for name in tensors}, rule, DESCRIPTION
    )


def _check_tied(
    name: str, tensor: torch.Tensor, candidates: Mapping[str, torch.Tensor | None]
) -> None:
    if not candidates:
        raise InvalidManifestError(f"{name!r} is not a tensor of the served model")
    there = [other for other in candidates.values() if other is not None]
    if not any(are_equal(tensor, other.to(tensor.device)) for other in there):
        raise InvalidManifestError(
            f"{name!r} is not a tensor of the served model, nor equal to "
            f"{' or '.join(map(repr, candidates))}, which it could be tied to"
        )
