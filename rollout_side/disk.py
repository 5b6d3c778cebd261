"""Reads of disks that may hang, each on its own thread, which is abandoned at its deadline.

asyncio's own threads would not do: a few reads that hang would take all of them, and the process
would wait for them at its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, TypeVar

from weft_rl.contract.errors import TransferTimeoutError

_T = TypeVar("_T")

#: Threads that may hang at a time; beyond that a read fails at once.
MAX_HANGING: Final = 16
_free = threading.BoundedSemaphore(MAX_HANGING)


def read_within(seconds: float, what: str, read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns, or raise what it raises; block at most ``seconds``.

    Args:
        what: Name of what is read, for error messages.

    Raises:
        TransferTimeoutError: The disk did not answer; the read goes on, and its result is dropped.
    """
    try:
        return _begin(what, read).result(seconds)
    except TimeoutError:
        raise _no_answer(what, seconds) from None


async def answer_within(seconds: float, what: str, read: Callable[[], _T]) -> _T:
    """Do as ``read_within``, but without blocking the event loop."""
    future = asyncio.wrap_future(_begin(what, read))
    done, _ = await asyncio.wait({future}, timeout=seconds)
    if not done:
        future.cancel()
        raise _no_answer(what, seconds)
    return future.result()


def _begin(what: str, read: Callable[[], _T]) -> Future[_T]:
    if not _free.acquire(blocking=False):
        raise TransferTimeoutError(
            f"{what} is not read: {MAX_HANGING} reads hang already, the disk does not answer"
        )
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            found = read()
        except BaseException as error:  # noqa: BLE001 (handed to who asks)
            _settle(outcome.set_exception, error)
        else:
            _settle(outcome.set_result, found)
        finally:
            _free.release()

    threading.Thread(target=run, name="weft-disk", daemon=True).start()
    return outcome


def _settle(settle: Callable[[Any], None], outcome: Any) -> None:
    """Set the outcome, unless nobody waits for it any more."""
    try:
        settle(outcome)
    except InvalidStateError:
        return


def _no_answer(what: str, seconds: float) -> TransferTimeoutError:
    return TransferTimeoutError(f"{what} was not read in {seconds:g} s: the disk does not answer")
