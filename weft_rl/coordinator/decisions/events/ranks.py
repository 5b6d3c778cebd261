"""Messages that the ranks of a side group send on their streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft_rl.coordinator.decisions.state.progress import Word
from weft_rl.coordinator.decisions.state.values import ContentDigest


@dataclass(frozen=True)
class RankAttends:
    """Opening of a rank's stream."""

    group_id: str
    rank: int


@dataclass(frozen=True)
class RankGone:
    """End of a rank's stream, broken or closed."""

    group_id: str
    rank: int
    why: str


@dataclass(frozen=True)
class RanksHeard:
    """Reports of the ranks of a group on their work since the last tick."""

    group_id: str
    words: Mapping[int, Word] = field(default_factory=dict)
    transfer_id: str = ""
    """The transfer that ``num_verified`` is of."""
    num_verified: Mapping[int, int] = field(default_factory=dict)
    """Number of buckets, from the first, that receivers have reported; only of those that
    reported."""


@dataclass(frozen=True)
class RankPrepared:
    """Report of a receiver that it is ready for a transfer's bytes."""

    group_id: str
    transfer_id: str
    rank: int
    num_verified: int = 0
    """Number of buckets, from the first, that it has from an earlier epoch."""


@dataclass(frozen=True)
class RankLoadDue:
    """Request of a receiver that its replica load what it has received."""

    group_id: str
    transfer_id: str
    rank: int


@dataclass(frozen=True)
class RankStaged:
    """Report of a rank that it has sent or verified everything."""

    group_id: str
    transfer_id: str
    rank: int
    digest: ContentDigest


@dataclass(frozen=True)
class RankFailed:
    """Report of a rank that it cannot continue its transfer."""

    group_id: str
    transfer_id: str
    rank: int
    reason: str
    message: str


RankEvent = (
    RankAttends | RankGone | RanksHeard | RankPrepared | RankLoadDue | RankStaged | RankFailed
)
