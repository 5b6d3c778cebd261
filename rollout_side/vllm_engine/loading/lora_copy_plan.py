"""Putting an adapter into its slot by plain copies, as ``copy_plan`` does for a base.

vLLM makes hundreds of small objects of an adapter and copies them one by one from host
memory, while nothing is generated: 50 ms for 504 tensors. For a LoRA of linear layers
it clears a slot of each stacked tensor, scales every B, and copies all A and B into
place; those of experts it stacks before. So that is learnt once for a layout and
configuration, by watching vLLM do it. From then on it is repeated, from the device's
memory if the adapter was received there.

vLLM's managers work as always. They hold an adapter without tensors. vLLM's own code
makes these only if the adapter must be put into a slot again after it lost its own.
"""

from __future__ import annotations

import importlib
import json
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_side.memory.versions import AdapterEntry, StagedVersion, bucket_starts
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.loading.copy_plan import bits
from rollout_side.vllm_engine.loading.processed_modules import storage_of
from weft_rl.containers import LruMapping

_log = logging.getLogger(__name__)

# Each tenant may have a rank, modules and a scaling of its own, and to learn a plan takes the
# engine's thread longer than to load by it. A plan of 504 copies has 0.3 MB, and 0.6 MB for
# each slot whose views it keeps; one of a mixture's experts may have 36,864.
_MAX_PLANS = 64
_MAX_COPIES = 64 * 504
_MAX_SLOTS_OF_VIEWS = 4


@dataclass(frozen=True)
class _SlotCopy:
    stacked: torch.Tensor
    """All slots of one A or B; the first dimension is the slot's number."""
    within: int
    """Start of the target in its slot, in elements; ``offset`` is that of the source in the
    adapter's bytes."""
    offset: int
    shape: tuple[int, ...]
    target_stride: tuple[int, ...]
    source_stride: tuple[int, ...]
    is_flat: bool
    """True if elements follow one another in source and target."""
    scale: float

    def target(self, slot: int) -> torch.Tensor:
        """Return the view that is copied to."""
        begin = self.stacked.storage_offset() + slot * self.stacked.stride(0) + self.within
        return self.stacked.as_strided(self.shape, self.target_stride, begin)

    def source(self, typed: torch.Tensor) -> torch.Tensor:
        """Return the view that is copied from."""
        begin = typed.storage_offset() + self.offset
        return typed.as_strided(self.shape, self.source_stride, begin)

    @property
    def num_elements(self) -> int:
        """Number of elements that are copied."""
        return prod(self.shape)


class _FlatPieces:
    """Places of flat pieces in an adapter's elements of their dtype: one call views them all."""

    def __init__(self, pieces: Sequence[_SlotCopy], dtype: torch.dtype) -> None:
        self.sizes: list[int] = []
        self.end = 0
        #: Of which pieces, and which of the views each is.
        self.places: list[tuple[int, int]] = []
        own = [i for i, p in enumerate(pieces) if p.is_flat and p.stacked.dtype == dtype]
        for index in sorted(own, key=lambda i: pieces[i].offset):
            offset, size = pieces[index].offset, pieces[index].num_elements
            if offset < self.end:
                raise ValueError("a tensor is read twice")
            self.sizes += [offset - self.end, size]
            self.places.append((index, len(self.sizes) - 1))
            self.end = offset + size

    def views(self, typed: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Return each piece's number, and the view of its elements."""
        views = typed[: self.end].split_with_sizes(self.sizes) if self.sizes else ()
        return ((index, views[at]) for index, at in self.places)


class SlotPlan:
    """Copies that fill a slot with an adapter of one layout and configuration."""

    def __init__(
        self,
        pieces: list[_SlotCopy],
        cleared: list[torch.Tensor],
        flags: Sequence[tuple[torch.Tensor, int]] = (),
    ) -> None:
        self._pieces, self._cleared, self._flags = pieces, cleared, flags
        self._strided = [index for index, piece in enumerate(pieces) if not piece.is_flat]
        filled = _filled(pieces)
        self._zeroed = [stacked for stacked in cleared if storage_of(stacked) not in filled]
        num_slots = _MAX_SLOTS_OF_VIEWS if len(pieces) * _MAX_SLOTS_OF_VIEWS < _MAX_COPIES else 1
        self._views: LruMapping[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = LruMapping(
            num_slots
        )
        self._cuts = {d: _FlatPieces(pieces, d) for d in {piece.stacked.dtype for piece in pieces}}
        self._scaled: dict[float, list[int]] = {}
        for index, piece in enumerate(pieces):
            if piece.scale != 1:
                self._scaled.setdefault(piece.scale, []).append(index)

    @property
    def num_copies(self) -> int:
        """Number of copies that fill a slot."""
        return len(self._pieces)

    def fill(self, slot: int, data: torch.Tensor) -> None:
        """Put an adapter into a slot; ordered on the current stream, does not wait for it.

        Args:
            data: uint8, the adapter's buckets, unscaled; on the model's device or the host.
        """
        if (views := self._views.get(slot)) is None:
            views = self._targets(slot), [stacked[slot] for stacked in self._zeroed]
            self._views.put(slot, views)
        targets, zeroed = views
        sources = self._sources(data)
        with torch.no_grad():
            if zeroed:
                torch._foreach_zero_(zeroed)
            torch._foreach_copy_(targets, sources)
            for scale, indices in self._scaled.items():
                scaled = [targets[i] for i in indices]
                if scaled[0].device.type == "cpu":  # there _foreach_mul_ rounds the scale first
                    for target in scaled:
                        target.mul_(scale)
                else:
                    torch._foreach_mul_(scaled, scale)
            for value in {value for _, value in self._flags}:
                own = [flag[slot] for flag, each in self._flags if each == value]
                torch._foreach_zero_(own)
                torch._foreach_add_(own, value)

    def _targets(self, slot: int) -> list[torch.Tensor]:
        made = [piece.target(slot) for piece in self._pieces]
        flat = [piece.is_flat for piece in self._pieces]
        return [t.view(-1) if is_flat else t for t, is_flat in zip(made, flat, strict=True)]

    def _sources(self, data: torch.Tensor) -> list[torch.Tensor]:
        typed = {dtype: data.view(dtype) for dtype in self._cuts}
        found = dict(self._strided_sources(typed))
        for dtype, cuts in self._cuts.items():
            found.update(cuts.views(typed[dtype]))
        return [found[index] for index in range(len(self._pieces))]

    def _strided_sources(
        self, typed: Mapping[torch.dtype, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for index in self._strided:
            piece = self._pieces[index]
            yield index, piece.source(typed[piece.stacked.dtype])

    def proves(self, slot: int, data: torch.Tensor) -> bool:
        """Return whether ``fill`` makes of a slot, bit for bit, what the slot holds already. If
        not, the slot is left as it was."""
        held = [stacked[slot] for stacked in self._cleared]
        held += [flag[slot : slot + 1] for flag, _ in self._flags]
        before = [tensor.clone() for tensor in held]
        self.fill(slot, data)
        pairs = [*zip(held, before, strict=True)]
        if all(torch.equal(bits(now), bits(was)) for now, was in pairs):
            return True
        for now, was in pairs:
            now.copy_(was)
        return False


def _filled(pieces: Sequence[_SlotCopy]) -> set[int]:
    """Return the storages whose slots the pieces fill, so that they need not be zeroed."""
    found: dict[int, list[_SlotCopy]] = {}
    for piece in pieces:
        found.setdefault(storage_of(piece.stacked), []).append(piece)
    return {storage for storage, own in found.items() if _fill_slot(own)}


def _fill_slot(pieces: list[_SlotCopy]) -> bool:
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.within):
        rows = [prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
        if piece.target_stride != tuple(rows) or piece.within != end:
            return False
        end += piece.num_elements
    return end == pieces[0].stacked[0].numel()


class AdapterLoader:
    """Loader of adapters into one worker's engine; used by the engine's thread."""

    def __init__(self) -> None:
        self._plans: LruMapping[tuple[bytes, str], SlotPlan | None] = LruMapping(_MAX_PLANS)

    def load(self, worker: Any, entry: AdapterEntry, request: Any) -> None:
        """Do ``worker.add_lora(request)``, by copies where they are known to do the same."""
        key = entry.staged.manifest.layout_digest, entry.config_json
        # Taken in any case: nothing else would free the device's memory.
        received = entry.staged.take_device_copy()
        data = entry.staged.segment.data if received is None else received
        if key not in self._plans:
            self._plans.put(key, _learn(worker, entry, request, data))
            while len(self._plans) > 1 and self._num_copies > _MAX_COPIES:
                self._plans.drop_oldest()
        elif (plan := self._plans.get(key)) is None:
            worker.add_lora(request)
        else:
            _quickly(worker, entry, request, plan, data)
        if received is not None:
            # It goes back to another stream's pool: not before this one has read it.
            received.record_stream(torch.cuda.current_stream(received.device))

    @property
    def _num_copies(self) -> int:
        return sum(plan.num_copies for _, plan in self._plans.items() if plan is not None)


def _quickly(
    worker: Any, entry: AdapterEntry, request: Any, plan: SlotPlan, data: torch.Tensor
) -> None:
    manager = worker.model_runner.lora_manager
    adapters = manager._adapter_manager
    deferred = _deferred_model(manager, request, int(json.loads(entry.config_json)["r"]))
    modules = adapters.modules
    adapters.modules = {}  # the managers find a slot, and fill nothing
    adapters._create_merged_loras_inplace = lambda _: None
    try:
        with lora_hook.instead(request.lora_path, deferred):
            worker.add_lora(request)
    finally:
        adapters.modules = modules
        del adapters._create_merged_loras_inplace  # the class's own, again
        deferred.weft_quiet = False
    plan.fill(adapters.lora_index_to_id.index(request.lora_int_id), data)


def _deferred_model(manager: Any, request: Any, rank: int) -> Any:
    """Return a ``LoRAModel`` whose tensors are made when they are asked for."""
    base = importlib.import_module("vllm.lora.lora_model").LoRAModel

    class DeferredLoraModel(base):  # type: ignore[misc, valid-type]
        weft_quiet = True  # while the managers take it in

        def __init__(self) -> None:
            self._made: dict[str, Any] | None = None
            super().__init__(request.lora_int_id, rank, {})

        @property
        def loras(self) -> dict[str, Any]:
            if self._made is not None:
                return self._made
            if self.weft_quiet:
                return {}
            model = lora_hook.load_from_store(manager, request)
            manager._adapter_manager._create_merged_loras_inplace(model)
            self._made = model.loras
            return self._made

        @loras.setter
        def loras(self, value: dict[str, Any]) -> None:
            pass  # the empty one of ``__init__``

        def get_lora(self, module_name: str) -> Any:
            return self.loras.get(module_name)

        def check_lora_name(self, lora_name: str) -> bool:
            return lora_name in self.loras

    return DeferredLoraModel()


# -- learning -----------------------------------------------------------------------


def _learn(worker: Any, entry: AdapterEntry, request: Any, data: torch.Tensor) -> SlotPlan | None:
    """Watch vLLM load an adapter; return a plan if it is proven."""
    adapters = worker.model_runner.lora_manager._adapter_manager
    staged = entry.staged
    own = staged.own_bytes()
    staged.spare.append(own)  # what the hook is going to take
    try:
        with _watching(adapters, own) as watcher:
            worker.add_lora(request)
    finally:
        staged.spare.clear()
    try:
        slot = adapters.lora_index_to_id.index(request.lora_int_id)
        plan = watcher.plan(slot, staged)
        if not plan.proves(slot, data):
            raise ValueError("copies alone do not make the same of a slot")
    except Exception as error:  # noqa: BLE001 (a faster way only; the safe one remains)
        _log.info("adapters like %s are loaded by vLLM itself: %s", staged.version, error)
        return None
    _log.debug("adapters like %s are loaded by %d copies", staged.version, plan.num_copies)
    return plan


@contextmanager
def _watching(adapters: Any, own: torch.Tensor) -> Iterator[_SlotWriteTracer]:
    flags = [getattr(module, "adapter_enabled", None) for module in adapters.modules.values()]
    watcher = _SlotWriteTracer(
        _stacked_tensors(adapters), [flag for flag in flags if flag is not None], own
    )
    with watcher:
        yield watcher


def _stacked_tensors(adapters: Any) -> list[torch.Tensor]:
    """Return all tensors that hold the slots of adapters. Layers of experts have views of parts
    beside them, one for each expert."""
    found: dict[int, torch.Tensor] = {}
    for module in adapters.modules.values():
        for name, value in vars(module).items():
            if "stacked" in name and isinstance(value, tuple | list | torch.Tensor):
                for tensor in [value] if isinstance(value, torch.Tensor) else value:
                    if isinstance(tensor, torch.Tensor):
                        known = found.setdefault(storage_of(tensor), tensor)
                        if known.numel() < tensor.numel():
                            found[storage_of(tensor)] = tensor
    return list(found.values())


@dataclass(frozen=True)
class _StackTensor:
    """Tensor that vLLM has stacked from tensors of the adapter, one for each expert."""

    tensor: torch.Tensor
    parts: list[torch.Tensor]

    def under(self, view: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of the adapter that a view's rows along its first dim come from."""
        shape, strides = self.tensor.shape[1:], self.tensor.stride()[1:]
        found = []
        for index in range(view.shape[0]):
            at = int(view.storage_offset() - self.tensor.storage_offset()) + index * view.stride(0)
            number, within = divmod(at, self.tensor.stride(0))
            part = self.parts[number]
            begin = [(within // stride) % size for size, stride in zip(shape, strides, strict=True)]
            if view.stride()[1:] != strides:
                raise ValueError("a stack is read in another order than it was made in")
            for dim, (first, size) in enumerate(zip(begin, view.shape[1:], strict=True)):
                part = part.narrow(dim, first, size)
            found.append(part)
        return found


class _SlotWriteTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that lets all happen, and notes writes to slots and to the adapter's bytes."""

    def __init__(
        self, stacked: list[torch.Tensor], flags: list[torch.Tensor], own: torch.Tensor
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stacked = {storage_of(t): t for t in stacked}
        self._flags = {storage_of(t): (t, 0) for t in flags}
        self._own, self._own_storage = own, storage_of(own)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cleared: dict[int, torch.Tensor] = {}
        self._made: dict[int, _StackTensor] = {}
        self._scales: dict[int, float] = {}
        """By offset in the adapter's bytes, or by the storage of a stack."""
        self._strange = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a write, or a stack of the adapter's tensors; let it happen."""
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and func._schema.is_mutable:
            self._note(func, target, args)
        result = func(*args, **(kwargs or {}))
        self._note_stack(func.overloadpacket.__name__, args, result)
        return result

    def _note_stack(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "stack" and all(storage_of(t) == self._own_storage for t in args[0]):
            if len(args) == 1 or args[1] == 0:
                self._made[storage_of(result)] = _StackTensor(result, list(args[0]))
        elif name in ("_pin_memory", "clone") and storage_of(args[0]) in self._made:
            before = self._made[storage_of(args[0])]
            if args[0].shape == before.tensor.shape and result.is_contiguous():
                self._made[storage_of(result)] = _StackTensor(result, before.parts)
                scale = self._scales.get(storage_of(args[0]), 1.0)
                self._scales[storage_of(result)] = scale
                if name == "_pin_memory":  # which is what is copied then
                    del self._made[storage_of(args[0])]

    def _note(self, func: Any, target: torch.Tensor, args: tuple[Any, ...]) -> None:
        name = func.overloadpacket.__name__
        where = storage_of(target)
        if where in self._stacked:
            if name == "copy_":
                self._copies.append((target, args[1]))
            elif name in ("zero_", "fill_") and (name == "zero_" or float(args[1]) == 0):
                self._cleared[where] = self._stacked[where]
            else:
                self._strange = f"a slot is written by {func}"
        elif where in self._flags:
            if name in ("fill_", "copy_") and target.dim() == 0:
                self._flags[where] = self._flags[where][0], int(args[1])
            else:
                self._strange = f"what enables a slot is written by {func}"
        elif where == self._own_storage or where in self._made:
            if name == "mul_":
                key = where if where in self._made else self._offset(target)
                self._scales[key] = float(args[1])
            else:
                self._strange = f"its tensors are changed by {func}"

    def _offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() - self._own.data_ptr()

    def plan(self, slot: int, staged: StagedVersion) -> SlotPlan:
        """Return a plan that repeats, for any slot, what was seen."""
        if self._strange:
            raise ValueError(self._strange)
        starts = _tensor_starts(staged)
        left = {start: slot_.meta.num_bytes for start, slot_ in starts.items()}
        order = sorted(starts)
        pieces, seen = [], set()
        for target, source, scale in self._all_copies(order):
            stacked = self._stacked[storage_of(target)]
            if storage_of(source) != self._own_storage or source.dtype != target.dtype:
                raise ValueError("a slot is filled with what was computed from a tensor")
            offset = self._offset(source)
            within = target.storage_offset() - stacked.storage_offset() - slot * stacked.stride(0)
            if not 0 <= within < stacked.stride(0) or storage_of(target) not in self._cleared:
                raise ValueError("another slot was written, or one that was not cleared")
            start = order[bisect_right(order, offset) - 1]
            key = offset, source.shape, source.stride()
            is_first = key not in seen
            seen.add(key)
            left[start] -= source.numel() * source.element_size() * is_first
            shape = tuple(target.shape)
            expanded = source.expand(shape)
            pieces.append(
                _SlotCopy(
                    stacked,
                    int(within),
                    int(offset) // source.element_size(),
                    shape,
                    target.stride(),
                    expanded.stride(),
                    is_first and target.is_contiguous() and expanded.is_contiguous(),
                    self._scales.get(start, 1.0) * scale,
                )
            )
        if unread := [size for size in left.values() if size]:
            raise ValueError(f"{len(unread)} tensors are not copied exactly once")
        return SlotPlan(pieces, list(self._cleared.values()), list(self._flags.values()))

    def _all_copies(
        self, starts: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Yield part of a slot, part of the adapter, and what that was multiplied by in a stack."""
        for target, source in self._copies:
            stack = self._made.get(storage_of(source))
            if stack is None:
                yield target, source, 1.0
                continue
            scale = self._scales.get(storage_of(source), 1.0)
            parts = stack.under(source)
            if len({bisect_right(starts, self._offset(part)) for part in parts}) == 1:
                merged = _merged(parts)
                if merged is not None:
                    yield target, merged, scale
                    continue
            for index, part in enumerate(parts):
                yield target[index], part, scale


def _merged(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return parts of one tensor as a view with one more dim in front; None if they do not lie at
    the same distance from one another."""
    first, places = parts[0], [int(part.storage_offset()) for part in parts]
    steps = {after - before for before, after in pairwise(places)}
    alike = all(p.shape == first.shape and p.stride() == first.stride() for p in parts)
    if len(steps) != 1 or not alike:
        return None
    shape, strides = (len(parts), *first.shape), (steps.pop(), *first.stride())
    return first.as_strided(shape, strides, places[0])


def _tensor_starts(staged: StagedVersion) -> dict[int, Any]:
    """Return the manifest's tensor slots by their first byte in the segment."""
    begins = bucket_starts(staged.manifest)
    return {begins[s.bucket] + s.offset_bytes: s for s in staged.manifest.tensors}
