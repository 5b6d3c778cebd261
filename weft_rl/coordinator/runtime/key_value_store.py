"""Bounded key-value store of a side group, as ``torch.distributed.Store`` needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    StaleEpochError,
    TransferTimeoutError,
)

MAX_STORE_BYTES: Final = 64 * 2**20
MAX_STORE_KEYS: Final = 100_000
#: Bounds of one value, and of one call's answer: less than a message can hold.
MAX_VALUE_BYTES: Final = 2 * 2**20
MAX_ANSWER_BYTES: Final = 3 * 2**20
_MAX_COUNTER: Final = 2**63 - 1


class KeyValueStore:
    """Keys and values of one group, and the calls that wait for them.

    Used on one event loop; nothing here blocks but ``get`` and ``wait``.

    Raises (every method, once closed):
        StaleEpochError: The group was dropped.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._used_bytes = 0
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._closed: str | None = None

    def close(self, why: str) -> None:
        """Refuse all further calls and wake all that wait."""
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
            CapacityError: ``STORE_FULL``; nothing was set.
        """
        self._check_open()
        if len(keys) != len(values):
            raise InvalidRequestError(
                f"{len(keys)} keys with {len(values)} values", reason="PROTOCOL"
            )
        self._put(dict(zip(keys, values, strict=True)))

    def _put(self, wanted: Mapping[str, bytes]) -> None:
        """Set all keys of ``wanted`` or, where there is no room, none."""
        grown, num_new = 0, 0
        for key, value in wanted.items():
            if len(value) > MAX_VALUE_BYTES:
                raise CapacityError(
                    f"a value of {len(value)} bytes for {key[:120]!r}; at most {MAX_VALUE_BYTES} "
                    "are kept",
                    reason="STORE_FULL",
                )
            old = self._values.get(key)
            num_new += old is None
            grown += len(value) - len(old) if old is not None else len(key) + len(value)
        if self._used_bytes + grown > MAX_STORE_BYTES:
            raise CapacityError(
                f"the group's store would exceed {MAX_STORE_BYTES} bytes", reason="STORE_FULL"
            )
        if len(self._values) + num_new > MAX_STORE_KEYS:
            raise CapacityError(
                f"the group's store would exceed {MAX_STORE_KEYS} keys", reason="STORE_FULL"
            )
        self._used_bytes += grown
        for key, value in wanted.items():
            self._values[key] = value
            for future in self._waiters.pop(key, ()):
                if not future.done():
                    future.set_result(None)

    async def get(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of keys, once all of them are set.

        Raises:
            TransferTimeoutError: As ``wait``.
            CapacityError: ``STORE_FULL``; the values are more than an answer can hold.
        """
        await self.wait(keys, timeout_seconds)
        values = [self._values[key] for key in keys]
        if (size := sum(map(len, values))) > MAX_ANSWER_BYTES:
            raise CapacityError(
                f"the values of {len(keys)} keys have {size} bytes, an answer holds "
                f"{MAX_ANSWER_BYTES}: ask for fewer at once",
                reason="STORE_FULL",
            )
        return values

    async def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Wait until all keys are set.

        Raises:
            TransferTimeoutError: A key was not set in time; names it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            self._check_open()
            missing = next((key for key in keys if key not in self._values), None)
            if missing is None:
                return
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
        """Return whether all keys are set."""
        self._check_open()
        return all(key in self._values for key in keys)

    def delete(self, keys: Sequence[str]) -> int:
        """Delete keys; return how many of them were set."""
        self._check_open()
        count = 0
        for key in keys:
            value = self._values.pop(key, None)
            if value is not None:
                self._used_bytes -= len(key) + len(value)
                count += 1
        return count

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal counter; return the sum.

        Raises:
            InvalidRequestError: ``PROTOCOL``: the value is no counter, or the sum does not
                fit 64 bits; the value stays.
        """
        self._check_open()
        held = self._values.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            total = _MAX_COUNTER + 1
        if not -_MAX_COUNTER - 1 <= total <= _MAX_COUNTER:
            raise InvalidRequestError(
                f"{amount} cannot be added to {held[:40]!r}, which key {key[:120]!r} holds: "
                "a counter is an integer of 64 bits",
                reason="PROTOCOL",
            )
        self._put({key: str(total).encode()})
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if its value is ``expected`` (empty: or absent); return the value after."""
        self._check_open()
        if self._values.get(key, b"") == expected:
            self._put({key: desired})
        return self._values.get(key, b"")

    def append(self, key: str, value: bytes) -> None:
        """Append to a value; an absent one is empty."""
        self._check_open()
        self._put({key: self._values.get(key, b"") + value})

    def __len__(self) -> int:
        self._check_open()
        return len(self._values)
