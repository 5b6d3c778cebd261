"""A side group's key-value store: what ``torch.distributed.Store`` needs, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from weft.contract.errors import (
    CapacityError,
    InvalidRequestError,
    StaleEpochError,
    TransferTimeoutError,
)

MAX_STORE_BYTES: Final = 64 * 2**20
MAX_STORE_KEYS: Final = 100_000


class GroupStore:
    """Keys and values of one group, and those who wait for them.

    On one event loop; nothing here blocks but ``wait``.

    Raises (every method, once closed):
        StaleEpochError: The group was dropped.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._used_bytes = 0
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._closed: str | None = None

    def close(self, why: str) -> None:
        """Refuse all further calls and wake everyone who waits."""
        self._closed = why
        self._values.clear()
        waiters, self._waiters = self._waiters, {}
        for futures in waiters.values():
            for future in futures:
                if not future.done():
                    future.set_exception(StaleEpochError(f"the group was dropped: {why}"))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise StaleEpochError(f"the group was dropped: {self._closed}")

    def set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set keys to values.

        Raises:
            InvalidRequestError: Not as many values as keys.
            CapacityError: ``STORE_FULL``; nothing of the rest was set.
        """
        self._check_open()
        if len(keys) != len(values):
            raise InvalidRequestError(
                f"{len(keys)} keys with {len(values)} values", reason="PROTOCOL"
            )
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def _put(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._used_bytes + grown > MAX_STORE_BYTES:
            raise CapacityError(
                f"the group's store would exceed {MAX_STORE_BYTES} bytes", reason="STORE_FULL"
            )
        if old is None and len(self._values) >= MAX_STORE_KEYS:
            raise CapacityError(
                f"the group's store would exceed {MAX_STORE_KEYS} keys", reason="STORE_FULL"
            )
        self._values[key] = value
        self._used_bytes += grown
        for future in self._waiters.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Wait until all keys are set; answer their values.

        Raises:
            TransferTimeoutError: One was not set in time; names it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            self._check_open()
            missing = next((key for key in keys if key not in self._values), None)
            if missing is None:
                return [self._values[key] for key in keys]
            future: asyncio.Future[None] = loop.create_future()
            self._waiters.setdefault(missing, []).append(future)
            try:
                async with asyncio.timeout_at(deadline):
                    await future
            except TimeoutError:
                raise TransferTimeoutError(
                    f"key {missing[:120]!r} was not set in {timeout_seconds:.1f} s"
                ) from None
            finally:
                self._forget(missing, future)

    def _forget(self, key: str, future: asyncio.Future[None]) -> None:
        futures = self._waiters.get(key)
        if futures and future in futures:
            futures.remove(future)
            if not futures:
                del self._waiters[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        self._check_open()
        return all(key in self._values for key in keys)

    def delete(self, keys: Sequence[str]) -> int:
        """Delete keys; answer how many there were."""
        self._check_open()
        count = 0
        for key in keys:
            value = self._values.pop(key, None)
            if value is not None:
                self._used_bytes -= len(key) + len(value)
                count += 1
        return count

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal counter; answer the sum."""
        self._check_open()
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise InvalidRequestError(
                f"key {key[:120]!r} does not hold a counter", reason="PROTOCOL"
            ) from None
        self._put(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it is as expected (empty: or absent); answer its value after."""
        self._check_open()
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        return self._values.get(key, b"")

    def append(self, key: str, value: bytes) -> None:
        """Append to a value; an absent one is empty."""
        self._check_open()
        self._put(key, self._values.get(key, b"") + value)

    def __len__(self) -> int:
        self._check_open()
        return len(self._values)
