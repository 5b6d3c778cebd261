"""Sleep of replicas: reports of it, orders for it, and calls that wait for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SleepOrder:
    """Order to a replica to sleep until somebody wakes it, or its trainer's lease has ended.

    Not durable: the replica remembers it.
    """

    trainer_id: str
    """Trainer that ordered it; empty for an operator."""
    fencing_token: int = 0
    """Token of the base's lease that the order is a part of. 0 for an operator's, or if a
    replica has told of it and the trainer has not been heard since."""
    level: int = 1
    """Level of sleep: 1 moves weights to host memory, 2 discards them."""
    aborts: bool = False
    """True if running requests are aborted, rather than finished."""
    seconds: float = 0.0
    """Seconds that running requests may take to end."""
    until: float = float("inf")
    """Time at which an order that a replica has told of ends unless its trainer is heard."""
    confirmed: bool = False
    """True if the replica has slept by it."""


@dataclass(frozen=True)
class SleepWait:
    """Call that waits until replicas sleep, or are awake."""

    replica_ids: tuple[str, ...]
    asleep: bool
    deadline: float
