"""Division of a push among the ranks that hold its shards, decided alike on all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_side.packing.packer import PackedLayout
from weft_rl.containers import LruMapping
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.group import MAX_SENDERS
from weft_rl.contract.manifest import (
    MAX_WIRE_BUCKETS,
    Manifest,
    Run,
    WireBucket,
    make_send_plan,
)

#: Ranks that send at a time, unless a Publisher says otherwise: as far as was measured
#: (``benchmarks.senders``), all at once are the fastest.
DEFAULT_MAX_SENDERS = 64
_MAX_PLANS = 8
#: Elements of one tensor that a rank of the trainer holds.
Held = tuple[int, Run]


@dataclass(frozen=True)
class HandedRuns:
    """Runs that a rank holds and another sends."""

    to: int
    """Rank of the trainer that sends them."""
    runs: tuple[tuple[Run, ...], ...]
    """Runs for each wire bucket of that rank that some of them go into, in order."""


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of runs to senders and wire buckets."""

    senders: tuple[int, ...]
    """Ranks of the trainer that send, by their ranks in the side group."""
    packings: tuple[PackedLayout, ...]
    """Wire buckets of each sender, and their runs."""
    handed: Mapping[int, HandedRuns]
    """Runs that their sender does not hold itself, by the trainer's rank that holds them."""
    digest: bytes
    """Digest of the whole plan; the same on every rank."""


def senders_of(num_bytes: Mapping[int, int], max_senders: int) -> dict[int, int]:
    """Assign each rank to the rank that sends for it.

    Ranks are taken in their order, since neighbours are likely of one host. They are cut into
    groups with about equal amounts to send; the first rank of a group sends.

    Args:
        num_bytes: Bytes that each rank holds, more than 0.
        max_senders: At least 1.

    Returns:
        The sender of each rank, by rank; often itself.
    """
    ranks = sorted(num_bytes)
    if len(ranks) <= max_senders:
        return {rank: rank for rank in ranks}
    total, before = sum(num_bytes.values()), 0
    first: dict[int, int] = {}
    found: dict[int, int] = {}
    for rank in ranks:
        # By where the middle of what it holds lies in all that is held.
        group = (2 * before + num_bytes[rank]) * max_senders // (2 * total)
        found[rank] = first.setdefault(group, rank)
        before += num_bytes[rank]
    return found


def plan_shards(
    manifest: Manifest, held: Sequence[Sequence[Held]], max_senders: int = DEFAULT_MAX_SENDERS
) -> ShardPlan:
    """Plan the shards that each rank sends: its own and those handed to it, bucket by bucket.

    Args:
        manifest: The layout.
        held: The holders and their runs, for each of its tensors; each element once.
        max_senders: Most ranks that send; fewer do where there would be too many buckets.

    Raises:
        InvalidRequestError: There are too many buckets for even one sender.
    """
    sizes = [slot.meta.dtype.itemsize_bytes for slot in manifest.tensors]
    num_bytes: Counter[int] = Counter()
    for own in held:
        for rank, run in own:
            num_bytes[rank] += run.num_elements * sizes[run.tensor]
    most = min(max_senders, MAX_SENDERS, MAX_WIRE_BUCKETS // max(1, len(manifest.buckets)))
    sends_for = senders_of(num_bytes, max(1, most))
    senders = tuple(sorted(set(sends_for.values())))
    place = {rank: number for number, rank in enumerate(senders)}
    carried: list[list[tuple[Run, ...]]] = [[] for _ in senders]
    handed: dict[int, list[tuple[Run, ...]]] = {
        rank: [] for rank, sender in sends_for.items() if rank != sender
    }
    wires: list[WireBucket] = []
    first = 0
    for index, bucket in enumerate(manifest.buckets):
        runs: dict[int, list[Run]] = {}
        theirs: dict[int, list[Run]] = {}
        payload: Counter[int] = Counter()
        for tensor in range(first, first + bucket.num_tensors):
            for rank, run in held[tensor]:
                sender = place[sends_for[rank]]
                runs.setdefault(sender, []).append(run)
                payload[sender] += run.payload_bytes(sizes[tensor])
                if rank in handed:
                    theirs.setdefault(rank, []).append(run)
        first += bucket.num_tensors
        for sender in sorted(runs):
            wires.append(WireBucket(sender, index, payload[sender], len(runs[sender])))
            carried[sender].append(tuple(runs[sender]))
        for rank, given in theirs.items():
            handed[rank].append(tuple(given))
    text = repr((manifest.layout_digest, senders, carried, handed))
    plan = make_send_plan(len(senders), wires)
    return ShardPlan(
        senders,
        tuple(
            PackedLayout(manifest, plan, number, tuple(own)) for number, own in enumerate(carried)
        ),
        {rank: HandedRuns(sends_for[rank], tuple(given)) for rank, given in handed.items()},
        hashlib.sha256(text.encode()).digest(),
    )


class ShardPlans:
    """Cache of plans while a trainer's ranks hold the same; the next push needs the same.

    Args:
        max_senders: See ``plan_shards``.
    """

    def __init__(self, max_senders: int = DEFAULT_MAX_SENDERS) -> None:
        self._max_senders = max_senders
        self._kept: LruMapping[bytes, tuple[Sequence[Sequence[Held]], ShardPlan | str]] = (
            LruMapping(_MAX_PLANS)
        )

    def plan(self, manifest: Manifest, held: Sequence[Sequence[Held]]) -> ShardPlan | str:
        """Return the plan of ``plan_shards``, or its error message where there would be too many
        buckets."""
        kept = self._kept.get(manifest.layout_digest)
        if kept is None or kept[0] != held:
            made: ShardPlan | str
            try:
                made = plan_shards(manifest, held, self._max_senders)
            except InvalidRequestError as error:
                made = error.message
            kept = (held, made)
            self._kept.put(manifest.layout_digest, kept)
        return kept[1]
