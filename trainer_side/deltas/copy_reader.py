"""Reader of tensors that can be read once into a copy, compared with what was there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from trainer_side.deltas.committed_copy import CommittedCopy
from trainer_side.packing.packer import check_finite
from trainer_side.sources.named_source import TensorReader
from trainer_side.sources.source import torch_dtypes
from weft_rl.contract.manifest import Run, TensorSlot, align_up
from weft_rl.transport.digests.wsum64 import digests_of
from weft_rl.transport.wire.changes import (
    EncodedChanges,
    encode_over,
    has_host_coder,
    join_encoded,
    start_encoding,
)


class CopyReader(TensorReader, Protocol):
    """Reader of a version's tensors into a copy that is open."""

    def changes(self) -> Sequence[EncodedChanges]:
        """Return the changes of each bucket of the layout, once all were taken; blocks. There are
        none where nothing is compared."""


def copy_reader(
    copy: CommittedCopy, device: torch.device, *, finite: bool, compares: bool
) -> CopyReader:
    """Make the reader that is fastest on a device.

    Args:
        copy: Copy of whole tensors.
        device: Device on which tensors are compared.
        finite: Refuse NaN and infinities.
        compares: False for a copy that holds nothing yet.
    """
    if not compares:
        return _PlainReader(copy, device, finite=finite)
    if has_host_coder(device):
        return _HostReader(copy, device, finite=finite)
    return _GroupReader(copy, device, finite=finite)


class _OwnReader:
    """Reader that reads each tensor by itself."""

    def __init__(self, copy: CommittedCopy, device: torch.device, *, finite: bool) -> None:
        self._copy, self._device, self._finite = copy, device, finite
        self._tensors = copy.packing.manifest.tensors
        self._changes = dict[int, EncodedChanges]()
        """Changes of neighbours in a bucket, by the first of them."""

    def take(self, index: int, tensor: torch.Tensor) -> None:
        meta = self._tensors[index].meta
        (dtype,) = torch_dtypes([meta])
        new = tensor.reshape(-1).to(self._device, dtype).contiguous()
        if self._finite:
            check_finite(new.view(torch.uint8), [TensorSlot(meta, 0, 0)])
        self._copy.wrote(index, self._put(index, new, self._copy.place(index)))

    def _put(self, index: int, new: torch.Tensor, place: torch.Tensor) -> int:
        """Write a tensor to its place; return its digest."""
        raise NotImplementedError

    def digests(self) -> Sequence[int]:
        return self._copy.totals

    def changes(self) -> Sequence[EncodedChanges]:
        by_bucket = dict[int, list[EncodedChanges]]()
        for first, changes in sorted(self._changes.items()):
            by_bucket.setdefault(self._tensors[first].bucket, []).append(changes)
        found = [join_encoded(by_bucket[bucket]) for bucket in sorted(by_bucket)]
        return [changes._replace(num_buckets=1) for changes in found]


class _PlainReader(_OwnReader):
    """Reader into a copy that held nothing."""

    def _put(self, index: int, new: torch.Tensor, place: torch.Tensor) -> int:
        (digest,) = digests_of([new])
        place[: new.nbytes].copy_(new.view(torch.uint8))
        place[new.nbytes :].zero_()
        return digest


class _HostReader(_OwnReader):
    """Reader that compares, codes and overwrites in one pass, on the host."""

    def _put(self, index: int, new: torch.Tensor, place: torch.Tensor) -> int:
        meta = self._tensors[index].meta
        run, size = Run(index, 0, meta.num_elements), meta.dtype.itemsize_bytes
        changes = self._changes[index] = encode_over(place, new, run, size)
        return (self._copy.totals[index] + changes.sums[0]) % 2**64


@dataclass
class _Group:
    """Neighbours in a bucket that are compared at once."""

    slots: list[TensorSlot]
    first: int
    new: torch.Tensor
    """Memory that begins with their new elements, as they lie there."""
    num_bytes: int = 0

    @property
    def begin_bytes(self) -> int:
        """First byte in the bucket."""
        return self.slots[0].offset_bytes

    def goes_on_with(self, index: int, slot: TensorSlot) -> bool:
        """Return whether a tensor is the next one in the bucket, and there is memory for it."""
        return (
            index == self.first + len(self.slots)
            and slot.bucket == self.slots[0].bucket
            and slot.offset_bytes == self.begin_bytes + self.num_bytes
            and self.num_bytes + align_up(slot.meta.num_bytes) <= self.new.numel()
        )


class _GroupReader(_OwnReader):
    """Reader that compares neighbours at once, up to a bucket of them: each comparison on a GPU
    takes a while to begin, and is waited for."""

    def __init__(self, copy: CommittedCopy, device: torch.device, *, finite: bool) -> None:
        super().__init__(copy, device, finite=finite)
        self._free = deque(copy.group_memory(device))
        self._open: _Group | None = None
        self._begun = deque[tuple[_Group, Callable[[], EncodedChanges]]]()

    def take(self, index: int, tensor: torch.Tensor) -> None:
        slot, group = self._tensors[index], self._open
        if group is None or not group.goes_on_with(index, slot):
            self._compare()
            if not self._free:
                self._write()
            group = self._open = _Group([], index, self._free.popleft())
        (dtype,) = torch_dtypes([slot.meta])
        begin, end = group.num_bytes, group.num_bytes + slot.meta.num_bytes
        group.new[begin:end].view(dtype).copy_(tensor.reshape(-1))
        group.num_bytes = align_up(end)
        group.new[end : group.num_bytes].zero_()
        group.slots.append(slot)

    def digests(self) -> Sequence[int]:
        self._finish()
        return super().digests()

    def changes(self) -> Sequence[EncodedChanges]:
        self._finish()
        return super().changes()

    def _finish(self) -> None:
        self._compare()
        while self._begun:
            self._write()

    def _place(self, group: _Group) -> torch.Tensor:
        payload = self._copy.payload(group.slots[0].bucket)
        return payload[group.begin_bytes : group.begin_bytes + group.num_bytes]

    def _compare(self) -> None:
        """Begin to compare the group that is open."""
        group, self._open = self._open, None
        if group is None:
            return
        new, metas = group.new[: group.num_bytes], [slot.meta for slot in group.slots]
        if self._finite:
            begin = group.begin_bytes
            check_finite(
                new, [replace(slot, offset_bytes=slot.offset_bytes - begin) for slot in group.slots]
            )
        runs = [Run(group.first + n, 0, meta.num_elements) for n, meta in enumerate(metas)]
        old = self._place(group).to(self._device, non_blocking=True)
        sizes = [meta.dtype.itemsize_bytes for meta in metas]
        self._begun.append((group, start_encoding(old, new, runs, sizes)))

    def _write(self) -> None:
        """End the comparison that was begun first, and write what was compared to its place."""
        group, end = self._begun.popleft()
        changes = self._changes[group.first] = end()
        self._place(group).copy_(group.new[: group.num_bytes])
        for index, change in enumerate(changes.sums, group.first):
            self._copy.wrote(index, (self._copy.totals[index] + change) % 2**64)
        self._free.append(group.new)
