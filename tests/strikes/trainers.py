"""Driver of one trainer's processes: it has them push together, one push after the other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fault.matrix import PUSH_SECONDS, SLACK_SECONDS
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.errors import TransferTimeoutError, WeftError

#: Reason of a push whose process was killed meanwhile; no error of Weft's.
DIED = "its process was killed"
_PAUSE_SECONDS = 0.4
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Push:
    """How one push ended at all ranks; times are ``time.time()``."""

    policy: str
    began: float
    versions: frozenset[int]
    """Versions that ranks returned."""
    reasons: tuple[str, ...]
    """Reasons of the ranks at which it failed."""
    details: tuple[str, ...] = ()

    @property
    def has_succeeded(self) -> bool:
        """Whether every rank returned the version."""
        return not self.reasons


class Trainer(threading.Thread):
    """Thread that has the ranks of one trainer push until it is paused.

    Args:
        names: Names of its processes.
        process: Function that returns the process which has a name now.
        stopped_until: Function that returns the time (``time.monotonic()``) until which some
            process is stopped, which a push may have to wait for.
    """

    def __init__(
        self,
        policy: str,
        names: Sequence[str],
        process: Callable[[str], Process],
        stopped_until: Callable[[], float],
        rng: random.Random,
    ) -> None:
        super().__init__(name=f"trainer of {policy}", daemon=True)
        self.policy, self.names = policy, tuple(names)
        self._process, self._stopped_until, self._rng = process, stopped_until, rng
        self._changed = threading.Condition()
        self._may_push = self._is_pushing = False
        self._value = 0
        self.pushes: list[Push] = []
        self.wrong: list[str] = []

    @property
    def is_pushing(self) -> bool:
        """Whether a push is under way."""
        return self._is_pushing

    def go_on(self) -> None:
        """Push again, and again."""
        with self._changed:
            self._may_push = True
            self._changed.notify_all()

    def pause(self) -> None:
        """Begin no further push; blocks until the one under way has ended."""
        with self._changed:
            self._may_push = False
            self._changed.wait_for(lambda: not self._is_pushing)

    def wait_push(self, after: float, timeout_seconds: float) -> Push | None:
        """Return the first push that began after a time, once it has ended."""

        def first() -> Push | None:
            return next((push for push in self.pushes if push.began > after), None)

        with self._changed:
            return self._changed.wait_for(first, timeout_seconds)

    def run(self) -> None:
        """Push whenever it may, as long as the main thread lives."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._may_push)
                self._is_pushing = True
            push = self._push()
            with self._changed:
                self.pushes.append(push)
                self._is_pushing = False
                if DIED in push.reasons:  # until it is started again
                    self._may_push = False
                self._changed.notify_all()
            time.sleep(self._rng.uniform(0, _PAUSE_SECONDS))

    def _push(self) -> Push:
        self._value += 1
        began, told = time.time(), time.monotonic()
        processes = {name: self._process(name) for name in self.names}
        for process in processes.values():
            try:
                process.tell(f"push {self._value} {PUSH_SECONDS}")
            except OSError:
                continue  # it has ended: so says its answer
        answers = {name: self._answer(process, told) for name, process in processes.items()}
        versions = frozenset(a["version"] for a in answers.values() if "version" in a)
        if len(versions) > 1:
            self.wrong.append(f"ranks of {self.policy} returned different versions: {answers}")
        failed = {name: a for name, a in answers.items() if "version" not in a}
        return Push(
            self.policy, began, versions, tuple(str(a["error"]) for a in failed.values()),
            tuple(f"{name}: {a.get('message', '')}" for name, a in failed.items()),
        )  # fmt: skip

    def _answer(self, process: Process, told: float) -> dict[str, Any]:
        while True:
            try:
                return process.answer(_LOOK_SECONDS)
            except TransferTimeoutError:
                since = max(told, self._stopped_until())
                waited = time.monotonic() - since
                if waited > PUSH_SECONDS + SLACK_SECONDS:
                    self.wrong.append(f"{process.name}: a push has not ended in {waited:.0f} s")
                    return {"error": "it has not ended"}
            except WeftError:
                return {"error": DIED}
