"""Page of memory in which a worker reports what it holds, for the replica's process to read.

vLLM's workers spin for a second after each ``collective_rpc``: asking every second kept one core
busy per worker of an idle replica. So the worker writes when something has changed, and the
replica's process reads. Neither ever waits for the other, and the last report outlives the worker.

The page is a ``memfd`` of the reader's, which the writer opens by path. It has two slots, written
in turn, each a header (number, length, checksum) and packed ``WorkerUsage``. The valid slot of the
higher number counts; a slot that is being written, or was when its writer died, is not valid.

Behind the slots each rank writes the time of its last progress, by the machine's monotonic clock,
which all processes share.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollout_side.engine import MemoryUsage
from weft_rl.ipc.bytes_codec import bytes_codec

#: Bytes of one value: some thousand spilled versions. Untouched memory takes none.
SLOT_BYTES = 4 * 2**20
_HEADER = struct.Struct("<QII")
_MOST_BYTES = SLOT_BYTES - _HEADER.size
_TIME = struct.Struct("<d")
#: Ranks that have a time of their own; further ranks share them.
_MAX_RANKS = 64
_TIMES = struct.Struct(f"<{_MAX_RANKS}d")
_TIMES_AT = 2 * SLOT_BYTES
_PAGE_BYTES = _TIMES_AT + _TIMES.size


@dataclass(frozen=True)
class WorkerUsage:
    """Versions and bytes that a worker holds."""

    memory: MemoryUsage
    ended_restore: str = ""
    """Transfer of the last restore, once that has ended."""


_NOTHING: Final = WorkerUsage(MemoryUsage(adapter_bytes=0, staging_bytes=0))
_CODEC: Final = bytes_codec(WorkerUsage)


class HoldingsPage:
    """Reader's end of the page, which it creates; usable from any thread."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("weft_holdings", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _PAGE_BYTES)
        self._map = mmap.mmap(self._fd, _PAGE_BYTES, prot=mmap.PROT_READ)
        self._lock = threading.Lock()
        self._seen = 0
        self._held = _NOTHING

    @property
    def path(self) -> str:
        """Path at which a process of the same user opens the page, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> WorkerUsage:
        """Return the last report; empty before the first. Cheap if nothing has changed."""
        with self._lock:
            if self._fd < 0:
                return self._held
            for number, slot in sorted(((self._number(i), i) for i in (0, 1)), reverse=True):
                if number <= self._seen:
                    break
                text = self._valid(slot, number)
                if text is not None:
                    self._seen, self._held = number, _CODEC.unpack(text)
                    break
            return self._held

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


class ProgressWriter:
    """Writer of one rank's times of progress; used by any of its threads."""

    def __init__(self, path: str, rank: int) -> None:
        self._map = _opened(path)
        self._at = _TIMES_AT + rank % _MAX_RANKS * _TIME.size

    def report_progress(self) -> None:
        """Report that the calling thread makes progress; at any rate."""
        _TIME.pack_into(self._map, self._at, time.monotonic())


class HoldingsWriter:
    """Writer's end of the page; one per page, used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self._map = _opened(path)
        self._number = 0

    def write(self, value: WorkerUsage) -> None:
        """Replace the value that can be read."""
        text = _CODEC.pack(value)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"a report of {len(text)} bytes does not fit into {_MOST_BYTES}")
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


_log = logging.getLogger(__name__)

# Interval at which changes by other threads than the engine's (staging, spilling) are noticed:
# short after recent activity.
_LOOK_SECONDS, _IDLE_LOOK_SECONDS = 0.1, 1.0
_ACTIVE_SECONDS = 5.0
_STOP_SECONDS = 2.0


class HoldingsReport:
    """Reporter of what a worker holds, whenever that has changed; usable from any thread. Writes at
    once when ``notify`` is called; its thread notices other changes."""

    def __init__(self, writer: HoldingsWriter, look: Callable[[], WorkerUsage]) -> None:
        self._writer, self._look = writer, look
        self._reported: WorkerUsage | None = None
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
        """Write what is held if it has changed, and check often for a while, since the caller may
        have begun something. Never raises."""
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
                if seen != self._reported:
                    self._writer.write(seen)
                    self._reported, self._active_at = seen, time.monotonic()
        except Exception:  # noqa: BLE001 (the edge of a thread, and of each worker method)
            _log.exception("the report of what this worker holds failed, and is tried again")

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._pause_seconds())
            self._wake.clear()
            self._write_change()

    def _pause_seconds(self) -> float:
        is_active = time.monotonic() - self._active_at < _ACTIVE_SECONDS
        return _LOOK_SECONDS if is_active else _IDLE_LOOK_SECONDS
