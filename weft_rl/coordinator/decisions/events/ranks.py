"""What the ranks of a side group say on their streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft_rl.coordinator.decisions.state.progress import Word
from weft_rl.coordinator.decisions.state.values import ContentDigest


@dataclass(frozen=True)
class RankAttends:
    """A rank of a group opened its stream."""

    group_id: str
    rank: int


@dataclass(frozen=True)
class RankGone:
    """A rank's stream broke or ended."""

    group_id: str
    rank: int
    why: str


@dataclass(frozen=True)
class RanksHeard:
    """What the ranks of a group have said of their work since the last tick."""

    group_id: str
    words: Mapping[int, Word] = field(default_factory=dict)
    transfer_id: str = ""
    """The transfer that ``num_verified`` is of."""
    num_verified: Mapping[int, int] = field(default_factory=dict)
    """Buckets, from the first, that a receiver has reported; of those that reported."""


@dataclass(frozen=True)
class RankPrepared:
    """A receiver is ready for a transfer's bytes."""

    group_id: str
    transfer_id: str
    rank: int
    num_verified: int = 0
    """Buckets, from the first, that it has from an earlier epoch."""


@dataclass(frozen=True)
class RankLoadDue:
    """A receiver wants its replica to load what it has received."""

    group_id: str
    transfer_id: str
    rank: int


@dataclass(frozen=True)
class RankStaged:
    """A rank has sent or verified everything."""

    group_id: str
    transfer_id: str
    rank: int
    digest: ContentDigest


@dataclass(frozen=True)
class RankFailed:
    """A rank fails its transfer."""

    group_id: str
    transfer_id: str
    rank: int
    reason: str
    message: str


RankEvent = (
    RankAttends | RankGone | RanksHeard | RankPrepared | RankLoadDue | RankStaged | RankFailed
)
