"""Progress that the ranks of a transfer's group report, and the steps that they owe."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft_rl.containers.frozen import replace


class Activity(enum.IntEnum):
    """Activity of a rank; numbers are those of ``weft.v1.Activity``."""

    FORMING = 1
    ALLOCATING = 2
    WAITING = 3
    VERIFYING = 4
    LOADING = 5
    PACKING = 6
    SENDING = 7


@dataclass(frozen=True)
class Word:
    """Last report of a rank on its work; see ``weft.v1.Progress``."""

    transfer_id: str
    activity: int
    bucket: int = 0
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        match self.activity:
            case Activity.FORMING:
                return "forming the group"
            case Activity.ALLOCATING:
                return f"allocating {self.done} of {self.total} bytes"
            case Activity.WAITING:
                return f"waiting for bucket {self.bucket}"
            case Activity.VERIFYING:
                return f"verifying bucket {self.bucket}"
            case Activity.LOADING:
                return f"loading bucket {self.bucket}"
            case Activity.PACKING:
                return f"packing bucket {self.bucket}"
            case Activity.SENDING:
                return f"sending bucket {self.bucket}"
        return "working"


#: What every rank of a new group owes first.
FIRST_STEP = "join the group"


@dataclass(frozen=True)
class Debt:
    """Next step of a transfer, owed by one rank."""

    step: str
    since: float


@dataclass(frozen=True)
class Watch:
    """Progress of one epoch of a transfer, as its ranks report it; times as in ``state``."""

    heard_at: Mapping[int, float] = field(default_factory=dict)
    """Time at which each rank last said what it does, or verified a bucket."""
    words: Mapping[int, Word] = field(default_factory=dict)
    num_verified: Mapping[int, int] = field(default_factory=dict)
    """Number of buckets, from the first, that each receiver has reported as verified."""
    debts: Mapping[int, Debt] = field(default_factory=dict)
    held_up: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which each receiver, at work, was what all others waited for."""
    looked_at: float = float("inf")
    """Time at which a receiver that holds the others up was noted last; inf while there is none."""

    def heard(
        self, words: Mapping[int, Word], num_verified: Mapping[int, int], now: float
    ) -> Watch:
        """Return this watch with the words and numbers of verified buckets that ranks reported."""
        return replace(
            self,
            heard_at={**self.heard_at, **dict.fromkeys((*words, *num_verified), now)},
            words={**self.words, **words},
            num_verified={**self.num_verified, **num_verified},
        )

    def with_debts(self, steps: Mapping[int, str], now: float) -> Watch:
        """Return this watch with what each rank owes now; a debt keeps its beginning."""
        debts = {
            rank: old if (old := self.debts.get(rank)) and old.step == step else Debt(step, now)
            for rank, step in steps.items()
        }
        return self if debts == self.debts else replace(self, debts=debts)

    def carried(self, ranks: Mapping[int, int], step: str, now: float) -> Watch:
        """Return the watch that a transfer's next epoch begins with.

        The silence of each rank is carried over, until the rank has done its first step.

        Args:
            ranks: The former rank of each new one.
            step: What each owes first.
        """
        debts = {
            rank: Debt(step, now - silence)
            for rank, former in ranks.items()
            if (silence := self.silence(former, now)) > 0
        }
        held_up = {r: self.held_up[old] for r, old in ranks.items() if old in self.held_up}
        return Watch(debts=debts, held_up=held_up)

    def with_holder(self, rank: int | None, now: float) -> Watch:
        """Return this watch with the receiver that holds the others up noted; None is nobody.

        The time since the last look counts, a second at most: ticks are more frequent.
        """
        if rank is None:
            return self if self.looked_at == float("inf") else replace(self, looked_at=float("inf"))
        seconds = self.held_up.get(rank, 0.0) + min(1.0, max(0.0, now - self.looked_at))
        return replace(self, held_up={**self.held_up, rank: seconds}, looked_at=now)

    def silence(self, rank: int, now: float) -> float:
        """Return the seconds that a rank has owed its step without a word; 0 if it owes nothing."""
        debt = self.debts.get(rank)
        return now - max(debt.since, self.heard_at.get(rank, debt.since)) if debt else 0.0

    def forgiven(self, seconds: float) -> Watch:
        """Return this watch as if ``seconds`` had not passed."""
        return replace(
            self,
            heard_at={rank: at + seconds for rank, at in self.heard_at.items()},
            debts={
                rank: replace(debt, since=debt.since + seconds) for rank, debt in self.debts.items()
            },
        )
