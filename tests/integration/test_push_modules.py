"""How many modules a reader passes who follows one push of an adapter, from call to commit."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, weights
from trainer_side import Publisher
from weft.coordinator.runtime import driver

#: Lower it as modules leave the way; nothing may raise it.
MAX_MODULES = 63
_ROOT = Path(__file__).parents[2]
_ROOMS = ("trainer_side", "rollout_side", "weft")
_LONG_SECONDS = 300.0


class _Trace:
    """The files whose functions are called while ``on``, by any thread started after it."""

    def __init__(self) -> None:
        self.on = False
        self._files: set[str] = set()

    def __enter__(self) -> _Trace:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            self._files.add(frame.f_code.co_filename)

    def modules(self) -> list[str]:
        """Those of our packages that were seen, as paths from the root; stubs are not ours."""
        inside = [Path(f).relative_to(_ROOT) for f in self._files if f.startswith(f"{_ROOT}/")]
        return sorted(
            str(path)
            for path in inside
            if path.parts[0] in _ROOMS and path.parts[:2] != ("weft", "v1")
        )


def test_push_adapter_passes_few_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced is the second push of an adapter to one replica; the first opens what stays open.

    Heartbeats, what a replica does each second, the coordinator's clock and the renewal of
    leases are no part of a push: they are so rare here that none falls into it.
    """
    for module in list(sys.modules.values()):
        if hasattr(module, "seconds_to_tick"):
            monkeypatch.setattr(module, "seconds_to_tick", lambda: _LONG_SECONDS)
    monkeypatch.setattr(driver, "TICK_SECONDS", _LONG_SECONDS)
    with _Trace() as trace:
        pool = Pool(
            tmp_path / "weft.db",
            heartbeat_seconds=_LONG_SECONDS / 3,
            lost_after_seconds=_LONG_SECONDS,
            lease_seconds=_LONG_SECONDS,
        )
        try:
            pool.add_replica("replica-0", EngineDouble(weights(Model())))
            with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
                publisher.push_adapter(peft_of(Model(), 1), "math")
                second = peft_of(Model(), 2)
                trace.on = True
                publisher.push_adapter(second, "math")
                trace.on = False
        finally:
            pool.close()
    modules = trace.modules()
    by_room: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        room, _, name = module.rpartition("/")
        by_room[room].append(name)
    shown = "\n".join(f"{len(names)} {room}: {' '.join(names)}" for room, names in by_room.items())
    assert len(modules) <= MAX_MODULES, f"{len(modules)} modules:\n{shown}"
    assert "weft/transport/sender.py" in modules, "the trace is blind"
