"""What was pushed when: thread-safe, written by trainers, read by clients and checks."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tests.soak.weights import FIRST_SEED
from weft_rl.contract.names import BASE_POLICY, PolicyVersion


@dataclass(frozen=True)
class Push:
    """One version that was pushed; times are monotonic seconds."""

    seed: int
    began_at: float
    ended_at: float


class Ledger:
    """Every version that a push returned, and the seed of its weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        first = Push(FIRST_SEED, 0.0, 0.0)
        self._pushes: dict[str, dict[int, Push]] = defaultdict(dict)
        self._pushes[BASE_POLICY][0] = first

    def record(self, version: PolicyVersion, seed: int, began_at: float) -> None:
        """A push has just returned ``version``."""
        with self._lock:
            push = Push(seed, began_at, time.monotonic())
            self._pushes[version.policy][version.version] = push

    def floor(self) -> Mapping[str, int]:
        """Newest version of each policy whose push has returned."""
        with self._lock:
            return {policy: max(pushes) for policy, pushes in self._pushes.items()}

    def newest(self, policy: str, count: int) -> list[int]:
        """The newest versions whose push has returned, ascending."""
        with self._lock:
            return sorted(self._pushes.get(policy, {}))[-count:]

    def seed(self, version: PolicyVersion) -> int | None:
        """Of its weights; None if no push returned it."""
        with self._lock:
            push = self._pushes.get(version.policy, {}).get(version.version)
            return push.seed if push else None

    def bases(self, floor: int, until: float) -> list[int]:
        """Base versions from ``floor`` on whose push began before ``until``, ascending."""
        with self._lock:
            pushes = self._pushes[BASE_POLICY]
            return sorted(v for v, p in pushes.items() if v >= floor and p.began_at < until)

    def num_newer(self, version: PolicyVersion, until: float) -> int:
        """Versions of the same policy above this one, pushes begun before ``until``."""
        with self._lock:
            pushes = self._pushes.get(version.policy, {})
            return sum(v > version.version and p.began_at < until for v, p in pushes.items())
