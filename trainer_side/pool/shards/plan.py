"""Which rank of a trainer sends what, where each sends what it holds: decided alike on all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from weft.containers.lru import Lru
from weft.contract.errors import InvalidRequestError
from weft.contract.layout.manifest import Manifest
from weft.contract.layout.runs import Run
from weft.contract.layout.send_plan import SendPlan, WireBucket, make_send_plan

#: Ranks that send at a time, unless a Publisher says otherwise.
DEFAULT_MAX_SENDERS = 64
_MAX_PLANS = 8
#: Elements of one tensor that a rank of the trainer holds.
Held = tuple[int, Run]


@dataclass(frozen=True)
class ShardPlan:
    """Who sends which runs in which wire bucket."""

    senders: tuple[int, ...]
    """The trainer's ranks that send, by their ranks in the side group."""
    send_plan: SendPlan
    carried: tuple[tuple[tuple[Run, ...], ...], ...]
    """By sender: the runs of each of its wire buckets, in order."""
    digest: bytes
    """Of all that; the same on every rank."""


def plan_shards(manifest: Manifest, held: Sequence[Sequence[Held]]) -> ShardPlan:
    """Let every rank that holds something send it, bucket by bucket of the layout.

    Args:
        manifest: The layout.
        held: For each of its tensors, who holds which elements; each element once.

    Raises:
        InvalidRequestError: More ranks hold something than may send.
    """
    senders = tuple(sorted({rank for tensor in held for rank, _ in tensor}))
    place = {rank: number for number, rank in enumerate(senders)}
    carried: list[list[tuple[Run, ...]]] = [[] for _ in senders]
    wires: list[WireBucket] = []
    first = 0
    for index, bucket in enumerate(manifest.buckets):
        runs: dict[int, list[Run]] = {}
        sizes: dict[int, int] = {}
        for tensor in range(first, first + bucket.num_tensors):
            itemsize = manifest.tensors[tensor].meta.dtype.itemsize_bytes
            for rank, run in held[tensor]:
                sender = place[rank]
                runs.setdefault(sender, []).append(run)
                sizes[sender] = sizes.get(sender, 0) + run.payload_bytes(itemsize)
        first += bucket.num_tensors
        for sender in sorted(runs):
            wires.append(WireBucket(sender, index, sizes[sender], len(runs[sender])))
            carried[sender].append(tuple(runs[sender]))
    text = repr((manifest.layout_digest, senders, carried))
    return ShardPlan(
        senders,
        make_send_plan(len(senders), wires),
        tuple(map(tuple, carried)),
        hashlib.sha256(text.encode()).digest(),
    )


class ShardPlans:
    """Plans that are kept while a trainer's ranks hold the same: the next push needs the same."""

    def __init__(self) -> None:
        self._kept: Lru[bytes, tuple[Sequence[Sequence[Held]], ShardPlan | None]] = Lru(_MAX_PLANS)

    def plan(self, manifest: Manifest, held: Sequence[Sequence[Held]]) -> ShardPlan | None:
        """``plan_shards``; None where there would be more senders or buckets than may be."""
        kept = self._kept.get(manifest.layout_digest)
        if kept is None or kept[0] != held:
            try:
                made = plan_shards(manifest, held)
            except InvalidRequestError:
                made = None
            kept = (held, made)
            self._kept.put(manifest.layout_digest, kept)
        return kept[1]
