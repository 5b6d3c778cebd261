"""Packer of the elements that one rank of a sharded trainer holds; each bucket lists its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_side.packing.finite import check_finite
from trainer_side.packing.packer import is_worth_it, lying, made_buffers
from trainer_side.sharding.hand_over import Filling
from weft_rl.contract.capabilities import GLOO
from weft_rl.contract.layout.manifest import Manifest, TensorSlot
from weft_rl.contract.layout.runs import Run
from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.contract.tensors import TensorMeta
from weft_rl.transport.digests.copied import Place, pack_tensors
from weft_rl.transport.digests.copied_on_host import pack_digesting
from weft_rl.transport.digests.wsum64 import Digests, Part, start_digests
from weft_rl.transport.group import CPU
from weft_rl.transport.wire.buckets import Sealed, run_parts, seal_bucket


@dataclass(frozen=True)
class _Place:
    """Place of a run in its bucket."""

    run: Run
    part: Part
    slot: TensorSlot
    """The run's elements, as a tensor of the payload."""
    view: torch.Tensor


class ShardPacker:
    """Reused buffers for one sender's wire buckets, which carry runs; see ``Packer``.

    Args:
        manifest: The layout that the runs belong in.
        plan: Plan of all senders.
        sender: Number of the sender that packs.
        carried: The runs of each of its wire buckets.
        buffers: Buffers of an earlier packer; those that are large enough are used again.
        device: Device of the buffers. On an accelerator all work is that of the calling thread's
            current stream.
        backend: Backend that sends them.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: SendPlan,
        sender: int,
        carried: tuple[tuple[Run, ...], ...],
        buffers: list[torch.Tensor] | None = None,
        device: torch.device = CPU,
        backend: str = GLOO,
    ) -> None:
        self.manifest, self.plan = manifest, plan
        self._device, self._backend = device, backend
        self._wires = [plan.buckets[index] for index in plan.sent_by(sender)]
        self._indices = plan.sent_by(sender)
        self._carried = carried
        sizes = tuple(wire.wire_bytes for wire in self._wires)
        self.buffers = made_buffers(sizes, buffers or [], device, backend)
        self._places = [self._places_of(nth) for nth in range(len(carried))]

    def pack(
        self,
        nth: int,
        source: Filling,
        nonce: int,
        totals: list[int],
        *,
        finite: bool = False,
    ) -> Sealed:
        """Fill a wire bucket of this sender and seal it; see ``Packer.pack``.

        Args:
            nth: Number of the bucket among this sender's.
            totals: Digest sums of all tensors; the runs' digests are added in place.
        """
        places, wire = self._places[nth], self._wires[nth]
        payload = self.wire(nth)[: wire.payload_bytes]
        # What a run's first and last block hold beside it counts in its digest.
        edges = [edge for place in places for edge in _edges(payload, place)]
        if edges:
            torch._foreach_zero_(edges)
        begun = _pack_lying(payload, places, source)
        if begun is None:
            source.fill([place.run for place in places], [place.view for place in places])
            begun = start_digests(payload, [place.part for place in places])
        if finite:
            check_finite(payload, [place.slot for place in places])
        digests = begun.wait()
        for place, digest in zip(places, digests, strict=True):
            totals[place.run.tensor] = (totals[place.run.tensor] + digest) % 2**64
        runs = self._carried[nth]
        return seal_bucket(wire.payload_bytes, nonce, self._indices[nth], digests, runs)

    def wire(self, nth: int) -> torch.Tensor:
        """Return a bucket's bytes as ``Packer.wire`` does, also of a bucket whose turn has come."""
        return self._buffer(nth)[: self._wires[nth].wire_bytes]

    def move(self, held: range) -> None:
        """Put the held buckets into fresh buffers; see ``BufferedPacker``."""
        old = self.buffers
        self.buffers = made_buffers(
            tuple(wire.wire_bytes for wire in self._wires), [], self._device, self._backend
        )
        self._places = [self._places_of(nth) for nth in range(len(self._carried))]
        for nth in held:
            self.wire(nth).copy_(old[nth % len(old)][: self._wires[nth].wire_bytes])

    def _places_of(self, nth: int) -> list[_Place]:
        places, buffer, runs = [], self._buffer(nth), self._carried[nth]
        for run, part in zip(runs, run_parts(self.manifest, runs), strict=True):
            meta = self.manifest.tensors[run.tensor].meta
            itemsize = meta.dtype.itemsize_bytes
            offset = part.at + run.first * itemsize - part.first_byte
            end = offset + run.num_elements * itemsize
            slot = TensorSlot(TensorMeta(meta.name, meta.dtype, (run.num_elements,)), 0, offset)
            view = buffer[offset:end].view(getattr(torch, meta.dtype.torch_name))
            places.append(_Place(run, part, slot, view))
        return places

    def _buffer(self, nth: int) -> torch.Tensor:
        return self.buffers[nth % len(self.buffers)]


def _pack_lying(payload: torch.Tensor, places: Sequence[_Place], source: Filling) -> Digests | None:
    """Copy and digest runs in one reading, if all lie on the payload's device as they travel.
    Return None, with nothing done, where not all do, or nothing is gained."""
    views = [place.view for place in places]
    if not is_worth_it(views) or any(place.run.repeats > 1 for place in places):
        return None
    held = source.by_reference([place.run for place in places])
    found = lying(held, [view.dtype for view in views])
    if found is None:
        return None
    if not payload.is_cuda:
        digests = pack_digesting(found, views, payload, [place.part for place in places])
        return None if digests is None else Digests(digests)
    return pack_tensors(found, [_place(place) for place in places], payload)


def _place(place: _Place) -> Place:
    first = place.run.first * place.view.element_size()
    return Place(place.slot.offset_bytes - first, first, first + place.slot.meta.num_bytes)


def _edges(payload: torch.Tensor, place: _Place) -> list[torch.Tensor]:
    begin, end = place.slot.offset_bytes, place.slot.offset_bytes + place.slot.meta.num_bytes
    first, last = place.part.at, place.part.at + place.part.num_bytes
    edges = (payload[first:begin], payload[end:last])
    return [edge for edge in edges if edge.numel()]
