"""Checkpoint that an engine was started with, which is base@0, as a value."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from weft_rl.contract.tensors import shape_text

#: Files of a checkpoint that are told; one of more is compared all the same.
MAX_FILES = 256


class CheckpointState(enum.IntEnum):
    """State of a checkpoint's comparison, as in ``weft.v1.CheckpointState``."""

    READING = 1
    """Files that are still being read: their contents are not known yet."""
    DIGESTED = 2
    NOT_COMPARED = 3
    """Lack of files that could be compared; ``Checkpoint.reason`` says why."""
    DUMMY = 4
    """Weights that mean nothing, which the engine was started with."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor as a safetensors file holds it."""

    name: str
    dtype: str
    """The element type as safetensors names it (``BF16``)."""
    dims: tuple[int, ...]
    digest: int
    """Result of ``weft_rl.transport.digests.wsum64.tensor_digest`` for its bytes."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """File of a checkpoint, for messages: checkpoints are compared by their own digest."""

    name: str
    digest: bytes


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of an engine; ``weft.v1.Checkpoint`` describes each field."""

    state: CheckpointState
    digest: bytes = b""
    files: tuple[FileDigest, ...] = ()
    reason: str = ""


def not_compared(reason: str) -> Checkpoint:
    """Return a checkpoint that nobody can compare."""
    return Checkpoint(CheckpointState.NOT_COMPARED, reason=reason)


READING = Checkpoint(CheckpointState.READING)
DUMMY = Checkpoint(CheckpointState.DUMMY)


def checkpoint_digest(tensors: Iterable[StoredTensor]) -> bytes:
    """Compute the SHA-256 over tensors, whatever their order and however they are cut into files.

    Source: protos/weft/v1/registry.proto, Checkpoint.digest.
    """
    lines = sorted(
        f"{tensor.name} {tensor.dtype} {shape_text(tensor.dims)} {tensor.digest:016x}\n"
        for tensor in tensors
    )
    return hashlib.sha256("".join(lines).encode()).digest()


def differing_files(ours: Checkpoint, theirs: tuple[FileDigest, ...]) -> list[str]:
    """List the names of our files that the others lack or hold something else in, and of theirs
    that we lack; sorted. Empty where the same files hold the same."""
    mine = {file.name: file.digest for file in ours.files}
    other = {file.name: file.digest for file in theirs}
    return sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
