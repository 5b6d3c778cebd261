"""A pool that consists of events, and the history of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.step import step
from weft_rl.coordinator.page.history import History
from weft_rl.coordinator.runtime.watchers import Feed

COORDINATOR = "c0ffee"


class Watched(Machine):
    """A machine, each step of which its history is told."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.state = replace(self.state, coordinator_id=COORDINATOR, wall_offset_seconds=1e9)
        self.history = History(self.state, lambda: self.now)
        self.feed = Feed(lambda: self.state.wall(self.now))

    def do(self, event: events.Event) -> list[effects.Effect]:
        before = self.state
        self.state, self.last = step(before, event, self.now)
        self.history.count(event, before, self.state, self.last)
        for effect in self.found(effects.Announce):
            wall = self.state.wall(self.now)
            self.feed.publish(wall, effect)
        self.all += self.last
        return self.last


def watched(*replicas: str, policies: tuple[str, ...] = ("math",), **settings: Any) -> Watched:
    """A pool whose policies have owners."""
    m = Watched(**settings)
    m.pool(*replicas)
    for policy in policies:
        m.acquire(policy)
    return m
