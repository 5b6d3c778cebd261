"""Watching a model's ``load_weights`` for the copies that it would make.

Every write to a parameter is held back, so nothing that the model computes with
changes, and nothing of the tensors' contents is read. What is more than a copy is
refused: such a model is loaded layer by layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_side.memory.versions import bucket_starts, tensors_in
from weft_rl.contract.layout.manifest import Manifest


@dataclass(frozen=True)
class Piece:
    """A copy: part of a bucket's bytes to part of a parameter."""

    target: torch.Tensor
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
        return is_first and self.stride == tuple(_row_major(self.shape))

    @property
    def is_expanded(self) -> bool:
        """True if several elements of the parameter come from one of the wire."""
        return any(s == 0 and n > 1 for n, s in zip(self.shape, self.stride, strict=True))


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def watch(
    model: torch.nn.Module, manifest: Manifest, data: torch.Tensor, rename: Callable[[str], str]
) -> list[list[Piece]]:
    """Return the copies that ``load_weights`` would make, by bucket.

    Args:
        data: uint8, a segment of this layout. Neither read nor written: may be on the meta device.
        rename: Maps the manifest's names to those that ``load_weights`` knows.

    Raises:
        ValueError: ``load_weights`` would do more than copy, or not fill every parameter once.
    """
    watcher = _Watcher(manifest, data, model.parameters())
    with torch.no_grad(), watcher:
        model.load_weights(  # type: ignore[operator]
            (rename(name), tensor) for name, tensor in tensors_in(manifest, data)
        )
    watcher.check_covered()
    return watcher.pieces


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that holds back writes to parameters, and notes their sources."""

    def __init__(
        self, manifest: Manifest, data: torch.Tensor, parameters: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[list[Piece]] = [[] for _ in manifest.buckets]
        self._starts = bucket_starts(manifest)
        self._data = data
        self._wire = storage_of(data)
        #: Bytes of each parameter that nothing was copied to yet, by its storage.
        self._left = {storage_of(p): p.numel() * p.element_size() for p in parameters}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let views through, and note copies from the wire.

        Refuse all else that would change a parameter, or compute something from a tensor.
        """
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = [storage_of(x) for x in given]
        name = func.overloadpacket.__name__
        if func._schema.is_mutable and any(where in self._left for where in storages):
            target = given[0]
            if name == "copy_" and storages[0] in self._left:
                self._note(target, args[1])
            elif storages[0] in self._left and _is_zeroing(name, args):
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
        piece = Piece(target, offset, tuple(source.shape), source.stride())
        self.pieces[bucket].append(piece)

    def _count(self, target: torch.Tensor) -> None:
        self._left[storage_of(target)] -= target.numel() * target.element_size()


def _is_zeroing(name: str, args: tuple[Any, ...]) -> bool:
    return name == "zero_" or (name == "fill_" and float(args[1]) == 0)


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage, valid while that lives; views share it.

    It is not the address: storages of the meta device have none.
    """
    return int(tensor.untyped_storage()._cdata)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's elements as integers of their size: a NaN equals itself there."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ])  # fmt: skip
