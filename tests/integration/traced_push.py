"""A push of an adapter, traced: which functions of ours it calls, in which order."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, weights
from trainer_side import Publisher
from weft_rl.coordinator.runtime import driver

_ROOT = Path(__file__).parents[2]
_ROOMS = ("trainer_side", "rollout_side", "weft_rl")
_LONG_SECONDS = 300.0


class Trace:
    """Each call of a function while ``on``, by any thread started after it."""

    def __init__(self) -> None:
        self.on = False
        self._called: list[CodeType] = []
        self._first: list[CodeType] = []

    def __enter__(self) -> Trace:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            self._called.append(frame.f_code)

    def again(self) -> None:
        """Keep what was called until now, and begin anew."""
        self._first, self._called = self._called, []

    def modules(self) -> list[str]:
        """Modules of our packages that both pushes pass; sorted. On a busy machine a thread that
        speaks because it has waited for long comes into one of them."""
        first, second = ({path for path, _ in _ours(c)} for c in (self._first, self._called))
        return sorted(first & second)

    def functions(self) -> list[tuple[str, str]]:
        """Each call of those of our packages in the last push, in order: path from the root,
        qualified name. Stubs are not ours."""
        return _ours(self._called)


def _ours(called: list[CodeType]) -> list[tuple[str, str]]:
    found = []
    for code in called:
        if code.co_filename.startswith(f"{_ROOT}/"):
            path = Path(code.co_filename).relative_to(_ROOT)
            if path.parts[0] in _ROOMS and path.parts[:2] != ("weft_rl", "v1"):
                found.append((str(path), code.co_qualname))
    return found


def trace_push(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Trace two pushes of an adapter to one replica, after one that opens what stays open.

    Heartbeats, what a replica does each second, the coordinator's clock and the renewal of
    leases are no part of a push: they are so rare here that none falls into it.
    """
    for module in list(sys.modules.values()):
        if "seconds_to_tick" in vars(module):  # hasattr would load what is lazy
            monkeypatch.setattr(module, "seconds_to_tick", lambda: _LONG_SECONDS)
    monkeypatch.setattr(driver, "TICK_SECONDS", _LONG_SECONDS)
    with Trace() as trace:
        pool = Pool(
            folder / "weft.db",
            heartbeat_seconds=_LONG_SECONDS / 3,
            lost_after_seconds=_LONG_SECONDS,
            lease_seconds=_LONG_SECONDS,
        )
        try:
            pool.add_replica("replica-0", EngineDouble(weights(Model())))
            with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
                publisher.push_adapter(peft_of(Model(), 1), "math")
                for seed in (2, 3):
                    model = peft_of(Model(), seed)
                    trace.again()
                    trace.on = True
                    publisher.push_adapter(model, "math")
                    trace.on = False
        finally:
            pool.close()
    return trace
