"""Strikes of one round, drawn by a seeded generator: who is struck, how and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.fault.pool import REPLICAS

#: Processes of each trainer, its sender first, by the policy that it pushes.
RANKS = {"base": ("trainer", "rank-1"), "math": ("math",), "code": ("code",)}
COORDINATOR = "coordinator"
#: Victims: the names of the processes that are struck at once, by what they are.
VICTIMS = {
    COORDINATOR: [(COORDINATOR,)],
    "replica": [(name,) for name in REPLICAS],
    "trainer": list(RANKS.values()),
    "rank": [(name,) for name in RANKS["base"]],
}
#: Each kind with its weight.
KINDS = {
    ("SIGKILL", COORDINATOR): 3, ("SIGKILL", "replica"): 3, ("SIGKILL", "trainer"): 2,
    ("SIGKILL", "rank"): 2, ("SIGSTOP", COORDINATOR): 2, ("SIGSTOP", "replica"): 2,
    ("SIGSTOP", "trainer"): 2, ("SIGSTOP", "rank"): 2, ("SIGINT", "rank"): 3,
    ("SIGINT", "trainer"): 1, ("SIGHUP", COORDINATOR): 1,
}  # fmt: skip
_SECOND_SHARE = 0.3
_APART_SECONDS = 2.0
_STOPPED_SECONDS = (1.0, 8.0)
_AWAY_SECONDS = (0.0, 3.0)
_FIRST_SECONDS = (0.1, 3.0)
_A_PUSH_SECONDS = 0.4


@dataclass(frozen=True)
class Strike:
    """One strike of a round; times in seconds."""

    signal: str
    victim: str
    """What is struck: a key of ``VICTIMS``."""
    names: tuple[str, ...]
    """Processes that get the signal."""
    after_seconds: float
    """From the round's beginning."""
    lasts_seconds: float
    """Time until the process goes on, or is started again."""
    after_begin_seconds: float = 0.0
    """From the beginning of a push, for an interrupt."""

    @property
    def kind(self) -> str:
        """Its row in the report."""
        return f"{self.signal} {self.victim}"

    def __str__(self) -> str:
        """Return signal and processes."""
        return f"{self.signal} {' '.join(self.names)} for {self.lasts_seconds:.1f} s"


def draw(rng: random.Random) -> list[Strike]:
    """Return the strikes of one round in their order: one, or two of different processes."""
    first = _draw_one(rng, rng.uniform(*_FIRST_SECONDS))
    if rng.random() >= _SECOND_SHARE:
        return [first]
    second = _draw_one(rng, first.after_seconds + rng.uniform(0, _APART_SECONDS))
    return [first] if set(first.names) & set(second.names) else [first, second]


def _draw_one(rng: random.Random, after_seconds: float) -> Strike:
    ((signal, victim),) = rng.choices(list(KINDS), list(KINDS.values()))
    span = {"SIGKILL": _AWAY_SECONDS, "SIGSTOP": _STOPPED_SECONDS}.get(signal, (0.0, 0.0))
    return Strike(
        signal,
        victim,
        rng.choice(VICTIMS[victim]),
        after_seconds,
        lasts_seconds=rng.uniform(*span),
        after_begin_seconds=rng.uniform(0, _A_PUSH_SECONDS),
    )
