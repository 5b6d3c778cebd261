"""Samples generated ahead of training, within a bound on their staleness."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from types import TracebackType

from trainer_side.rollouts.requests import (
    CheckedPrompt,
    Prompt,
    WantedVersions,
    checked_prompt,
    closed_error,
    number_of,
)
from trainer_side.rollouts.sample import SampleGroup
from trainer_side.rollouts.window import AdmittedGroup, Window
from weft_rl.contract.errors import TransferTimeoutError
from weft_rl.contract.names import PolicyVersion

#: Sends one prompt: (prompt, wanted version, index of its group).
SampleOne = Callable[[CheckedPrompt, WantedVersions, int], "Future[SampleGroup]"]


class RolloutStream:
    """Iterator of groups, synchronous and asynchronous; see ``RolloutClient.stream``.

    It ends with its prompts. A group that fails ends it with the error (``on_error="raise"``), and
    so do prompts that cannot be drawn; once it is closed, taking a group raises
    ``InvalidRequestError``. Iterate on one thread or task at a time; ``consumed`` and ``close`` may
    be called from any.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        window: Window,
        wanted: WantedVersions,
        timeout_seconds: float,
        sample: SampleOne,
    ) -> None:
        self._prompts, self._window = iter(prompts), window
        self._wanted, self._sample, self._timeout_seconds = wanted, sample, timeout_seconds
        # Prompts are drawn outside of the lock of the state: the client's loop takes that one,
        # and is not to wait for a caller's iterator.
        self._drawing = threading.Lock()
        self._changed = threading.Condition()
        self._groups: dict[int, Future[SampleGroup]] = {}
        self._listeners: set[Callable[[], None]] = set()
        self._is_drawn = self._is_closed = False
        self._failure: Exception | None = None

    def consumed(self, count: int, *, version: str | PolicyVersion | None = None) -> None:
        """Report that so many samples were used, and that the version trained on them is served.

        Called after the push returned, or its future is done. Draws the prompts that may be
        admitted now.

        Args:
            count: Samples, not groups.
            version: Version that was learnt from them (``push_base(...).version``, or "base@3"):
                prompts that are admitted from now on are answered by it or a newer one, whatever
                replica they go to.

        Raises:
            InvalidRequestError: More than were handed out, or ``version`` is not one of the policy.
        """
        with self._changed:
            wanted = self._wanted
            if version is not None:
                number = number_of(wanted.policy, "version", version)
                wanted = WantedVersions(wanted.policy, at_least=number)
            self._window.consume(count)
            self._wanted = wanted
        self._admit()

    def close(self) -> None:
        """End running generations; idempotent."""
        with self._changed:
            self._is_closed = True
            groups = [*self._groups.values()]
            self._groups.clear()
            self._tell()
        for group in groups:
            group.cancel()

    def __iter__(self) -> RolloutStream:
        return self

    def __next__(self) -> SampleGroup:
        self._admit()
        with self._changed:
            while (group := self._take()) is None:
                if not self._changed.wait(self._timeout_seconds):
                    self._check_progress()
        return self._result(group)

    def __aiter__(self) -> RolloutStream:
        return self

    async def __anext__(self) -> SampleGroup:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._admit()
        with self._changed:
            self._listeners.add(tell)
        try:
            while True:
                with self._changed:
                    group = self._take()
                if group is not None:
                    return self._result(group)
                try:
                    async with asyncio.timeout(self._timeout_seconds):
                        await changed.wait()
                except TimeoutError:
                    self._check_progress()
                changed.clear()
        except StopIteration:
            raise StopAsyncIteration from None
        finally:
            with self._changed:
                self._listeners.discard(tell)

    def __enter__(self) -> RolloutStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _admit(self) -> None:
        with self._drawing:
            while not self._is_drawn and not self._is_closed and self._window.may_admit:
                try:
                    prompt = checked_prompt(next(self._prompts))
                except Exception as error:  # noqa: BLE001  # raised where the groups are taken
                    with self._changed:
                        self._is_drawn = True
                        self._failure = None if isinstance(error, StopIteration) else error
                        self._tell()
                    return
                with self._changed:
                    if not self._is_closed:
                        self._send(prompt)

    def _send(self, prompt: CheckedPrompt) -> None:
        group = self._window.admit()
        future = self._sample(prompt, self._wanted, group.index)
        self._groups[group.index] = future
        future.add_done_callback(lambda _: self._note(group))

    def _note(self, group: AdmittedGroup) -> None:
        with self._changed:
            group.is_ready = True
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for tell in [*self._listeners]:
            tell()

    def _take(self) -> Future[SampleGroup] | None:
        """Return the group to hand out now; None if the caller must wait.

        Raises:
            StopIteration: There are no more groups.
            InvalidRequestError: The stream was closed before. (Out of a thread that takes one
                group, a ``StopIteration`` would end nothing.)
        """
        if self._is_closed and not (self._is_drawn and not self._window.waiting):
            raise closed_error("stream")
        if self._is_drawn and not self._window.waiting:
            if self._failure is not None:
                raise self._failure
            raise StopIteration
        group = self._window.next()
        return None if group is None else self._groups.pop(group.index)

    def _check_progress(self) -> None:
        """Check that a group is on its way; such groups have deadlines of their own."""
        window = self._window
        if not window.waiting:
            raise TransferTimeoutError(
                f"no prompt was admitted for {self._timeout_seconds:g} s: "
                f"{window.num_handed - window.num_consumed} samples were handed out that have not "
                "been reported as consumed()"
            )

    def _result(self, group: Future[SampleGroup]) -> SampleGroup:
        try:
            return group.result()
        except CancelledError:
            raise closed_error() from None
        except Exception:
            self.close()
            raise
