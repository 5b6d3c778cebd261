"""Sharded parameters, gathered to the sender in bounded chunks.

FSDP1, FSDP2, ZeRO-3 and tensor parallelism all give each rank runs of a parameter's
row-major elements. So one gather serves them: each rank casts its runs of many
parameters into one message to the sender, which copies them to where they belong.
Only the sender ever holds a parameter whole, in the caller's memory; a message holds
at most ``CHUNK_BYTES`` over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import Any

import torch
import torch.distributed as dist

from trainer_side.params.elements import HeldElements, HeldRun
from trainer_side.params.params import Params, check_readable, copy_into, meta_tensor
from trainer_side.ranks.ranks import SENDER, Ranks
from weft_rl.contract.errors import UnsupportedError

#: Of all messages of one chunk; less where the largest parameter is smaller.
CHUNK_BYTES = 32 * 2**20
_MIN_CHUNK_BYTES = 2**20
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Sharded:
    """Parameter in runs that together are all of it, without overlap."""

    shape: torch.Size
    dtype: torch.dtype
    runs: tuple[HeldRun, ...]
    """Runs; a rank may have several, in the order of its local elements. All slices have one
    stride."""
    local: torch.Tensor | None
    """Elements of this rank's runs, one run behind the other, any shape, by reference. More may
    follow. None where this rank has none. A replica that does not give its elements has them,
    too."""
    nearest: tuple[HeldRun, ...] | None = None
    """Runs with the sender's replica wherever it has one; None if they equal ``runs``."""


@dataclass(frozen=True)
class GatheredParam:
    """Parameter that only its framework can put together."""

    shape: torch.Size
    dtype: torch.dtype
    gather: Callable[[], torch.Tensor]
    """Collective function that returns the whole tensor, at least at the sender; not to be kept."""
    local: torch.Tensor
    why: str = "only its framework can put it together"
    """Reason why its elements are not known, for messages."""


def held_by(param: Sharded, rank: int) -> HeldElements:
    """Return a parameter's elements as the ranks hold it, at one of them."""
    ends = list(accumulate(run.size for run in param.runs if run.rank == rank))
    return HeldElements(param.runs, rank, param.local, list(pairwise([0, *ends])))


class ShardedParams(Params):
    """Sharded parameters, gathered over the trainer's ranks; see ``Params``.

    Args:
        params: The same names in the same order on every rank.
        kind: Kind of trainer that holds them, for messages.
        ranks: Ranks of the trainer.
    """

    is_collective = True

    def __init__(
        self, params: Mapping[str, Sharded | GatheredParam], kind: str, ranks: Ranks
    ) -> None:
        self.kind = kind
        #: Where each is.
        self.placed, self.ranks = params, ranks
        self.metas = {name: meta_tensor(p.shape, p.dtype) for name, p in params.items()}
        largest = max((t.numel() * t.element_size() for t in self.metas.values()), default=0)
        self._chunk_bytes = min(CHUNK_BYTES, max(_MIN_CHUNK_BYTES, largest))
        self._buffers: dict[int, torch.Tensor] = {}

    def fetch(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        outs: Sequence[torch.Tensor] | None,
    ) -> None:
        pending: list[tuple[Sharded, torch.dtype, torch.Tensor | None]] = []
        for index, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
            param = self.placed[name]
            out = None if outs is None else outs[index]
            if isinstance(param, Sharded):
                # Cast by whoever holds it if that makes it smaller.
                narrow = dtype if dtype.itemsize <= param.dtype.itemsize else param.dtype
                pending.append((param, narrow, out))
                continue
            whole = param.gather()
            if out is not None:
                copy_into([out], [whole.detach().view(out.shape)])
        for chunk in _chunks(pending, self.ranks.size, self._chunk_bytes):
            self._bring(chunk)

    def elements(self, name: str) -> HeldElements | None:
        param = self.placed[name]
        return held_by(param, self.ranks.rank) if isinstance(param, Sharded) else None

    def why_gathered(self, name: str) -> str:
        param = self.placed[name]
        return param.why if isinstance(param, GatheredParam) else ""

    def whole(self, name: str) -> torch.Tensor:
        raise TypeError(f"{name!r} is sharded: no rank holds it whole")

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self.placed.items():
            if param.local is not None:
                yield name, param.local.detach()

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            local = self.placed[name].local
            if local is not None:
                check_readable(name, getattr(local, "_local_tensor", local))

    def _bring(self, pieces: Sequence[_RunPiece]) -> None:
        """Bring pieces to the sender, with one message from each rank that holds some."""
        own = self.ranks.rank
        if own != SENDER:
            mine = [piece for piece in pieces if piece.rank == own]
            if mine:
                message, views = self._message(own, mine)
                copy_into(views, [piece.source() for piece in mine])
                self.ranks.collect(message, {})
            return
        here = [piece for piece in pieces if piece.rank == SENDER]
        if here:
            copy_into([piece.target() for piece in here], [piece.source() for piece in here])
        by_rank: dict[int, list[_RunPiece]] = {}
        for piece in pieces:
            if piece.rank != SENDER:
                by_rank.setdefault(piece.rank, []).append(piece)
        messages = {rank: self._message(rank, theirs) for rank, theirs in by_rank.items()}
        self.ranks.collect(None, {rank: message for rank, (message, _) in messages.items()})
        for rank, theirs in by_rank.items():
            copy_into([piece.target() for piece in theirs], messages[rank][1])

    def _message(
        self, rank: int, pieces: Sequence[_RunPiece]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a message buffer for one rank's pieces, in reused memory, and a view of each
        piece."""
        offsets, size = [], 0
        for piece in pieces:
            offsets.append(size)
            size += _aligned(piece.num_bytes)
        buffer = self._buffers.get(rank)
        if buffer is None or buffer.numel() < size:
            # zeros, not empty: touched memory is filled and sent twice as fast
            buffer = self._buffers[rank] = torch.zeros(size, dtype=torch.uint8)
        views = [
            buffer[offset : offset + piece.num_bytes].view(piece.dtype).view(piece.run.shape)
            for offset, piece in zip(offsets, pieces, strict=True)
        ]
        return buffer[:size], views


@dataclass(slots=True)
class _RunPiece:
    """Part of a run, as it travels."""

    param: Sharded
    dtype: torch.dtype
    """Dtype that it is cast to before it travels."""
    run: HeldRun
    """Run of this part alone."""
    first: int
    """Index of its first element in the local elements of its rank."""
    out: torch.Tensor | None

    @property
    def rank(self) -> int:
        return self.run.rank

    @property
    def num_bytes(self) -> int:
        return self.run.size * self.dtype.itemsize

    def source(self) -> torch.Tensor:
        assert self.param.local is not None
        flat = self.param.local.detach().reshape(-1)
        return flat[self.first : self.first + self.run.size].view(self.run.shape)

    def target(self) -> torch.Tensor:
        assert self.out is not None
        return self.run.of(self.out)


def _chunks(
    params: Sequence[tuple[Sharded, torch.dtype, torch.Tensor | None]],
    num_ranks: int,
    chunk_bytes: int,
) -> Iterator[list[_RunPiece]]:
    """Cut parameters into chunks so that no rank's message exceeds its share.

    The same on every rank: it depends on runs and dtypes only.
    """
    share = max(_ALIGN_BYTES, chunk_bytes // num_ranks)
    chunk: list[_RunPiece] = []
    used = 0
    for param, dtype, out in params:
        window = max(1, share // dtype.itemsize)
        nearest = param.runs if param.nearest is None else param.nearest
        by_rank = groupby(sorted(nearest, key=lambda run: run.rank), lambda run: run.rank)
        parts = [list(_parts(runs, window)) for _, runs in by_rank]
        for beside in zip_longest(*parts):
            found = [part for part in beside if part is not None]
            pieces = [_RunPiece(param, dtype, run, first, out) for run, first in found]
            size = max(_aligned(piece.num_bytes) for piece in pieces)
            if used + size > share and chunk:
                yield chunk
                chunk, used = [], 0
            used += size
            chunk += pieces
    if chunk:
        yield chunk


def _parts(runs: Iterable[HeldRun], window: int) -> Iterator[tuple[HeldRun, int]]:
    """Yield one rank's runs in parts of at most ``window`` elements, and where each part begins in
    its local elements. Parts are whole rows of slices, or parts of one row."""
    first = 0
    for run in runs:
        rows = max(1, min(run.repeats, window // run.numel)) if run.numel else run.repeats
        for row in range(0, run.repeats, rows):
            begin, repeats = run.begin + row * run.stride, min(rows, run.repeats - row)
            if repeats > 1:
                yield HeldRun(run.rank, begin, run.numel, run.stride, repeats), first
                first += run.numel * repeats
                continue
            for position in range(0, run.numel, window):
                numel = min(window, run.numel - position)
                yield HeldRun(run.rank, begin + position, numel), first
                first += numel


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def of_zero3(param: Any, rank_of: Mapping[int, int]) -> Sharded | GatheredParam:
    """Return the location of a parameter's elements: ZeRO-3 gives each rank an equal run, the last
    one padded. Attribute names are DeepSpeed's (0.14 to 0.19).

    Args:
        param: Parameter that ZeRO-3 manages.
        rank_of: Map from the application's ranks to the trainer's.
    """
    shape, shard = torch.Size(param.ds_shape), param.ds_tensor
    holders = dist.get_process_group_ranks(param.ds_process_group)
    if not all(rank in rank_of for rank in holders):
        raise UnsupportedError(
            "a parameter is sharded over ranks that do not push together: make the Publisher "
            "with ranks='all', or with the group of all of them"
        )
    if _is_special(param):
        why = "only DeepSpeed can put it together (NVMe offload, hpZ, MiCS or quantised shards)"
        return GatheredParam(shape, shard.dtype, lambda: _gather(param), shard, why)
    numel, size = shape.numel(), shard.numel()
    runs = tuple(
        HeldRun(rank_of[rank], begin, min(size, numel - begin))
        for rank, begin in zip(holders, range(0, size * len(holders), size), strict=True)
        if begin < numel
    )
    return Sharded(shape, shard.dtype, runs, shard)


def _is_special(param: Any) -> bool:
    """Return whether shards are elsewhere, quantised, or cut in another way."""
    shard = param.ds_tensor
    return (
        getattr(getattr(shard, "status", None), "name", "AVAILABLE") != "AVAILABLE"
        or hasattr(shard, "ds_quant_scale")
        or getattr(param, "ds_secondary_tensor", None) is not None
        or hasattr(param, "comm")
    )


def _gather(param: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([param]):
        whole: torch.Tensor = param.data.clone()
    return whole
