"""Replicas that sleep: what they say, who ordered it, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asleep:
    """A replica says that it sleeps."""

    trainer_id: str
    """Who put it to sleep; empty for an operator."""
    weights_awake: bool = False
    """Whether a push has woken its weights."""
    level: int = 1
    """At which it was put to sleep."""


@dataclass(frozen=True, kw_only=True)
class SleepOrder:
    """A replica is to sleep until somebody wakes it, or its trainer's lease has ended. Not
    durable: the replica remembers it."""

    trainer_id: str
    """Empty for an operator."""
    fencing_token: int = 0
    """Of the base's lease that it is a part of; 0 for an operator's, or where a replica has
    told of it, and the trainer has not been heard since."""
    level: int = 1
    """1 moves weights to host memory, 2 discards them."""
    aborts: bool = False
    """Whether running requests are aborted, rather than finished."""
    seconds: float = 0.0
    """How long those may take to end."""
    until: float = float("inf")
    """When one that a replica has told of ends unless its trainer is heard."""
    confirmed: bool = False
    """Whether the replica has slept by it."""


@dataclass(frozen=True)
class SleepWait:
    """A call that waits until replicas sleep, or are awake."""

    replica_ids: tuple[str, ...]
    asleep: bool
    deadline: float
