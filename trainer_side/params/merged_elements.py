"""A weight of the base with LoRA merged in, each rank for the elements that it holds.

The factors are small and are brought to every rank; the weight stays where it is. Sums are formed
in float32 or better, and rounded once.

Source: peft.tuners.lora.Linear.get_delta_weight: W + s B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from trainer_side.params.sharding.elements import Elements, HeldElements
from trainer_side.params.sharding.sharded import Run
from trainer_side.ranks import Ranks

#: Elements whose sums are formed at a time, in float32.
_CHUNK_ELEMENTS, _CHUNK_ELEMENTS_ON_DEVICE = 2**19, 2**24


class Factors:
    """LoRA's factors, whole at every rank while a push reads them.

    Args:
        elements: Where their elements lie, by name.
        metas: Their whole shapes and own dtypes.
        ranks: Of the trainer.
    """

    def __init__(
        self,
        elements: Mapping[str, HeldElements],
        metas: Mapping[str, torch.Tensor],
        ranks: Ranks,
    ) -> None:
        self._elements, self._metas, self._ranks = elements, metas, ranks
        self._whole: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._elements

    def __getitem__(self, name: str) -> torch.Tensor:
        """A whole factor, once it was brought."""
        return self._whole[name]

    def bring(self) -> None:
        """Bring them to every rank: collective, one message of each rank; blocks."""
        own = self._ranks.rank
        places: list[list[tuple[str, Run]]] = [[] for _ in range(self._ranks.size)]
        for name, elements in self._elements.items():
            for run in elements.runs:
                places[run.rank].append((name, run))
        messages = [self._message(theirs) for theirs in places]
        numbers = dict.fromkeys(self._elements, 0)
        device = torch.device("cpu")
        views, sources = [], []
        for (name, _), view in zip(places[own], messages[own][1], strict=True):
            held = self._elements[name].held(numbers[name])
            numbers[name] += 1
            device = held.device
            views.append(view)
            sources.append(held)
        if views:
            torch._foreach_copy_(views, sources)
        self._ranks.exchange([message for message, _ in messages])
        self._whole = {
            name: torch.empty_like(self._metas[name], device=device) for name in self._elements
        }
        targets, parts = [], []
        for theirs, (message, views) in zip(places, messages, strict=True):
            here = message.to(device)
            for (name, run), view in zip(theirs, views, strict=True):
                offset = view.storage_offset() * view.element_size()
                part = here[offset : offset + view.numel() * view.element_size()].view(view.dtype)
                targets.append(run.of(self._whole[name]))
                parts.append(part.view(run.shape))
        if targets:
            torch._foreach_copy_(targets, parts)

    def _message(
        self, pieces: Sequence[tuple[str, Run]]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One rank's elements end to end, aligned, on the host; and a view of each piece."""
        offsets, size = [], 0
        for name, run in pieces:
            offsets.append(size)
            size += -(-run.size * self._metas[name].element_size() // 16) * 16
        message = torch.zeros(size, dtype=torch.uint8)
        views = []
        for offset, (name, run) in zip(offsets, pieces, strict=True):
            meta = self._metas[name]
            end = offset + run.size * meta.element_size()
            views.append(message[offset:end].view(meta.dtype))
        return message, views


class MergedElements:
    """See ``Elements``.

    Args:
        base: The weight's own elements.
        shape: (out features, in features) of the whole weight.
        factors: Which hold ``a`` (rank, in features) and ``b`` (out features, rank).
        a, b: Their names.
        scaling: Of their product.
    """

    def __init__(
        self,
        base: HeldElements,
        shape: torch.Size,
        factors: Factors,
        a: str,
        b: str,
        scaling: float,
        rank: int,
    ) -> None:
        self.runs: Sequence[Run] = base.runs
        self._base, self._width = base, shape[1]
        self._factors, self._a, self._b, self._scaling = factors, a, b, scaling
        self._own = [run for run in base.runs if run.rank == rank]

    def held(self, number: int) -> None:
        """See ``Elements``: it is computed."""
        return

    def fill(self, number: int, out: torch.Tensor) -> None:
        """See ``Elements``; extra memory is that of a chunk of the sums."""
        run, weight = self._own[number], self._base.held(number)
        a, b = self._factors[self._a], self._factors[self._b]
        dtype = torch.float32
        for tensor in (weight, a, b):
            dtype = torch.promote_types(dtype, tensor.dtype)
        # A rank that holds no part of any factor does not know where they belong.
        a, b = a.to(weight.device, dtype), b.to(weight.device, dtype)
        with torch.no_grad(), _without_tf32(weight.device):
            done = 0
            for row, rows, column, columns in _blocks(run, self._width):
                num = rows * columns
                of, to = weight[done : done + num], out[done : done + num]
                self._block(
                    of.view(rows, columns),
                    to.view(rows, columns),
                    b[row : row + rows],
                    a[:, column : column + columns],
                )
                done += num

    def _block(
        self, weight: torch.Tensor, out: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> None:
        on_device = weight.device.type != "cpu"
        most = _CHUNK_ELEMENTS_ON_DEVICE if on_device else _CHUNK_ELEMENTS
        step = max(1, most // weight.shape[1])
        for first in range(0, weight.shape[0], step):
            rows = slice(first, first + step)
            own = weight[rows].to(a.dtype)
            if on_device:  # one pass less; within a unit in the last place of what travels
                total = own.addmm_(b[rows], a, alpha=self._scaling)
            else:
                total = own + (b[rows] @ a) * self._scaling
            out[rows].copy_(total)


def merges_in_place(elements: Elements, width: int) -> bool:
    """Whether every run of a weight is made of blocks of its rows and columns."""
    return all(run.repeats == 1 or _is_block(run, width) for run in elements.runs)


def _is_block(run: Run, width: int) -> bool:
    return run.stride == width and run.begin % width + run.numel <= width


def _blocks(run: Run, width: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, rows, first column, columns of the blocks that a run is made of, in order."""
    row, column = divmod(run.begin, width)
    if run.repeats > 1:
        yield row, run.repeats, column, run.numel
        return
    left = run.numel
    if column:
        head = min(width - column, left)
        yield row, 1, column, head
        row, left = row + 1, left - head
    if rows := left // width:
        yield row, rows, 0, width
        row, left = row + rows, left - rows * width
    if left:
        yield row, 1, 0, left


@contextmanager
def _without_tf32(device: torch.device) -> Iterator[None]:
    """Products in full float32, whatever the application allows its own."""
    matmul = torch.backends.cuda.matmul
    if device.type != "cuda" or not matmul.allow_tf32:
        yield
        return
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = True
