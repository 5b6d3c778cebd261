"""Page of memory in which a worker says what it holds, and the replica's process reads it.

vLLM's workers spin for a second after each ``collective_rpc``: asked every second, an idle
replica kept a core a worker busy. So nobody asks; the worker writes when something has
changed, and who wants to know looks. Neither ever waits for the other, and what was written
last outlives the worker.

The page is a ``memfd`` of the reader's, which the writer opens by path. It has two slots, written
in turn: each a header (number, length, checksum) and JSON. The valid slot of the higher number is
what holds; a slot that is being written, or was when its writer died, is not valid.

Behind the slots each rank writes when its thread last got on with what it was asked: the time of
the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from rollout_side.engine import MemoryUse
from weft_rl.contract.names import PolicyVersion

#: Of one value as JSON: some thousand spilled versions. Untouched memory is not taken.
SLOT_BYTES = 4 * 2**20
_HEADER = struct.Struct("<QII")
_MOST_BYTES = SLOT_BYTES - _HEADER.size
_TIME = struct.Struct("<d")
#: Ranks that have a place of their own; further ones share them.
_MAX_RANKS = 64
_TIMES = struct.Struct(f"<{_MAX_RANKS}d")
_TIMES_AT = 2 * SLOT_BYTES
_PAGE_BYTES = _TIMES_AT + _TIMES.size
#: JSON has no bytes: they are written as {"hex": "00ff"}.
_HEX = "hex"


class HoldingsPage:
    """Reader's end of the page, which it creates; usable from any thread."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("weft_holdings", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _PAGE_BYTES)
        self._map = mmap.mmap(self._fd, _PAGE_BYTES, prot=mmap.PROT_READ)
        self._lock = threading.Lock()
        self._seen = 0
        self._held = memory_use({})
        self._ended_restore = ""

    @property
    def path(self) -> str:
        """Path at which a process of the same user opens the page, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> MemoryUse:
        """Return what was written last; nothing is held before anything was written.

        Costs next to nothing where nothing has changed.
        """
        with self._lock:
            if self._fd < 0:
                return self._held
            for number, slot in sorted(((self._number(i), i) for i in (0, 1)), reverse=True):
                if number <= self._seen:
                    break
                text = self._valid(slot, number)
                if text is not None:
                    value = json.loads(text, object_hook=_revived)
                    self._seen, self._held = number, memory_use(value)
                    self._ended_restore = value["ended_restore"]
                    break
            return self._held

    def has_ended(self, transfer_id: str) -> bool:
        """Return whether the last restore was of this transfer, and has ended, well or not."""
        self.read()
        return self._ended_restore == transfer_id

    def progress_at(self) -> float:
        """Return when a rank last made progress, as ``time.monotonic()``; 0 if none has yet."""
        with self._lock:
            if self._fd < 0:
                return 0.0
            times: tuple[float, ...] = _TIMES.unpack_from(self._map, _TIMES_AT)
            return max(times)

    def close(self) -> None:
        """Give the memory back; a writer's end stays usable."""
        with self._lock:
            if self._fd >= 0:
                self._map.close()
                os.close(self._fd)
                self._fd = -1

    def _number(self, slot: int) -> int:
        return int(_HEADER.unpack_from(self._map, slot * SLOT_BYTES)[0])

    def _valid(self, slot: int, number: int) -> bytes | None:
        """Return a slot's text if it is whole and of that number, else None."""
        found, length, checksum = _HEADER.unpack_from(self._map, slot * SLOT_BYTES)
        if found != number or length > _MOST_BYTES:
            return None
        begin = slot * SLOT_BYTES + _HEADER.size
        text = self._map[begin : begin + length]
        return text if _checksum(number, text) == checksum else None


def memory_use(value: Mapping[str, Any]) -> MemoryUse:
    """Make a ``MemoryUse`` of what a worker has written, which ``state.memory_of`` made.

    A page that nobody has written to holds nothing.
    """
    if not value:
        return MemoryUse(adapter_bytes=0, staging_bytes=0)
    return MemoryUse(
        adapter_bytes=value["adapter_bytes"],
        staging_bytes=value["staging_bytes"],
        staged_transfer_ids=tuple(value["transfer_ids"]),
        retained_bases=tuple(value["retained_bases"]),
        spilled=tuple(map(PolicyVersion.parse, value["spilled"])),
        spilled_digests=tuple(
            (PolicyVersion.parse(version), bytes.fromhex(digest))
            for version, digest in value["spilled_digests"]
        ),
        pinned_base_bytes=value["pinned_base_bytes"],
    )


class ProgressWriter:
    """Writer of one rank's times of progress; used by any of its threads.

    Args:
        path: ``HoldingsPage.path``.
        rank: Rank within the replica.

    Raises:
        OSError: The page's process is gone.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._map = _opened(path)
        self._at = _TIMES_AT + rank % _MAX_RANKS * _TIME.size

    def report_progress(self) -> None:
        """Report that the calling thread makes progress; as often as one likes."""
        _TIME.pack_into(self._map, self._at, time.monotonic())


class HoldingsWriter:
    """Writer's end of the page; one per page, used by one thread at a time.

    Args:
        path: ``HoldingsPage.path``.

    Raises:
        OSError: The page's process is gone.
    """

    def __init__(self, path: str) -> None:
        self._map = _opened(path)
        self._number = 0

    def write(self, value: Mapping[str, Any]) -> None:
        """Replace the value that can be read.

        Raises:
            ValueError: It is too long; what was written before stays.
        """
        text = json.dumps(value, separators=(",", ":"), default=_plain).encode()
        if len(text) > _MOST_BYTES:
            raise ValueError(f"{len(text)} bytes do not fit into a page of {_MOST_BYTES}")
        self._number += 1
        begin = self._number % 2 * SLOT_BYTES
        header, end = begin + _HEADER.size, begin + _HEADER.size + len(text)
        self._map[header:end] = text
        _HEADER.pack_into(self._map, begin, self._number, len(text), _checksum(self._number, text))


def _opened(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, _PAGE_BYTES)
    finally:
        os.close(fd)


def _checksum(number: int, text: bytes) -> int:
    """Return the checksum of a text under a number: an old header does not fit a new text."""
    return zlib.crc32(text, number & 0xFFFFFFFF)


def _plain(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} cannot be written into a page")
    return {_HEX: value.hex()}


def _revived(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value[_HEX]) if value.keys() == {_HEX} else value


_log = logging.getLogger(__name__)

# How soon a change by another thread than the engine's (a version that was staged, or spilled)
# is written: soon where something was done of late, else as often as it was once asked for.
_LOOK_SECONDS, _IDLE_LOOK_SECONDS = 0.1, 1.0
_ACTIVE_SECONDS = 5.0
_STOP_SECONDS = 2.0


class HoldingsReport:
    """Reporter of what is held, whenever that has changed; usable from any thread.

    It writes at once where ``notify`` is called, else by a thread that looks.

    Args:
        writer: Writer of the page, used by this object alone.
        look: Returns what is held, in a form that is cheap to make and compare.
        describe: Returns what is held as plain values; called where ``look`` has changed.
    """

    def __init__(
        self,
        writer: HoldingsWriter,
        look: Callable[[], object],
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._writer, self._look, self._describe = writer, look, describe
        self._told: object = None
        self._active_at = time.monotonic()
        self._lock = threading.Lock()
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-holdings", daemon=True)

    def start(self) -> None:
        """Write what is held now, and from then on whenever it changes."""
        self._write_change()
        self._thread.start()

    def notify(self) -> None:
        """Write what is held if it has changed, and look often for a while. Never raises.

        What calls this may have begun something.
        """
        self._write_change()
        self._active_at = time.monotonic()
        self._wake.set()

    def close(self) -> None:
        """End the thread; what was written last stays."""
        self._closed = True
        self._wake.set()
        self._thread.join(_STOP_SECONDS)

    def _write_change(self) -> None:
        try:
            with self._lock:
                seen = self._look()
                if seen != self._told:
                    # Seen before it is described: what changes between is told again.
                    self._writer.write(self._describe())
                    self._told, self._active_at = seen, time.monotonic()
        except Exception:  # noqa: BLE001 (the edge of a thread, and of each worker method)
            _log.exception("what this worker holds cannot be told; it is tried again")

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._pause_seconds())
            self._wake.clear()
            self._write_change()

    def _pause_seconds(self) -> float:
        is_active = time.monotonic() - self._active_at < _ACTIVE_SECONDS
        return _LOOK_SECONDS if is_active else _IDLE_LOOK_SECONDS
