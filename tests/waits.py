"""Waits for what other threads, tasks and processes bring about."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Return the result of a function that a thread runs, which ends with it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def until(
    condition: Callable[[], T | None],
    seconds: float = 20.0,
    *,
    every_seconds: float = 0.005,
    why: Callable[[], object] = lambda: "it never came true",
) -> T:
    """Return the first value of a condition that is true; ``why`` says why there was none."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, why()
        time.sleep(every_seconds)
    return found


def stays(condition: Callable[[], object], seconds: float) -> None:
    """Check that a condition holds for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert condition(), "it did not stay so"
        time.sleep(0.005)


async def eventually(
    condition: Callable[[], Awaitable[object] | object], seconds: float = 60.0
) -> None:
    """Wait, on the loop of the caller, until a condition holds or its coroutine returns true."""
    async with asyncio.timeout(seconds):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(0.002)
