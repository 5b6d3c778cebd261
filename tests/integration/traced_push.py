"""A push of an adapter, traced: which functions of ours each process calls, in which order."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from weakref import WeakKeyDictionary

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, replicas_of
from tests.integration.models import Model, peft_of, until, weights
from trainer_side import Publisher
from weft_rl import interrupts
from weft_rl.coordinator.runtime import driver

PROCESSES = ("trainer", "coordinator", "replica")
_ROOT = Path(__file__).parents[2]
_ROOMS = ("trainer_side", "rollout_side", "weft_rl")
_LONG_SECONDS = 300.0
_BACKENDS = ("weft_rl/transport/backends.py", "weft_rl/transport/one_sided/members.py")
_START = threading.Thread.start

Call = tuple[str, str]
"""Path from the root and qualified name of a function."""


class Trace:
    """Each call of a function while ``on``, by any thread started after it.

    Trainer, coordinator and replica are threads of one process here. A thread belongs to the one
    in whose ``process`` block it was started, or to that of the thread that started it.
    """

    def __init__(self) -> None:
        self.on = False
        self._process: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
        self._called: list[tuple[str, CodeType]] = []
        self._first: list[tuple[str, CodeType]] = []
        self._stack: list[Call] = []

    def __enter__(self) -> Trace:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        trace = self

        def start(thread: threading.Thread) -> None:
            trace._process[thread] = trace._of_this_thread()
            _START(thread)

        threading.Thread.start = start  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        threading.Thread.start = _START
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        """Count this thread, and those that it starts meanwhile, as a process's."""
        thread = threading.current_thread()
        self._process[thread] = name
        yield
        del self._process[thread]

    def _of_this_thread(self) -> str:
        return self._process.get(threading.current_thread(), "")

    def idle_threads(self) -> deque[interrupts._Worker]:
        """Make a queue of idle threads that lends each only to the process that started it."""
        trace = self

        class OfOneProcess(deque[interrupts._Worker]):
            def pop(self) -> interrupts._Worker:  # type: ignore[override]
                mine = trace._of_this_thread()
                for worker in [each for each in self if trace._process.get(each) == mine]:
                    self.remove(worker)
                    return worker
                raise IndexError

        return OfOneProcess()

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if not self.on or event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(f"{_ROOT}/"):
            return
        process = self._of_this_thread()
        self._called.append((process, code))
        if code.co_name == "broadcast" and process == "trainer" and _path(code) in _BACKENDS:
            self._stack = _stack(frame)

    def again(self) -> None:
        """Keep what was called until now, and begin anew."""
        self._first, self._called = self._called, []

    def modules(self, process: str) -> list[str]:
        """Return the modules of our packages that both pushes pass in a process, sorted.

        On a busy machine a thread that speaks because it has waited for long comes into one
        of the two pushes.
        """
        first, second = (
            {_path(code) for of, code in called if of == process and _is_ours(code)}
            for called in (self._first, self._called)
        )
        return sorted(first & second)

    def functions(self) -> list[Call]:
        """Return each call of our packages' functions in the last push, in order. Stubs are
        not ours."""
        return [(_path(code), code.co_qualname) for _, code in self._called if _is_ours(code)]

    def strays(self) -> list[str]:
        """Return the modules that were called on threads of no process."""
        return sorted({_path(code) for of, code in self._called if not of and _is_ours(code)})

    def calls_to_the_backend(self) -> list[Call]:
        """Return the stack of the last bucket's sending: `push_adapter` to the backend's call."""
        return self._stack


def _stack(frame: FrameType | None) -> list[Call]:
    calls: list[Call] = []
    while frame is not None and frame.f_code.co_name != "trace_push":
        calls.insert(0, (_path(frame.f_code), frame.f_code.co_qualname))
        frame = frame.f_back
    # The wrapper around the publisher's methods is no step of the way: it tells of errors only.
    first = next(at for at, (_, name) in enumerate(calls) if name.startswith("Publisher."))
    return calls[first:]


def _path(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{_ROOT}/")


def _is_ours(code: CodeType) -> bool:
    path = _path(code)
    return path.split("/")[0] in _ROOMS and not path.startswith("weft_rl/v1/")


def trace_push(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Trace two pushes of an adapter to one replica, after one that opens what stays open.

    Heartbeats, what a replica does each second, the coordinator's clock and the renewal of
    leases are no part of a push: they are so rare here that none falls into it.
    """
    for module in list(sys.modules.values()):
        if "seconds_to_tick" in vars(module):  # hasattr would load what is lazy
            monkeypatch.setattr(module, "seconds_to_tick", lambda: _LONG_SECONDS)
    monkeypatch.setattr(driver, "TICK_SECONDS", _LONG_SECONDS)
    until(lambda: not interrupts.IDLE)  # threads of no process here, which would make its calls
    with ExitStack() as stack:
        trace = stack.enter_context(Trace())
        monkeypatch.setattr(interrupts, "IDLE", trace.idle_threads())
        with trace.process("coordinator"):
            coordinator = Pool(
                folder / "weft.db",
                heartbeat_seconds=_LONG_SECONDS / 3,
                lost_after_seconds=_LONG_SECONDS,
                lease_seconds=_LONG_SECONDS,
            )
        stack.callback(coordinator.close)
        with trace.process("replica"):
            replicas = stack.enter_context(replicas_of(coordinator.target))
            replicas.add_replica("replica-0", EngineDouble(weights(Model())))
        with (
            trace.process("trainer"),
            Publisher(
                coordinator.target, trainer_id="trainer-a", timeout_seconds=20, progress=None
            ) as publisher,
        ):
            publisher.push_adapter(peft_of(Model(), 1), "math")
            for seed in (2, 3):
                model = peft_of(Model(), seed)
                trace.again()
                trace.on = True
                publisher.push_adapter(model, "math")
                trace.on = False
    return trace
