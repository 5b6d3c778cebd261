"""Time that passes only when nothing is left to do, and tasks that live in it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any

from weft_rl.contract.errors import PeerUnavailableError, WeftError

#: A task yields seconds to sleep, or a future to wait for; it is sent the value.
Steps = Generator[Any, Any, Any]


class Clock:
    """A heap of what happens when; equal times keep their order."""

    def __init__(self) -> None:
        self.now = 100.0
        self._heap: list[list[Any]] = []
        self._order = itertools.count()

    def after(self, seconds: float, run: Callable[..., object], *args: Any) -> list[Any]:
        """Schedule; returns a handle for ``cancel``."""
        entry = [self.now + seconds, next(self._order), run, args]
        heapq.heappush(self._heap, entry)
        return entry

    def cancel(self, handle: list[Any] | None) -> None:
        """Take something off the schedule; done or cancelled before is fine."""
        if handle is not None:
            handle[2] = None
            handle[3] = ()

    def run_until(self, end: float) -> None:
        """Let everything happen that is due before ``end``."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            when, _, run, args = heapq.heappop(heap)
            if run is not None:
                self.now = when
                run(*args)
        self.now = end


class Future:
    """A value or an error, some day; set again, it keeps the first."""

    __slots__ = ("_callbacks", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: WeftError | None = None
        self._callbacks: list[Callable[[Future], object]] = []

    def set(self, value: Any = None, error: WeftError | None = None) -> None:
        """End the wait for it."""
        if not self.done:
            self.done, self.value, self.error = True, value, error
            for callback in self._callbacks:
                callback(self)
            self._callbacks.clear()

    def then(self, callback: Callable[[Future], object]) -> None:
        """Call once it is done, or now."""
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)


class Process:
    """Something that can crash or freeze; never revived, a restart makes a new one."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.alive = True
        self.frozen_until = self.frozen_since = 0.0
        self.tasks: set[_Task] = set()
        #: What others see of its end; called once, at the crash.
        self.at_crash: dict[object, Callable[[], object]] = {}

    def spawn(self, steps: Steps) -> Future:
        """Run a task that dies with this process."""
        task = _Task(self, steps)
        self.tasks.add(task)
        task.step(None, None)
        return task.done

    def freeze(self, seconds: float) -> None:
        """Let no task of it go on for so long."""
        if self.frozen_until <= self.clock.now:
            self.frozen_since = self.clock.now
        self.frozen_until = max(self.frozen_until, self.clock.now + seconds)

    def frozen_for(self) -> float:
        """How long it has been frozen by now."""
        is_frozen = self.alive and self.frozen_until > self.clock.now
        return self.clock.now - self.frozen_since if is_frozen else 0.0

    def crash(self) -> None:
        """End it at once."""
        if not self.alive:
            return
        self.alive = False
        for task in list(self.tasks):
            task.kill()
        self.tasks.clear()
        watchers, self.at_crash = self.at_crash, {}
        for watcher in watchers.values():
            watcher()


class _Task:
    def __init__(self, process: Process, steps: Steps) -> None:
        self.process = process
        self.steps = steps
        self.done = Future()
        self.dead = False

    def kill(self) -> None:
        self.dead = True
        with contextlib.suppress(ValueError):  # it is what runs now, and ends its own process
            self.steps.close()

    def step(self, value: Any, error: WeftError | None) -> None:
        process, clock = self.process, self.process.clock
        if self.dead:
            return
        if process.frozen_until > clock.now:
            clock.after(process.frozen_until - clock.now, self.step, value, error)
            return
        try:
            waits = self.steps.throw(error) if error else self.steps.send(value)
        except StopIteration as stop:
            process.tasks.discard(self)
            self.done.set(stop.value)
        except WeftError as failure:
            process.tasks.discard(self)
            self.done.set(error=failure)
        else:
            if self.dead:
                return
            if isinstance(waits, Future):
                waits.then(lambda future: self.step(future.value, future.error))
            else:
                clock.after(waits, self.step, None, None)


def any_of(clock: Clock, seconds: float, *futures: Future, late: WeftError) -> Future:
    """The first of ``futures`` that is done, or ``late`` after ``seconds``."""
    first = Future()
    timer = clock.after(max(0.0, seconds), lambda: first.set(error=late))
    first.then(lambda _: clock.cancel(timer))
    for future in futures:
        future.then(lambda done: first.set(done.value, done.error))
    return first


def away(who: str) -> PeerUnavailableError:
    """Nobody answered."""
    return PeerUnavailableError(f"no answer from {who}", reason="COORDINATOR_AWAY")
