"""The tensors of a safetensors file, digested as they are stored, without a model."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch

from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.transport.digests.wsum64 import tensor_digest

# safetensors refuses longer headers itself.
_MAX_HEADER_BYTES = 100_000_000
# A read that stays in a core's cache while it is digested; whole rows of the digest.
_CHUNK_BYTES = 2**20


class Stopped(Exception):
    """End of a digest that nobody wants any more."""


def digest_file(path: Path, stop: threading.Event) -> tuple[StoredTensor, ...]:
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
                _digest(path, file.fileno(), begin + first, end - first, buffer, stop),
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
        raise InvalidRequestError(f"{path} describes {name[:80]!r} wrongly") from None
    if not 0 <= first <= end:
        raise InvalidRequestError(f"{path} describes {name[:80]!r} wrongly")
    return found


def _digest(
    path: Path, fd: int, begin: int, num_bytes: int, buffer: torch.Tensor, stop: threading.Event
) -> int:
    """Digest a range of a file, chunk by chunk: the digest is linear in the bytes."""
    view = memoryview(buffer.numpy().data)
    total = done = 0
    while done < num_bytes:
        if stop.is_set():
            raise Stopped
        want = min(len(view), num_bytes - done)
        got = 0
        while got < want:
            read = os.preadv(fd, [view[got:want]], begin + done + got)
            if not read:
                raise InvalidRequestError(f"{path} is cut short")
            got += read
        total += tensor_digest(buffer[:want], first_byte=done)
        done += want
    return total % 2**64
