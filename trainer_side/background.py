"""Pushes that go on while the trainer trains: one thread, in the order of the calls."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from weft.contract.names import PolicyVersion

_log = logging.getLogger(__name__)


@dataclass
class Waiting:
    """A push that was asked for."""

    policy: str
    run: Callable[[Waiting], PolicyVersion]
    future: Future[PolicyVersion] = field(default_factory=Future)
    is_replaced: bool = False
    """Whether a later push of the policy made it pointless before it began."""


class Background:
    """Runs pushes one after the other on a thread of its own."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._is_running = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(
        self, policy: str, run: Callable[[Waiting], PolicyVersion], *, replace: bool
    ) -> Future[PolicyVersion]:
        """Run a push after those that wait.

        Args:
            run: Given its place in the queue, which says whether it was replaced.
            replace: Whether those of the policy that wait are pointless now.
        """
        waiting = Waiting(policy, run)
        waiting.future.set_running_or_notify_cancel()  # the ranks could not agree on it
        with self._condition:
            if replace:
                for earlier in self._queue:
                    if earlier.policy == policy:
                        earlier.is_replaced = True
            self._queue.append(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="weft-push", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        return waiting.future

    def drain(self) -> None:
        """Block until nothing runs or waits; each push is bounded by its own deadline."""
        with self._condition:
            self._condition.wait_for(lambda: not self._queue and not self._is_running)

    def close(self) -> None:
        """Drain, and end the thread."""
        self.drain()
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                waiting = self._queue.popleft()
                self._is_running = True
            try:
                waiting.future.set_result(waiting.run(waiting))
            except BaseException as error:  # noqa: BLE001 (it is the future's)
                if not waiting.is_replaced:
                    _log.warning("the push of %s failed: %s", waiting.policy, error)
                waiting.future.set_exception(error)
            finally:
                del waiting
                with self._condition:
                    self._is_running = False
                    self._condition.notify_all()
