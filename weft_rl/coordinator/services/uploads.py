"""Uploads of manifests and references: few at a time, and each within its time.

What a stream has sent so far is held here, as Python objects of many times its size. So the
other streams wait, unread, for their turn; gRPC's flow control holds their bytes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol, TypeVar

from weft_rl.contract.errors import TransferTimeoutError

MAX_AT_ONCE: Final = 4
#: Longest that a stream whose turn it is may take, and may pause: others wait for it.
MAX_UPLOAD_SECONDS: Final = 120.0
MAX_PAUSE_SECONDS: Final = 10.0

_Whole = TypeVar("_Whole", covariant=True)


class Decoder(Protocol[_Whole]):
    """Decoder that takes chunks one by one; see ``weft_rl.rpc.manifest_codec``."""

    def add(self, chunk: Any) -> None:
        """Take the next chunk, or refuse it."""

    def finish(self) -> _Whole:
        """Return the decoded value, once all chunks have come; slow, so called on a thread."""


class Uploads:
    """Streams of chunks that are being read. Used on one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)

    async def read(self, requests: AsyncIterator[Any], decoder: Decoder[_Whole]) -> _Whole:
        """Wait for a turn, then read a stream to its end.

        Args:
            requests: Messages, each with a ``chunk``.
            decoder: Refuses what is too much as soon as it comes.

        Raises:
            TransferTimeoutError: It took, or paused, too long.
            WeftError: The decoder's refusal.
        """
        async with self._turn:
            deadline = asyncio.get_running_loop().time() + MAX_UPLOAD_SECONDS
            while (request := await _next(requests, deadline)) is not None:
                decoder.add(request.chunk)
            return await asyncio.to_thread(decoder.finish)


async def _next(requests: AsyncIterator[Any], deadline: float) -> Any:
    now = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(min(deadline, now + MAX_PAUSE_SECONDS)):
            return await anext(requests, None)
    except TimeoutError:
        raise TransferTimeoutError(
            f"a stream of chunks must come within {MAX_UPLOAD_SECONDS:.0f} s, without a pause of "
            f"{MAX_PAUSE_SECONDS:.0f} s: send it again"
        ) from None
