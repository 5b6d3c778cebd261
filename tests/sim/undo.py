"""Deltas that a replica applied to the weights it serves: a model of ``ServedSlot``.

Weights are a content, and a change makes either of two contents the other. So what is served after
a delta, or after one was taken back, is computed from what was there, and not looked up.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tests.sim.data import change_between
from weft_rl.contract.errors import NotReadyError
from weft_rl.contract.names import PolicyVersion

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica
    from tests.sim.store import Copy


@dataclass(frozen=True)
class Applied:
    """A delta that was applied, with what takes it back."""

    base: Copy
    change: bytes
    size: int


class SimUndo:
    """Old elements of the deltas that one replica has applied, newest last; as many as it has room
    for."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._random = Random(f"old elements of {replica.incarnation} {replica.world.seed}")
        self._room = self._random.choice([0, 2, 4, 8, 8, 8])
        self._applied: list[Applied] = []

    @property
    def former(self) -> tuple[Copy, ...]:
        """Bases that can be gone back to, newest first; none of them can be sent."""
        return tuple(each.base for each in reversed(self._applied))

    def find(self, version: PolicyVersion) -> Copy | None:
        """One of them."""
        return next((base for base in self.former if base.version == version), None)

    def clear(self) -> None:
        """The weights are loaded anew, broken or asleep."""
        self._applied.clear()

    def apply(self, delta: Copy) -> Copy:
        """The base that a staged delta makes of what is served."""
        served = next(iter(self._replica.store.bases), None)
        if served is None or served.digest.value != delta.delta_from:
            raise NotReadyError(f"{delta.version} changes what is not served", reason="NOT_STAGED")
        change = delta.contents[0]
        self._applied.append(Applied(served, change, self._random.choice([1, 2])))
        made = change_between(served.digest.value, change)
        while self._applied and sum(each.size for each in self._applied) > self._room:
            gone = self._applied.pop(0).base.version
            self._replica.world.trace(self._replica.name, f"has no room to go back to {gone}")
        return dataclasses.replace(delta, digest=dataclasses.replace(delta.digest, value=made))

    def take_back(self, wanted: Copy) -> Copy:
        """One of ``former``, as what is served makes it."""
        value = self._replica.store.bases[0].digest.value
        while self._applied[-1].base != wanted:
            value = change_between(value, self._applied.pop().change)
        value = change_between(value, self._applied.pop().change)
        self._replica.world.trace(self._replica.name, f"takes deltas back to {wanted.version}")
        return dataclasses.replace(wanted, digest=dataclasses.replace(wanted.digest, value=value))
