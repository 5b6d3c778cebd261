"""Loading of a base by plain copies, if the engine holds weights as they travel.

vLLM's layerwise reload costs Python and launches for every parameter, on every push. For
unquantised weights it amounts to copies: from a tensor, or a slice of it, to a slice of a
parameter. So the copies are learnt once, by tracing the model's own ``load_weights`` with every
write held back. Then they are repeated for any layout of a base, over a whole segment or bucket by
bucket as they arrive.

A plan is used only once it is proven (``plan_proof``): the copies cover every parameter once, and
each destination holds its source's bits after vLLM's own load.

A linear layer that processes its weights after loading is filled in its loading form and
processed (``processed_modules``). There is no plan for experts that are processed, nor for
attention that derives matrices. One file: copies have no meaning but in the plan that traced them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_side.memory.versions import ElementPlace, bucket_starts, tensors_in
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading.processed_modules import (
    LoadingForm,
    ProcessedModule,
    in_loading_form,
    loading_form,
    storage_of,
)
from weft_rl.contract.manifest import Manifest, TensorSlot
from weft_rl.transport.digests.wsum64 import digests_of, tensor_digest

# -- copies of a plan -------------------------------------------------------------------
#
# A model of many experts takes thousands of copies of some MiB each, and a launch takes longer than
# the GPU needs for one. They lie at equal distances, on the wire and in the parameters, so that one
# copy of one more dimension does the work of many: 9.7 GB of experts in 3,072 copies took an H100
# 47 ms, and in 2 copies 6.6, as long as one copy of all its bytes.


_WORD = torch.int64
#: A launch takes as long as a copy of so many bytes.
_LARGE_BYTES = 16 * 2**20
#: A parameter, or a part of it, and the view of the wire that belongs to it.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PlannedCopy:
    """A copy: part of a bucket's bytes to part of a parameter."""

    target: torch.Tensor
    """The part of the parameter; on the meta device if it is one of a loading form."""
    offset: int
    """Start of the source in its bucket, in elements of its dtype."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def source(self, wire: torch.Tensor) -> torch.Tensor:
        """Return the view of a bucket's bytes that is copied from (or, to read it back, to)."""
        typed = wire.view(self.target.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """Return whether the source is a whole tensor of that shape, its elements in order."""
        is_first = self.offset == 0 and prod(self.shape) == prod(shape)
        return is_first and self.is_row_major

    @property
    def is_row_major(self) -> bool:
        """True if the source's elements lie one behind the other, in order."""
        return self.stride == tuple(_row_major(self.shape))

    @property
    def shard(self) -> tuple[int, int, int] | None:
        """Elements from the source's first to its last, and, where these are a part of each of
        several rows, the elements of a part and from one to the next (else zeros); None where they
        lie in another way."""
        dims = [(n, s) for n, s in zip(self.shape, self.stride, strict=True) if n > 1]
        row = 1
        while dims and dims[-1][1] == row:
            row *= dims.pop()[0]
        if not dims:
            return row, 0, 0
        stride, rows = dims[-1][1], 1
        while dims and dims[-1][1] == stride * rows:
            rows *= dims.pop()[0]
        is_ascending = not dims and stride > row
        return ((rows - 1) * stride + row, row, stride) if is_ascending else None

    @property
    def is_expanded(self) -> bool:
        """True if several elements of the parameter come from one of the wire."""
        return any(s == 0 and n > 1 for n, s in zip(self.shape, self.stride, strict=True))


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def joined(pieces: Iterable[PlannedCopy]) -> list[PlannedCopy]:
    """Return fewer copies that do the same, in elements of 8 bytes where that is possible.

    Copies of one shape are one copy where they lie at equal distances, both in the parameter and on
    the wire: the experts of a layer, say.
    """
    found = list(pieces)
    while True:
        alike: dict[object, list[PlannedCopy]] = {}
        for piece in found:
            target = piece.target
            key = (storage_of(target), target.dtype, piece.shape, target.stride(), piece.stride)
            alike.setdefault(key, []).append(piece)
        fewer = [run for own in alike.values() for run in _runs(own)]
        if len(fewer) == len(found):
            return [_in_words(piece) for piece in found]
        found = [_one(run) for run in fewer]


def _runs(pieces: list[PlannedCopy]) -> list[list[PlannedCopy]]:
    """Return copies that differ by their places alone, those at equal distances together."""
    pieces.sort(key=lambda piece: piece.target.storage_offset())
    runs = [[pieces[0]]]
    for piece in pieces[1:]:
        last = runs[-1]
        step = _distance(last[-1], piece)
        # A stride of a tensor is never below zero.
        if step[0] > 0 and step[1] >= 0 and (len(last) == 1 or step == _distance(*last[:2])):
            last.append(piece)
        else:
            runs.append([piece])
    return runs


def _distance(first: PlannedCopy, second: PlannedCopy) -> tuple[int, int]:
    """Return how far apart two copies lie in their parameter and on the wire, in elements."""
    begin, end = first.target.storage_offset(), second.target.storage_offset()
    return int(end) - int(begin), second.offset - first.offset


def _one(run: Sequence[PlannedCopy]) -> PlannedCopy:
    """Return the copy that does the work of those at equal distances."""
    first = run[0]
    if len(run) == 1:
        return first
    there, here = _distance(*run[:2])
    shape = (len(run), *first.shape)
    target = first.target.detach()
    target = target.as_strided(shape, (there, *target.stride()), target.storage_offset())
    return PlannedCopy(target, first.offset, shape, (here, *first.stride))


def _in_words(piece: PlannedCopy) -> PlannedCopy:
    """Return the same copy in elements of 8 bytes, if rows and distances are multiples of them."""
    target = piece.target.detach()
    ratio = _WORD.itemsize // target.element_size()
    if ratio == 1 or not piece.shape or target.stride(-1) != 1 or piece.stride[-1] != 1:
        return piece
    numbers = (piece.offset, target.storage_offset(), piece.shape[-1])
    strides = (*target.stride()[:-1], *piece.stride[:-1])
    if any(number % ratio for number in (*numbers, *strides)) or target.data_ptr() % _WORD.itemsize:
        return piece
    return PlannedCopy(
        target.view(_WORD),
        piece.offset // ratio,
        (*piece.shape[:-1], piece.shape[-1] // ratio),
        (*(stride // ratio for stride in piece.stride[:-1]), 1),
    )


def launch(pairs: Iterable[Pair]) -> None:
    """Launch copies: large ones one by one, others in one go for each dtype."""
    together: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        # One that is not contiguous would have all of its call copied one by one.
        if target.nbytes < _LARGE_BYTES and target.is_contiguous() and source.is_contiguous():
            targets, sources = together.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source, non_blocking=True)
    for targets, sources in together.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)


# -- plans ------------------------------------------------------------------------------


def trace_copies(
    model: torch.nn.Module,
    manifest: Manifest,
    data: torch.Tensor,
    processed: Sequence[ProcessedModule] = (),
    unfilled: Sequence[tuple[torch.nn.Module, LoadingForm]] = (),
    ignored: Collection[str] = (),
) -> list[list[PlannedCopy]]:
    """Return the copies that ``load_weights`` would make, by bucket.

    Args:
        processed: Layers that are filled in their loading forms.
        unfilled: Layers that no copy may go to, and their loading forms.
        data: uint8, a segment of this layout. Neither read nor written: may be on the meta device.
        ignored: Names of tensors that have no place in the model.
    """
    with (
        torch.no_grad(),
        bridges.without_lora(model),
        in_loading_form(processed, unfilled),
    ):
        left_out = [parameter for _, form in unfilled for parameter in form.values()]
        watcher = _CopyTracer(manifest, data, model.parameters(), left_out)
        with watcher:
            given = ((name, t) for name, t in tensors_in(manifest, data) if name not in ignored)
            model.load_weights(given)  # type: ignore[operator]
    watcher.check_covered()
    return watcher.pieces


class _CopyTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that holds back writes to parameters, and notes their sources."""

    def __init__(
        self,
        manifest: Manifest,
        data: torch.Tensor,
        parameters: Iterable[torch.Tensor],
        left_out: Iterable[torch.Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[list[PlannedCopy]] = [[] for _ in manifest.buckets]
        self._starts = bucket_starts(manifest)
        self._data = data
        self._wire = storage_of(data)
        #: Bytes of each parameter that nothing was copied to yet, by its storage.
        self._left = {storage_of(p): p.numel() * p.element_size() for p in parameters}
        self._left_out = {storage_of(p) for p in left_out}
        for storage in self._left_out:
            self._left.pop(storage, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let views through, and note copies from the wire. Refuse all else that would change a
        parameter, or compute something from a tensor."""
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = [storage_of(x) for x in given]
        name = func.overloadpacket.__name__
        if func._schema.is_mutable and not self._left_out.isdisjoint(storages):
            raise ValueError("a layer that processes its weights is no linear one")
        if func._schema.is_mutable and any(where in self._left for where in storages):
            target = given[0]
            if name == "copy_" and storages[0] in self._left:
                self._note(target, args[1])
            elif storages[0] in self._left and _is_zeroing(name, args) and not target.is_meta:
                self._count(target)  # padding
            else:
                raise ValueError(f"its weights are loaded by {func}")
            return target
        if self._wire not in storages:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise ValueError(f"its tensors go elsewhere by {func}")
        result = func(*args, **kwargs)
        made = tree_leaves(result)
        if not all(isinstance(x, torch.Tensor) and storage_of(x) == self._wire for x in made):
            raise ValueError(f"something is computed from its tensors by {func}")
        return result

    def check_covered(self) -> None:
        """Refuse a trace that does not fill every parameter once."""
        if wrong := [size for size in self._left.values() if size]:
            raise ValueError(f"{len(wrong)} parameters are not filled exactly once by copies")

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if storage_of(source) != self._wire or source.dtype != target.dtype:
            raise ValueError("a parameter is filled with what was computed from a tensor")
        if source.shape != target.shape:
            source = source.expand(target.shape)
        # Relative to the bucket: another one has the same layout, not the same place. A
        # tensor never spans two, and neither does a view of it.
        within = int(source.storage_offset()) * source.element_size()
        begin = within - int(self._data.storage_offset())
        bucket = bisect_right(self._starts, begin) - 1
        offset, rest = divmod(begin - self._starts[bucket], source.element_size())
        if rest:
            raise ValueError("a tensor is not aligned in its bucket")
        self._count(target)
        piece = PlannedCopy(target, offset, tuple(source.shape), source.stride())
        self.pieces[bucket].append(piece)

    def _count(self, target: torch.Tensor) -> None:
        self._left[storage_of(target)] -= target.numel() * target.element_size()


def _is_zeroing(name: str, args: tuple[Any, ...]) -> bool:
    return name == "zero_" or (name == "fill_" and float(args[1]) == 0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's elements as integers of their size: a NaN equals itself there."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ])  # fmt: skip


#: Ways of holding weights that keep them as they were loaded.
_PLAIN_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)


class CopyPlan:
    """Copies that load one layout into one model, or one rank's part of it. Proven by
    ``plan_proof``."""

    def __init__(
        self,
        manifest: Manifest,
        pieces: Sequence[Sequence[PlannedCopy]],
        processed: Sequence[ProcessedModule] = (),
    ) -> None:
        self.layout_digest = manifest.layout_digest
        self._manifest = manifest
        self.num_copies = sum(map(len, pieces))
        self.num_processed = len(processed)
        self.is_readable = not processed and _is_whole(manifest, pieces)
        """True if ``read_bucket`` can be called: every element has a place of its own here."""
        self._pieces = pieces
        self._plain = [[p for p in part if not p.target.is_meta] for part in pieces]
        self._processed = processed
        self._forms = _ProcessingPlan(pieces, processed)
        self._starts = bucket_starts(manifest)
        self.device = next(piece.target.device for part in self._plain for piece in part)

    def for_layout(self, manifest: Manifest, ignored: Collection[str] = ()) -> CopyPlan | None:
        """Return the same copies for another layout of the tensors, which may lack those of a
        draft; None if it has more of them, or a dtype differs.

        Another dtype takes more than a copy.
        """
        if manifest.layout_digest == self.layout_digest:
            return self
        by_name = {slot.meta.name: (slot.meta, own) for slot, own in self._by_tensor()}
        pieces: list[list[PlannedCopy]] = [[] for _ in manifest.buckets]
        for slot in manifest.tensors:
            if slot.meta.name in ignored:
                continue
            meta, own = by_name.get(slot.meta.name, (None, []))
            if meta is None or slot.meta != meta:
                return None
            first = slot.offset_bytes // meta.dtype.itemsize_bytes
            pieces[slot.bucket] += [replace(piece, offset=first + piece.offset) for piece in own]
        return CopyPlan(manifest, pieces, self._processed)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the tensors that it copies."""
        return frozenset(slot.meta.name for slot, own in self._by_tensor() if own)

    def fills(self, model: torch.nn.Module) -> bool:
        """Return whether all that it writes to are parameters or buffers of a model."""
        own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        targets = [piece.target for part in self._plain for piece in part]
        made = (tensor for layer in self._processed for tensor in layer.served.values())
        return all(storage_of(tensor) in own for tensor in (*targets, *made))

    def load(self, data: torch.Tensor, on_progress: Callable[[], None] = lambda: None) -> None:
        """Copy a segment of this layout into the model's parameters; returns when done."""
        with torch.no_grad():
            for index, start in enumerate(self._starts):
                on_progress()
                launch(self._joined_pairs(index, self._payload(index, data[start:])))
            for layer, made in self._segment_made(data, on_progress):
                layer.write(made)
        wait_for_copies(self.device)

    def load_bucket(self, index: int, wire: torch.Tensor) -> None:
        """Copy one bucket into the model's parameters.

        Returns when it is done (on CUDA it waits for the calling thread's current stream
        alone), so the bucket's memory may be reused at once.

        Args:
            wire: uint8, at least the bucket's ``wire_bytes``; on any device. Begins on a multiple
                of 8 bytes.
        """
        with torch.no_grad():
            payload = self._payload(index, wire)
            launch(self._joined_pairs(index, payload))
            for layer, made in self._forms.fill(index, payload):
                layer.write(made)
        wait_for_copies(self.device)

    def read_bucket(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """Fill a buffer with one bucket's payload, from the model's parameters.

        Bytes that no parameter came from are zero, as gaps between tensors are on the wire. On CUDA
        the copies run on the calling thread's current stream and are not waited for.

        Args:
            out: uint8, at least the bucket's ``payload_bytes``; overwritten.
        """
        if not self.is_readable:
            raise ValueError(
                "parameters that hold parts of tensors, or expanded ones, cannot be read back"
            )
        payload = self._payload(index, out)
        with torch.no_grad():
            payload.zero_()
            launch((source, target) for target, source in self._joined_pairs(index, payload))
        return payload

    def holds(self, data: torch.Tensor) -> bool:
        """Return whether the model's parameters are, bit for bit, what ``load`` would make them."""
        with torch.no_grad():
            return self._equal(self.pairs(data))

    def pairs(
        self, data: torch.Tensor, on_progress: Callable[[], None] = lambda: None
    ) -> Iterator[Pair]:
        """Yield each part of the parameters that ``load`` writes to, and what it would write there,
        on their device. Changes nothing; several threads may do so at a time."""
        forms = _ProcessingPlan(self._pieces, self._processed)
        for index, start in enumerate(self._starts):
            on_progress()
            payload = self._payload(index, data[start:]).to(self.device)
            yield from self._joined_pairs(index, payload)
            for layer, made in forms.fill(index, payload):
                for name, tensor in made.items():
                    yield layer.served[name], tensor

    def source_digests(self, index: int, wire: torch.Tensor) -> list[int]:
        """Return the digests of what ``load_bucket`` would write, by piece; blocks for them. Call
        it for every bucket, in order."""
        payload = self._payload(index, wire)
        found = [self._digest(source) for _, source in self._pairs(index, payload)]
        with torch.no_grad():
            for layer, made in self._forms.fill(index, payload):
                found += [self._digest(made[name]) for name in layer.served]
        return found

    def target_digests(self, index: int) -> list[int]:
        """Return the digests of what the parameters hold where ``load_bucket`` writes."""
        found = [self._digest(piece.target) for piece in self._plain[index]]
        for layer in self._forms.complete_with(index):
            found += [self._digest(tensor) for tensor in layer.served.values()]
        return found

    def first_unlike(self, digests: Sequence[int]) -> str:
        """Return the name of a tensor whose digest the parameters do not have; empty if none. Every
        place that a tensor is copied to is compared. Blocks."""
        resident: list[torch.Tensor] = []
        expected: list[tuple[str, int]] = []
        for (slot, pieces), digest in zip(self._by_tensor(), digests, strict=True):
            meta = slot.meta
            if all(piece.is_all_of(meta.shape) for piece in pieces):
                resident += [piece.target.contiguous() for piece in pieces]
                expected += [(meta.name, digest)] * len(pieces)
            elif sum(p.target.nbytes for p in pieces) != meta.num_bytes or (
                self._read_digest(slot, pieces) != digest
            ):
                return meta.name
        found = zip(digests_of(resident), expected, strict=True)
        return next((name for own, (name, digest) in found if own != digest), "")

    def _read_digest(self, slot: TensorSlot, pieces: Sequence[PlannedCopy]) -> int:
        """Return the digest of a tensor that the parameters hold in several pieces."""
        out = torch.empty(slot.meta.num_bytes, dtype=torch.uint8, device=self.device)
        for piece in pieces:
            piece.source(out).copy_(piece.target)
        return tensor_digest(out)

    def _by_tensor(self) -> Iterator[tuple[TensorSlot, list[PlannedCopy]]]:
        """Yield each tensor, in the manifest's order, and its pieces, offset from its start."""
        for index, slot in enumerate(self._manifest.tensors):
            first = slot.offset_bytes // slot.meta.dtype.itemsize_bytes
            yield slot, [replace(p, offset=p.offset - first) for p in self._of_tensor[index]]

    @cached_property
    def _of_tensor(self) -> list[list[PlannedCopy]]:
        found: list[list[PlannedCopy]] = [[] for _ in self._manifest.tensors]
        for tensors, pieces in zip(self._manifest.tensors_by_bucket, self._pieces, strict=True):
            begins = [self._manifest.tensors[tensor].offset_bytes for tensor in tensors]
            for piece in pieces:
                at = bisect_right(begins, piece.offset * piece.target.element_size()) - 1
                found[tensors[at]].append(piece)
        return found

    @cached_property
    def is_contiguous(self) -> bool:
        """True if ``places`` can be called: elements that follow one another in a tensor do so in
        the parameters, and nothing is derived from them."""
        return self.is_readable and all(
            piece.is_row_major and piece.target.is_contiguous()
            for part in self._pieces
            for piece in part
        )

    @cached_property
    def has_shards(self) -> bool:
        """True if ``places`` can be called at one of several ranks: each copy is of all elements
        from one to another, or of a part of each row, and nothing is derived from them."""
        return not self._processed and all(
            piece.shard is not None and piece.target.is_contiguous()
            for part in self._pieces
            for piece in part
        )

    def places(self, tensor: int) -> list[ElementPlace]:
        """Return the places of a tensor's elements in the parameters; see ``ServedBase``."""
        slot = self._manifest.tensors[tensor]
        first = slot.offset_bytes // slot.meta.dtype.itemsize_bytes
        found = []
        for piece in self._of_tensor[tensor]:
            assert piece.shard is not None, "it has_shards, or is_contiguous"
            num_elements, row, stride = piece.shard
            begin = piece.offset - first
            target = bits(piece.target.detach()).view(-1)
            found.append(ElementPlace(begin, begin + num_elements, target, row, stride))
        return found

    def _digest(self, values: torch.Tensor) -> int:
        flat = values.to(self.device).reshape(-1).contiguous()
        return tensor_digest(flat.view(torch.uint8))

    def _payload(self, index: int, wire: torch.Tensor) -> torch.Tensor:
        num_bytes = self._manifest.buckets[index].payload_bytes
        if wire.numel() < num_bytes:
            raise ValueError(f"bucket {index} is {num_bytes} bytes long, not {wire.numel()}")
        return wire[:num_bytes]

    def _pairs(self, index: int, wire: torch.Tensor) -> Iterator[Pair]:
        return ((piece.target, piece.source(wire)) for piece in self._plain[index])

    @cached_property
    def _joined(self) -> list[list[PlannedCopy]]:
        return [joined(part) for part in self._plain]

    def _joined_pairs(self, index: int, wire: torch.Tensor) -> Iterator[Pair]:
        """Yield what to copy, in few copies where the wire is on this device. From the host, rows
        with gaps would be gathered there first."""
        plans = self._joined if wire.device == self.device else self._plain
        return ((piece.target, piece.source(wire)) for piece in plans[index])

    def _segment_made(
        self, data: torch.Tensor, on_progress: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[ProcessedModule, dict[str, torch.Tensor]]]:
        for index, start in enumerate(self._starts):
            on_progress()
            yield from self._forms.fill(index, self._payload(index, data[start:]))

    def _equal(self, pairs: Iterable[Pair]) -> bool:
        differs = torch.zeros((), dtype=torch.bool, device=self.device)
        for target, source in pairs:
            differs |= (bits(target) != bits(source)).any()
        return not bool(differs)


def plan_of_layout(
    plans: Iterable[CopyPlan], manifest: Manifest, ignored: Collection[str] = ()
) -> CopyPlan | None:
    """Return the plan of a layout, one of these or made of one; None if it cannot be."""
    own_first = sorted(plans, key=lambda plan: plan.layout_digest != manifest.layout_digest)
    made = (plan.for_layout(manifest, ignored) for plan in own_first)
    return next((plan for plan in made if plan is not None), None)


def with_others(plan: CopyPlan | None, plans: Iterable[CopyPlan]) -> tuple[CopyPlan, ...]:
    """Return a plan, if there is one, and those for other names: a base with a draft, say, and
    one without."""
    if plan is None:
        return tuple(plans)
    return (plan, *(other for other in plans if other.names != plan.names))


class _ProcessingPlan:
    """Loading forms of processed layers, filled bucket by bucket."""

    def __init__(
        self, pieces: Sequence[Sequence[PlannedCopy]], processed: Sequence[ProcessedModule]
    ) -> None:
        owners = {
            storage_of(meta): (layer, name)
            for layer in processed
            for name, meta in layer.form.items()
        }
        self._pieces: list[dict[ProcessedModule, list[_FormPiece]]] = []
        self._buckets: dict[ProcessedModule, list[int]] = {}
        for index, part in enumerate(pieces):
            own: dict[ProcessedModule, list[_FormPiece]] = {}
            for piece in part:
                if piece.target.is_meta:
                    layer, name = owners[storage_of(piece.target)]
                    own.setdefault(layer, []).append((name, piece))
            self._pieces.append(own)
            for layer in own:
                self._buckets.setdefault(layer, []).append(index)
        self._begun: dict[ProcessedModule, dict[str, torch.Tensor]] = {}

    def complete_with(self, index: int) -> list[ProcessedModule]:
        """Return the layers whose last piece lies in a bucket."""
        return [layer for layer in self._pieces[index] if self._buckets[layer][-1] == index]

    def fill(
        self, index: int, wire: torch.Tensor
    ) -> Iterator[tuple[ProcessedModule, dict[str, torch.Tensor]]]:
        """Fill loading forms from a bucket; yield each layer that is complete, and what it makes.
        Buckets come in order; the first one forgets what an ended load has left."""
        if index == 0:
            self._begun.clear()
        for layer, pieces in self._pieces[index].items():
            buckets = self._buckets[layer]
            loaded = self._begun.pop(layer, None)
            lying: dict[str, torch.Tensor] = {}
            if loaded is None:
                if len(buckets) == 1 and wire.device == layer.device:
                    lying = _lying_whole(layer, pieces, wire)
                loaded = {name: layer.allocate(name) for name in layer.form if name not in lying}
            launch(
                (_same_part(loaded[name], piece.target), piece.source(wire))
                for name, piece in pieces
                if name not in lying
            )
            if index == buckets[-1]:
                yield layer, layer.process(loaded | lying)
            else:
                self._begun[layer] = loaded


#: A parameter of a loading form, and a copy that fills some of it.
_FormPiece = tuple[str, PlannedCopy]


def _lying_whole(
    layer: ProcessedModule, pieces: Sequence[_FormPiece], wire: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the parameters that lie whole and in order in a bucket, as views of it."""
    found = {}
    for name, form in layer.form.items() if layer.only_reads else ():
        own = [piece for other, piece in pieces if other == name]
        own.sort(key=lambda piece: piece.target.storage_offset())
        begin = own[0].offset
        if form.is_contiguous() and all(
            piece.is_row_major
            and piece.target.is_contiguous()
            and piece.offset - begin == piece.target.storage_offset()
            for piece in own
        ):
            typed = wire.view(form.dtype)
            at = typed.storage_offset() + begin
            found[name] = typed.as_strided(form.shape, form.stride(), at)
    return found


def _same_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(part.shape, part.stride(), part.storage_offset())


def _is_whole(manifest: Manifest, pieces: Sequence[Sequence[PlannedCopy]]) -> bool:
    """Return whether every byte of every tensor goes to a place of its own."""
    for index, part in enumerate(pieces):
        if any(piece.is_expanded for piece in part):
            return False
        # What goes to two parameters is one source.
        sources = {(p.offset, p.shape, p.stride): p.target.nbytes for p in part}
        slots = (manifest.tensors[i] for i in manifest.tensors_by_bucket[index])
        if sum(sources.values()) != sum(slot.meta.num_bytes for slot in slots):
            return False
    return True


def wait_for_copies(device: torch.device) -> None:
    """Block until the work on the calling thread's current CUDA stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def can_learn(worker: Any) -> bool:
    """Return whether there may be a copy plan at all: a CPU holds its weights packed."""
    return bool(worker.device.type == "cuda")


def processed_modules(
    model: torch.nn.Module,
) -> tuple[list[ProcessedModule], list[tuple[torch.nn.Module, LoadingForm]]]:
    """Return the layers that do not keep their weights as they were loaded.

    Returns:
        Those that copies can fill, and others that have no parameters of their own afterwards (the
        scales of a KV cache), with their loading forms: no copy may go there.
    """
    found: list[ProcessedModule] = []
    unfilled: list[tuple[torch.nn.Module, LoadingForm]] = []
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        # LoRA over experts puts a method around their own, which computes with the same weights.
        method = getattr(method, "old_quant_method", method)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            if any(True for _ in layer.parameters(recurse=False)):
                found.append(ProcessedModule(name, layer))
            elif form := loading_form(layer):
                unfilled.append((layer, form))
        if "MLA" in type(layer).__name__:
            raise ValueError(f"{name} derives matrices from its weights")
        # A backend may hold them as float32: FlashInfer copies them anew after a reload.
        if getattr(getattr(layer, "impl", None), "sinks", None) is not None:
            raise ValueError(f"{name} attends to sinks, which its backend may convert")
    return found, unfilled
