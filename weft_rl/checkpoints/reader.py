"""Contents of a checkpoint on disk: read once, on a thread of its own, and remembered.

A replica compares base@0 so, a trainer finds out which base an adapter was trained on.
Nothing that is in memory is read for it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from weft_rl.checkpoints.digest_cache import DigestCache, FileState
from weft_rl.contract.checkpoint import (
    MAX_FILES,
    READING,
    Checkpoint,
    CheckpointState,
    FileDigest,
    StoredTensor,
    checkpoint_digest,
    not_compared,
)
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.tensors import DataType
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest

# safetensors refuses longer headers itself.
_MAX_HEADER_BYTES = 100_000_000
# A read that stays in a core's cache while it is digested; whole rows of the digest.
_CHUNK_BYTES = 2**20


#: Function that is told how many further bytes were read.
OnRead = Callable[[int], None]


class DigestCancelledError(Exception):
    """End of a digest that nobody wants any more."""


def _ignore_read(num_bytes: int) -> None:
    pass


def digest_file(
    path: Path, stop: threading.Event, on_read: OnRead = _ignore_read
) -> tuple[StoredTensor, ...]:
    """Digest the tensors of a file, read once, in the order of its bytes; extra memory is 1 MiB.

    Blocks for as long as the disk takes; ``stop`` is looked at between reads.

    Raises:
        InvalidRequestError: Not a safetensors file, or cut short.
        OSError: It cannot be read.
        Stopped: ``stop`` was set.
    """
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        header, begin = _read_header(path, file.fileno())
        entries = sorted(
            (_entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"),
            key=lambda entry: entry[3],
        )
        return tuple(
            StoredTensor(
                name,
                dtype,
                shape,
                _digest(path, file.fileno(), begin + first, end - first, buffer, stop, on_read),
            )
            for name, dtype, shape, first, end in entries
        )


def _read_header(path: Path, fd: int) -> tuple[dict[str, Any], int]:
    """Read the header; return it and where the tensors begin."""
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= size <= min(_MAX_HEADER_BYTES, os.fstat(fd).st_size - 8):
        raise InvalidRequestError(f"{path} is not a safetensors file: its header has no end")
    try:
        header = json.loads(os.pread(fd, size, 8))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise InvalidRequestError(f"{path} is not a safetensors file: its header is no object")
    return header, 8 + size


def _entry(path: Path, name: str, entry: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    try:
        first, end = map(int, entry["data_offsets"])
        found = name, str(entry["dtype"]), tuple(map(int, entry["shape"])), first, end
    except (KeyError, TypeError, ValueError):
        raise InvalidRequestError(f"{path} has an invalid entry for {name[:80]!r}") from None
    if not 0 <= first <= end:
        raise InvalidRequestError(f"{path} has an invalid entry for {name[:80]!r}")
    return found


def _digest(
    path: Path,
    fd: int,
    begin: int,
    num_bytes: int,
    buffer: torch.Tensor,
    stop: threading.Event,
    on_read: OnRead,
) -> int:
    """Digest a range of a file, chunk by chunk: the digest is linear in the bytes."""
    view = memoryview(buffer.numpy().data)
    total = done = 0
    while done < num_bytes:
        if stop.is_set():
            raise DigestCancelledError
        want = min(len(view), num_bytes - done)
        got = 0
        while got < want:
            read = os.preadv(fd, [view[got:want]], begin + done + got)
            if not read:
                raise InvalidRequestError(f"{path} is cut short")
            got += read
        total += tensor_digest(buffer[:want], first_byte=done)
        done += want
        on_read(want)
    return total % 2**64


def digest_in_layout(manifest: Manifest, stored: Iterable[StoredTensor]) -> bytes | None:
    """Return the ``ContentDigest.value`` that a push of these tensors would have, without
    reading them; what the layout does not name is left out.

    Args:
        manifest: The layout.
        stored: Tensors of files, by the names of the layout.

    Returns:
        None where a tensor of the layout is not among them, or is of another type or shape.
    """
    by_name = {tensor.name: tensor for tensor in stored}
    digests = []
    for slot in manifest.tensors:
        found = by_name.get(slot.meta.name)
        if found is None or found.dims != slot.meta.shape:
            return None
        if DataType.of_safetensors(found.dtype) is not slot.meta.dtype:
            return None
        digests.append(found.digest)
    return content_digest(digests)


_log = logging.getLogger(__name__)
_LOWEST_PRIORITY = 19
_STOP_SECONDS = 5.0
#: Without anything from the disk, after which nobody waits for it; the reading goes on.
SILENT_SECONDS = 120.0


def read_checkpoint(files: Sequence[Path], cache: DigestCache, stop: threading.Event) -> Checkpoint:
    """Digest safetensors files, but for those that the cache knows; blocks for the disk.

    Raises:
        InvalidRequestError: A file is no safetensors file, or changed while it was read.
        OSError: A file cannot be read.
        Stopped: ``stop`` was set.
    """
    return _checkpoint_of(dict(read_tensors(files, cache, stop)))


def _checkpoint_of(found: Mapping[Path, tuple[StoredTensor, ...]]) -> Checkpoint:
    digests = [FileDigest(path.name, checkpoint_digest(own)) for path, own in found.items()]
    digests.sort(key=lambda file: file.name)
    whole = checkpoint_digest(chain.from_iterable(found.values()))
    return Checkpoint(CheckpointState.DIGESTED, whole, tuple(digests[:MAX_FILES]))


def read_tensors(
    files: Iterable[Path],
    cache: DigestCache,
    stop: threading.Event | None = None,
    on_read: OnRead = _ignore_read,
) -> Iterator[tuple[Path, tuple[StoredTensor, ...]]]:
    """Yield each file with the tensors that it holds; blocks, and raises, as
    ``read_checkpoint``."""
    stop = stop or threading.Event()
    for path in files:
        yield path, _digest_cached(path, cache, stop, on_read)


def _digest_cached(
    path: Path, cache: DigestCache, stop: threading.Event, on_read: OnRead
) -> tuple[StoredTensor, ...]:
    before = FileState.of(path)
    known = cache.get(before)
    if known is not None:
        return known
    found = digest_file(path, stop, on_read)
    if FileState.of(path) != before:
        raise InvalidRequestError(f"{path} changed while it was read")
    cache.put(before, found)
    return found


class _StopEvent(threading.Event):
    """Order to stop reading. It is asked for between reads, which shows that they go on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_at = time.monotonic()

    def is_set(self) -> bool:
        self.asked_at = time.monotonic()
        return super().is_set()


class CheckpointReader:
    """Reader of a checkpoint on a thread of its own, beside everything else that a process does.

    Args:
        find: Lists the files; called on the reader's thread. ``LookupError`` says that
            there are none that could be compared, and why.
        cache: Cache of digests; by default the user's own.
    """

    def __init__(
        self, find: Callable[[], Sequence[Path]], cache: DigestCache | None = None
    ) -> None:
        self._find, self._cache = find, cache or DigestCache.of_user()
        self._stop, self._done = _StopEvent(), threading.Event()
        self._checkpoint = READING
        self._tensors: tuple[StoredTensor, ...] = ()
        #: Bytes of its files, and how many of them are read; 0 as long as nobody knows.
        self.total_bytes = self.read_bytes = 0
        self._thread = threading.Thread(target=self._run, name="weft-checkpoint", daemon=True)
        self._thread.start()

    @property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint as far as it is known now; does not block. Files of which the disk gives
        nothing are compared with nothing until it does."""
        silent_seconds = time.monotonic() - self._stop.asked_at
        if self._checkpoint == READING and silent_seconds >= SILENT_SECONDS:
            return not_compared(
                f"its files cannot be read: the disk has not answered for {SILENT_SECONDS:g} s"
            )
        return self._checkpoint

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Tensors that its files hold, once ``checkpoint`` is DIGESTED."""
        return self._tensors

    def wait(self, timeout_seconds: float) -> Checkpoint:
        """Block until the checkpoint is known, or the time is up; return it."""
        self._done.wait(max(0.0, timeout_seconds))
        return self.checkpoint

    def _count(self, num_bytes: int) -> None:
        self.read_bytes += num_bytes

    def close(self) -> None:
        """Stop reading; blocks for the read that is under way."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        # Of this thread alone: the engine that warms up meanwhile, or the training, goes first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        began = time.monotonic()
        try:
            files = self._find()
            self.total_bytes = sum(path.stat().st_size for path in files)
            tensors = dict(read_tensors(files, self._cache, self._stop, self._count))
            self._tensors = tuple(chain.from_iterable(tensors.values()))
            found = _checkpoint_of(tensors)
            _log.info(
                "digested checkpoint %s: %d files, %d bytes in %.3f s",
                found.digest.hex()[:12],
                len(files),
                self.total_bytes,
                time.monotonic() - began,
            )
        except LookupError as why:
            found = not_compared(str(why.args[0]) if why.args else "no files")
        except DigestCancelledError:
            found = not_compared("reading was stopped")
        except Exception as error:  # noqa: BLE001 (whatever is wrong with files, serving continues)
            _log.warning("the checkpoint cannot be compared: %s", error)
            found = not_compared(f"its files cannot be read: {error}"[:500])
        self._checkpoint = found
        self._done.set()
