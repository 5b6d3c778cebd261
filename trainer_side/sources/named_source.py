"""Sources of ``push_base(named_tensors=)``, in order of arrival or in an order known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from trainer_side.sources.named_tensors import (
    Metadata,
    NamedSteps,
    TiedDuplicates,
    check_tensor,
    torch_dtype,
)
from trainer_side.sources.source import CastRule, make_metas
from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.layout.manifest import Manifest, TensorSlot, align_up
from weft_rl.contract.layout.runs import Run
from weft_rl.contract.tensors import Reference, TensorMeta, check_base
from weft_rl.transport.digests.wsum64 import part_digests, tensor_digest
from weft_rl.transport.wire.buckets import run_parts

#: What ``last_report.source`` says.
DESCRIPTION = "named tensors"


class RunSource:
    """Source of named tensors in any order; each is read before the next is asked for.

    Args:
        steps: The sender's iteration over them.
        reference: Tensors that they must match.
        cast: Cast floats to the dtypes of the reference.
    """

    description = DESCRIPTION

    def __init__(self, steps: NamedSteps, reference: Reference, cast: bool) -> None:
        self._steps, self._reference, self._cast = steps, reference, cast
        self.metas = reference.tensors
        self._slots: Mapping[str, tuple[int, TensorSlot]] = {}
        self._seen: set[str] = set()
        self._tied = TiedDuplicates([])
        self._open: tuple[int, TensorSlot, torch.Tensor] | None = None
        self._done = 0  # elements of it

    def begin(self, manifest: Manifest) -> None:
        """Begin with a layout that was planned of ``metas``; called once."""
        self._manifest = manifest
        self._slots = {slot.meta.name: (i, slot) for i, slot in enumerate(manifest.tensors)}
        self._tied = TiedDuplicates([slot.meta for slot in manifest.tensors])

    def fill(self, payload: torch.Tensor, speak: Callable[[], None]) -> tuple[list[Run], list[int]]:
        """Fill a bucket's payload with the next tensors, cast; collective. Return the runs that lie
        there, in order, and the digest of each.

        Filling the last payload also ends the iteration: nothing may follow.

        Args:
            payload: uint8, a multiple of 256 bytes, on any device; overwritten. All payloads
                together are as long as the layout's.
            speak: Called after each tensor.

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
                speak()
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
            name, tensor = pair
            found = self._slots.get(name)
            if found is None:
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
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return InvalidManifestError(
            f"{missing[0]!r} is missing{more}: named_tensors ended after "
            f"{self._steps.num_tensors} tensors, and the served model expects it",
            metadata={"num_problems": str(len(missing)), "first": missing[0]},
        )


class OrderedSource:
    """Source of named tensors with names, shapes, dtypes and order known beforehand; a ``Source``.

    Args:
        steps: The sender's iteration over them.
        metadata: Names in order, with shapes and dtypes.
        reference: Tensors that they must match.
        cast: Cast floats to the dtypes of the reference.

    Raises:
        InvalidManifestError: ``metadata`` does not list exactly the reference's tensors, tied
            duplicates aside. Nothing was asked for.
    """

    description = DESCRIPTION
    is_collective = False

    def __init__(
        self, steps: NamedSteps, metadata: Metadata, reference: Reference, cast: bool
    ) -> None:
        self._steps, self._cast = steps, cast
        pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
        known, by_shape = reference.by_name, TiedDuplicates(reference.tensors)
        metas: list[TensorMeta] = []
        tied_to: set[str] = set()
        for name, said in pairs:
            want = known.get(name)
            candidates = by_shape.candidates(tuple(said.shape)) if want is None else []
            tied_to.update(candidates)
            if want is not None:
                check_tensor(name, said, want, cast=cast)
                metas.append(want)
            elif not candidates:
                metas += make_metas([(name, said)], CastRule(enabled=False))  # refused below
        check_base(metas, reference)
        self.metas = tuple(metas)
        self._order = [name for name, _ in pairs]
        self._tied_to = tied_to
        self._tied = TiedDuplicates([m for m in metas if m.name in tied_to])

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

    def by_reference(self, first: int, count: int) -> Sequence[torch.Tensor | None]:
        """See ``Source.by_reference``: a tensor is here once it is asked for."""
        return [None] * count

    def end_reading(self) -> None:
        """See ``Source.end_reading``: nothing is kept beyond this push."""

    def _next(self, wanted: str | None) -> torch.Tensor | None:
        """Return the tensor of a name, after dropping duplicates before it. Where ``wanted`` is
        None, return None once all tensors have come."""
        while (pair := self._steps.advance()) is not None:
            name, tensor = pair
            index = self._steps.num_tensors - 1
            said = self._order[index] if index < len(self._order) else "no more"
            if name != said:
                raise InvalidManifestError(
                    f"{name!r} came where metadata says {said!r}: metadata must list what "
                    "named_tensors gives, in its order"
                )
            if name == wanted:
                return tensor
            self._tied.drop(name, tensor)
        if wanted is not None or self._steps.num_tensors < len(self._order):
            raise InvalidManifestError(
                f"{self._order[self._steps.num_tensors]!r} is missing: named_tensors ended after "
                f"{self._steps.num_tensors} tensors of {len(self._order)}"
            )
        return None
