"""Copies of parameters as they are at one moment, in reused host memory."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from trainer_side.params.elements import Elements, HeldRun
from trainer_side.params.params import Params, WholeParams
from trainer_side.params.sharded import GatheredParam, Sharded, ShardedParams
from trainer_side.ranks.ranks import SENDER, Ranks
from weft_rl.contract.errors import UnsupportedError
from weft_rl.host_memory import why_no_room


class HostMemory:
    """Host buffers by size, kept for the next snapshot; thread-safe.

    Touched memory is filled several times faster than fresh memory; copies of
    parameters on an accelerator are pinned.

    Args:
        ranks: Ranks of the trainer. Those beside the sender copy nothing of what is whole at each.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._lock = threading.Lock()
        #: Bytes of all buffers, lent or free.
        self.total_bytes = 0
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._taken: dict[int, list[tuple[tuple[int, bool], torch.Tensor]]] = {}

    def lend(self, borrower: int) -> SnapshotMemory:
        """Return the memory of one snapshot, lent until ``give_back`` with the same number."""
        return SnapshotMemory(self, borrower)

    def take(self, borrower: int, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Take a uint8 buffer of shape (num_bytes,)."""
        key = (num_bytes, pinned)
        with self._lock:
            free = self._free.get(key)
            buffer = free.pop() if free else None
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            with self._lock:
                self.total_bytes += num_bytes
        with self._lock:
            self._taken.setdefault(borrower, []).append((key, buffer))
        return buffer

    def why_no_room(self, metas: Iterable[torch.Tensor]) -> str:
        """Return the reason why tensors cannot be copied; empty if there is room for them.

        Ranks may share a host, and ask at the same time: there must be room for all that they copy.

        Args:
            metas: Tensors of the whole shapes.
        """
        sizes = [meta.numel() * meta.element_size() for meta in metas]
        with self._lock:
            free = sum(size * len(held) for (size, _), held in self._free.items())
        return why_no_room(sum(sizes), free)

    def give_back(self, borrower: int) -> None:
        """Make all buffers that a borrower took available again."""
        with self._lock:
            for key, buffer in self._taken.pop(borrower, []):
                self._free.setdefault(key, []).append(buffer)


class SnapshotMemory:
    """Part of a ``HostMemory`` that one snapshot borrows."""

    def __init__(self, memory: HostMemory, borrower: int) -> None:
        self.whole, self._borrower = memory, borrower
        #: Bytes that were copied.
        self.num_bytes = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host; block until it is made."""
        tensor = tensor.detach()
        is_remote = tensor.device.type != "cpu"
        num_bytes = tensor.numel() * tensor.element_size()
        buffer = self.whole.take(self._borrower, num_bytes, pinned=is_remote)
        self.num_bytes += num_bytes
        host = buffer.view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor)
        return host


class _OverlaidParams(Params):
    """Parameters, some of them replaced by copies; see ``Params``."""

    is_collective = False

    def __init__(self, params: Params, copies: Mapping[str, torch.Tensor]) -> None:
        self.kind, self.metas = params.kind, params.metas
        self._params, self._copies = params, WholeParams(copies, params.kind)

    def fetch(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        outs: Sequence[torch.Tensor] | None,
    ) -> None:
        for params, is_copied in ((self._copies, True), (self._params, False)):
            which = [i for i, name in enumerate(names) if (name in self._copies.metas) is is_copied]
            if which:
                params.fetch(
                    [names[i] for i in which],
                    [dtypes[i] for i in which],
                    None if outs is None else [outs[i] for i in which],
                )

    def elements(self, name: str) -> Elements | None:
        return self._of(name).elements(name)

    def whole(self, name: str) -> torch.Tensor:
        return self._of(name).whole(name)

    def _of(self, name: str) -> Params:
        return self._copies if name in self._copies.metas else self._params

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._copies.local()
        yield from ((n, t) for n, t in self._params.local() if n not in self._copies.metas)

    def check(self, names: Iterable[str]) -> None:
        self._params.check(name for name in names if name not in self._copies.metas)


def gathered_names(params: Params) -> set[str]:
    """Return names of parameters that only their framework can put together. Nobody can read them
    while it trains: its collectives would come between those of the training."""
    if not isinstance(params, ShardedParams):
        return set()
    return {name for name, param in params.placed.items() if isinstance(param, GatheredParam)}


def snapshot(params: Params, names: Collection[str], memory: SnapshotMemory) -> Params:
    """Return parameters with those called ``names`` replaced by copies, in ``memory``, of what this
    rank holds. At ranks that send nothing of them, nothing is copied.

    The others are still read in place, except for ``gathered_names``, which are refused.

    Collective only where the framework alone can gather a parameter of ``names``: it is then
    gathered now, on the calling thread, and kept whole at the sender.

    Raises:
        InvalidManifestError: See ``Params.check``.
    """
    params.check(name for name in params.metas if name in names)
    if not isinstance(params, ShardedParams):
        if memory.whole.ranks.rank != SENDER:
            return params
        copies = {name: memory.copy(params.whole(name)) for name in params.metas if name in names}
        if copies.keys() == params.metas.keys():
            return WholeParams(copies, params.kind)
        return _OverlaidParams(params, copies)
    kept: dict[str, Sharded | GatheredParam] = {}
    for name, param in params.placed.items():
        if isinstance(param, Sharded):
            is_copied = name in names and param.local is not None
            kept[name] = _copied(param, memory) if is_copied else param
        elif name in names:
            whole = param.gather()
            runs = (HeldRun(SENDER, 0, param.shape.numel()),)
            own = memory.copy(whole) if params.ranks.rank == SENDER else None
            kept[name] = Sharded(param.shape, param.dtype, runs, own)
        else:
            kept[name] = replace(param, gather=partial(_refuse, name))
    return ShardedParams(kept, params.kind, params.ranks)


def _copied(param: Sharded, memory: SnapshotMemory) -> Sharded:
    assert param.local is not None
    return replace(param, local=memory.copy(param.local))


def _refuse(name: str) -> torch.Tensor:
    raise UnsupportedError(
        f"parameter {name!r} was not copied before the training continued, and only its framework "
        "could gather it: use the push that blocks"
    )
