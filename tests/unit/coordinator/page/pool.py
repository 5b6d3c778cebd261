"""A pool that consists of events, and its lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.live_groups import LiveGroups
from weft_rl.coordinator.runtime.watchers import Feed
from weft_rl.coordinator.services.inspect import PoolLists


class Watched(Machine):
    """A machine whose events are published, and whose pool is listed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.state = replace(self.state, wall_offset_seconds=1e9)
        self.feed = Feed(lambda: self.state.wall(self.now))
        self.lists = PoolLists(cast(Driver, _Driver(self)), self.feed, lambda: "127.0.0.1:50051")

    def do(self, event: events.Event) -> list[effects.Effect]:
        done = super().do(event)
        for effect in self.found(effects.Announce):
            self.feed.publish(self.state.wall(self.now), effect)
        return done


class _Driver:
    """The part of a driver that lists read."""

    unwritten_reason = ""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.groups = machine, LiveGroups(lambda event: None)

    @property
    def state(self) -> PoolState:
        return self._machine.state

    def now(self) -> float:
        return self._machine.now


def watched(*replicas: str, policies: tuple[str, ...] = ("math",), **settings: Any) -> Watched:
    """A pool whose policies have owners."""
    m = Watched(**settings)
    m.pool(*replicas)
    for policy in policies:
        m.acquire(policy)
    return m
