"""Weight of the base with LoRA merged in, each rank for the elements that it holds.

The factors are small and are brought to every rank; the weight stays where it is. Sums are formed
in float32 or better, and rounded once.

Source: peft.tuners.lora.Linear.get_delta_weight: W + s B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch

from trainer_side.params.elements import HeldElements, HeldRun
from trainer_side.ranks.ranks import Ranks


def product(b: torch.Tensor, a: torch.Tensor, *, is_exact: bool) -> torch.Tensor:
    """Return (rows, rank) times (rank, columns), in the dtype of both: float32, or wider.

    Sums are formed in float32, whatever precision the application allows: it may have float32
    products rounded on their way, to TF32 on a GPU or to bfloat16 on a CPU, and may push from
    inside ``autocast``. To switch that off for a while would also switch it off for its other
    threads, which train meanwhile, and would recompile compiled functions. So where it is
    allowed sums are formed in float64, which nothing shortens.

    Args:
        is_exact: Result of ``are_exact`` for both factors in their own dtypes.
    """
    with _without_autocast(b.device.type):
        if b.dtype is torch.float32 and not is_exact and _is_rounded(b.device):
            return (b.double() @ a.double()).float()
        return b @ a


def are_exact(*factors: torch.Tensor) -> bool:
    """Return whether no shortcut rounds products of these factors in any wider dtype."""
    return all(factor.dtype is torch.bfloat16 for factor in factors)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _is_rounded(device: torch.device) -> bool:
    """Return whether the application lets float32 products be rounded."""
    try:
        if device.type == "cuda":
            return bool(torch.backends.cuda.matmul.allow_tf32)
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it has said so by the newer of torch's two ways
        return True


#: Elements whose sums are formed at a time, in float32.
_CHUNK_ELEMENTS, _CHUNK_ELEMENTS_ON_DEVICE = 2**19, 2**24


class LoraFactors:
    """LoRA factors, whole at every rank while a push reads them.

    Args:
        elements: Elements of the factors as the ranks hold them, by name.
        metas: Meta tensors of whole shape and own dtype, by name.
        ranks: Ranks of the trainer.
    """

    def __init__(
        self,
        elements: Mapping[str, HeldElements],
        metas: Mapping[str, torch.Tensor],
        ranks: Ranks,
    ) -> None:
        self._elements, self._ranks = elements, ranks
        self._metas = {name: metas[name] for name in elements}
        self._whole: dict[str, torch.Tensor] = {}
        self._exact: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}
        #: What each rank gives, in the order of its message: factors of one dtype end to end.
        self._places: list[list[tuple[str, HeldRun]]] = [[] for _ in range(ranks.size)]
        for name, each in elements.items():
            for run in each.runs:
                self._places[run.rank].append((name, run))
        for places in self._places:  # of larger elements first: so every one is aligned
            places.sort(key=lambda place: -self._metas[place[0]].element_size())

    def __contains__(self, name: str) -> bool:
        return name in self._elements

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a whole factor, once it was brought."""
        return self._whole[name]

    def exact(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return a whole factor in the dtype and on the device that sums are formed in."""
        key = name, device, dtype
        if key not in self._exact:  # a weight may come in several runs
            # A rank that holds no part of any factor does not know where they belong.
            self._exact[key] = self._whole[name].to(device, dtype)
        return self._exact[key]

    def bring(self) -> None:
        """Bring the factors to every rank; collective, one message from each rank; blocks."""
        own = self._ranks.rank
        held = self._held(self._places[own])
        device = held[0].device if held else torch.device("cpu")
        sizes = [self._num_bytes(places) for places in self._places]

        def fill(message: torch.Tensor) -> None:
            if held:
                torch._foreach_copy_(self._cut(message, self._places[own]), held)

        messages = self._ranks.bring(sizes, fill, device)
        self._whole, self._exact = self._made(device), {}
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for places, message in zip(self._places, messages, strict=True):
            here = message.to(device)
            for (name, run), part in zip(places, self._cut(here, places), strict=True):
                whole = self._whole[name]
                flat = run.repeats == 1
                first, end = run.begin, run.begin + run.numel
                targets.append(whole.view(-1)[first:end] if flat else run.of(whole))
                parts.append(part if flat else part.view(run.shape))
        if targets:
            torch._foreach_copy_(targets, parts)

    def release(self) -> None:
        """Free the factors that were brought."""
        self._whole, self._exact = {}, {}

    def _held(self, places: Sequence[tuple[str, HeldRun]]) -> list[torch.Tensor]:
        numbers = dict.fromkeys(self._elements, 0)
        held = []
        for name, _ in places:
            held.append(self._elements[name].held(numbers[name]))
            numbers[name] += 1
        return held

    def _made(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Allocate all factors, with one allocation for each dtype."""
        made: dict[str, torch.Tensor] = {}
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, meta in self._metas.items():
            by_dtype.setdefault(meta.dtype, []).append(name)
        for dtype, names in by_dtype.items():
            sizes = [self._metas[name].numel() for name in names]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            for name, part in zip(names, torch.split(flat, sizes), strict=True):
                made[name] = part.view(self._metas[name].shape)
        return made

    def _num_bytes(self, places: Sequence[tuple[str, HeldRun]]) -> int:
        return sum(run.size * self._metas[name].element_size() for name, run in places)

    def _cut(
        self, message: torch.Tensor, places: Sequence[tuple[str, HeldRun]]
    ) -> list[torch.Tensor]:
        """Return a 1-D view of each of a rank's runs in its message."""
        views: list[torch.Tensor] = []
        begin = 0
        for dtype, group in groupby(places, lambda place: self._metas[place[0]].dtype):
            sizes = [run.size for _, run in group]
            end = begin + sum(sizes) * dtype.itemsize
            views += torch.split(message[begin:end].view(dtype), sizes)
            begin = end
        return views


@dataclass(frozen=True)
class WeightAddition:
    """Addition to a weight: a product of factors, or one for each expert."""

    shape: torch.Size
    """Shape of the whole weight: (out features, in features), (experts, out, in), or transposed."""
    factors: LoraFactors
    """Factors ``a`` (experts x rank, in features) and ``b`` (out features, rank x experts)."""
    a: str
    b: str
    scaling: float
    """Scale of the product."""
    is_transposed: bool = False
    """True if the weight is (in, out), as that of an embedding is."""

    @property
    def is_exact(self) -> bool:
        """True if no shortcut rounds the product; see ``products.are_exact``."""
        return are_exact(self.factors[self.a], self.factors[self.b])

    @property
    def width(self) -> int:
        """Elements of a row of the weight; its rows are those of all experts."""
        return self.shape[-1]

    @property
    def num_rows(self) -> int:
        """Number of rows of one expert."""
        return self.shape[-2]

    def of(
        self, expert: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return factors of an expert: (out features, rank) and (rank, in features)."""
        b = self.factors.exact(self.b, device, dtype)
        a = self.factors.exact(self.a, device, dtype)
        return (b, a) if len(self.shape) == 2 else factors_of(expert, self.shape[0], b, a)


class MergedElements:
    """Elements of a weight that are merged when they are read; see ``Elements``.

    Args:
        base: The weight's own elements, or those of whole rows of it.
        delta: Addition to the weight.
        rank: Number of this rank.
        first_row: The weight's row that ``base`` begins with.
    """

    def __init__(
        self, base: HeldElements, delta: WeightAddition, rank: int, first_row: int = 0
    ) -> None:
        self.runs: Sequence[HeldRun] = base.runs
        self._base, self._delta = base, delta
        self._rank, self._first_row = rank, first_row
        self._own = [run for run in base.runs if run.rank == rank]

    def held(self, number: int) -> None:
        """See ``Elements``: return None, since the elements are computed."""
        return

    def fill(self, number: int, out: torch.Tensor) -> None:
        """See ``Elements``; extra memory is that of a chunk of the sums."""
        run, weight, delta = self._own[number], self._base.held(number), self._delta
        if out.device.type != "cpu":  # a copy lies on the host
            weight = weight.to(out.device)
        dtype = torch.float32
        for tensor in (weight, delta.factors[delta.a], delta.factors[delta.b]):
            dtype = torch.promote_types(dtype, tensor.dtype)
        with torch.no_grad():
            done = 0
            for row, rows, column, columns in _blocks(run, delta.width):
                for expert, first, num in _by_expert(self._first_row + row, rows, delta.num_rows):
                    b, a = delta.of(expert, weight.device, dtype)
                    if delta.is_transposed:
                        b, a = b[column : column + columns], a[:, first : first + num]
                    else:
                        b, a = b[first : first + num], a[:, column : column + columns]
                    end = done + num * columns
                    merge_block(
                        weight[done:end].view(num, columns),
                        out[done:end].view(num, columns),
                        b,
                        a,
                        delta.scaling,
                        is_exact=delta.is_exact,
                        is_transposed=delta.is_transposed,
                        on_device=weight.device.type != "cpu",
                    )
                    done = end

    def cut(self, blocks: Sequence[tuple[int, int]]) -> list[MergedElements | None]:
        """Cut as ``HeldElements.cut`` does; a block that is not made of whole rows gives None."""
        width, found = self._delta.width, list[MergedElements | None]()
        for (begin, _), part in zip(blocks, self._base.cut(blocks), strict=True):
            first_row = self._first_row + begin // width
            is_rows = begin % width == 0 and merges_in_place(part, width)
            found.append(
                MergedElements(part, self._delta, self._rank, first_row) if is_rows else None
            )
        return found


def factors_of(
    expert: int, num_experts: int, b: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of one expert's factors out of those of all experts.

    Shapes are (out features, rank) and (rank, in features).

    Source: peft.tuners.lora.layer.ParamWrapper.get_delta_weight.
    """
    by_expert = b.reshape(b.shape[0], -1, num_experts)
    return by_expert[:, :, expert], a.reshape(num_experts, -1, a.shape[-1])[expert]


def merge_block(
    weight: torch.Tensor,
    out: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    scaling: float,
    *,
    is_exact: bool,
    is_transposed: bool = False,
    on_device: bool,
) -> None:
    """Merge a block of a weight's rows and columns; extra memory is that of a chunk of the sums.

    Args:
        weight: (rows, columns), read only.
        out: The same shape, anywhere; overwritten.
        b, a: (rows, rank) and (rank, columns), in the dtype of the sums: float32, or wider. A
            product of narrower ones is rounded before it is added (bfloat16 on an H200: more than a
            unit in the last place off wherever a sum cancels).
        is_exact: Argument of ``products.product``.
        is_transposed: ``b`` is (columns, rank) and ``a`` (rank, rows).
        on_device: Whether an accelerator scales and adds in one pass; on a CPU the product is
            scaled first, as PEFT's is.
    """
    most = _CHUNK_ELEMENTS_ON_DEVICE if on_device else _CHUNK_ELEMENTS
    step = max(1, most // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        if is_transposed:
            sums = product(b, a[:, rows], is_exact=is_exact).t()
        else:
            sums = product(b[rows], a, is_exact=is_exact)
        if on_device and out.device == weight.device:
            # In the wider dtype of the two, rounded as it is written; nothing else is made.
            torch.add(weight[rows], sums, alpha=scaling, out=out[rows])
        elif on_device:  # to the host, where it is packed for gloo
            out[rows].copy_(torch.add(weight[rows], sums, alpha=scaling).to(out.dtype))
        else:
            out[rows].copy_(weight[rows].to(a.dtype) + sums * scaling)


def merges_in_place(elements: HeldElements, width: int) -> bool:
    """Return whether every run of a weight is made of blocks of its rows and columns."""
    return all(
        run.repeats == 1 or _is_block(run, width) or _is_rows(run, width) for run in elements.runs
    )


def _is_block(run: HeldRun, width: int) -> bool:
    return run.stride == width and run.begin % width + run.numel <= width


def _is_rows(run: HeldRun, width: int) -> bool:
    """Return whether a run is made of whole rows, again and again."""
    return not (run.begin % width or run.numel % width or run.stride % width)


def _blocks(run: HeldRun, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks that a run is made of: first row, rows, first column, columns; in order."""
    if run.repeats > 1 and _is_block(run, width):
        row, column = divmod(run.begin, width)
        yield row, run.repeats, column, run.numel
        return
    for repeat in range(run.repeats):
        row, column = divmod(run.begin + repeat * run.stride, width)
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


def _by_expert(row: int, rows: int, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of consecutive rows by expert: expert, first row in it, number of rows."""
    while rows:
        expert, first = divmod(row, num_rows)
        num = min(rows, num_rows - first)
        yield expert, first, num
        row, rows = row + num, rows - num
