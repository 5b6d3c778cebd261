"""Division of a push among the ranks that hold its shards, decided alike on all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_side.packing.packer import PackedLayout
from trainer_side.sources.source import Held
from weft_rl.containers import LruMapping
from weft_rl.contract.manifest import Manifest, Run, WireBucket, make_send_plan

_MAX_PLANS = 8


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of runs to senders and wire buckets."""

    senders: tuple[int, ...]
    """Ranks of the trainer that send, by their ranks in the side group."""
    packings: tuple[PackedLayout, ...]
    """Wire buckets of each sender, and their runs."""
    digest: bytes
    """Digest of the whole plan; the same on every rank."""


def plan_shards(manifest: Manifest, held: Sequence[Sequence[Held]]) -> ShardPlan:
    """Plan the shards that each rank sends: all that it holds, bucket by bucket.

    Args:
        manifest: The layout.
        held: The holders and their runs, for each of its tensors; each element once.

    Raises:
        InvalidRequestError: There are too many senders or wire buckets.
    """
    senders = tuple(sorted({rank for own in held for rank, _ in own}))
    place = {rank: number for number, rank in enumerate(senders)}
    carried: list[list[tuple[Run, ...]]] = [[] for _ in senders]
    wires: list[WireBucket] = []
    for index, tensors in enumerate(manifest.tensors_by_bucket):
        runs: dict[int, list[Run]] = {}
        payload: Counter[int] = Counter()
        for tensor in tensors:
            size = manifest.tensors[tensor].meta.dtype.itemsize_bytes
            for rank, run in held[tensor]:
                runs.setdefault(place[rank], []).append(run)
                payload[place[rank]] += run.payload_bytes(size)
        for sender in sorted(runs):
            wires.append(WireBucket(sender, index, payload[sender], len(runs[sender])))
            carried[sender].append(tuple(runs[sender]))
    text = repr((manifest.layout_digest, senders, carried))
    plan = make_send_plan(len(senders), wires)
    return ShardPlan(
        senders,
        tuple(
            PackedLayout(manifest, plan, number, tuple(own)) for number, own in enumerate(carried)
        ),
        hashlib.sha256(text.encode()).digest(),
    )


class ShardPlans:
    """Cache of plans while a trainer's ranks hold the same; the next push needs the same."""

    def __init__(self) -> None:
        self._kept: LruMapping[bytes, tuple[Sequence[Sequence[Held]], ShardPlan]] = LruMapping(
            _MAX_PLANS
        )

    def plan(self, manifest: Manifest, held: Sequence[Sequence[Held]]) -> ShardPlan:
        """Return the plan of ``plan_shards``."""
        kept = self._kept.get(manifest.layout_digest)
        if kept is None or kept[0] != held:
            kept = (held, plan_shards(manifest, held))
            self._kept.put(manifest.layout_digest, kept)
        return kept[1]
