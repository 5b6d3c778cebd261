"""Codec of checkpoints and of the digests of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft_rl.contract.checkpoint import (
    MAX_FILES,
    Checkpoint,
    CheckpointState,
    FileDigest,
    StoredTensor,
)
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.v1 import registry_pb2, types_pb2

_SHA256_BYTES: Final = 32
_MAX_NAME_CHARS: Final = 255
_MAX_REASON_CHARS: Final = 500


def checkpoint_to_proto(value: Checkpoint) -> registry_pb2.Checkpoint:
    """Encode the checkpoint that a replica was started with, for ReportCheckpoint."""
    return registry_pb2.Checkpoint(
        state=registry_pb2.CheckpointState.ValueType(int(value.state)),
        digest=value.digest,
        files=files_to_proto(value.files),
        reason=value.reason,
    )


def files_to_proto(files: Iterable[FileDigest]) -> list[registry_pb2.CheckpointFile]:
    """Encode the files of a checkpoint."""
    return [registry_pb2.CheckpointFile(name=file.name, digest=file.digest) for file in files]


def checkpoint_from_proto(message: registry_pb2.Checkpoint) -> Checkpoint:
    """Decode the checkpoint that a replica was started with, from ReportCheckpoint.

    Raises:
        InvalidRequestError: A digest is not SHA-256, there are too many files, or no state.
    """
    try:
        state = CheckpointState(message.state)
    except ValueError:
        raise InvalidRequestError(f"{message.state} is not the state of a checkpoint") from None
    if len(message.files) > MAX_FILES:
        raise InvalidRequestError(
            f"{len(message.files)} files of a checkpoint; at most {MAX_FILES} are told"
        )
    digested = state is CheckpointState.DIGESTED
    digests = [message.digest, *(file.digest for file in message.files)] if digested else []
    if any(len(digest) != _SHA256_BYTES for digest in digests):
        raise InvalidRequestError("the digest of a checkpoint, or of a file of it, is not SHA-256")
    if not digested:
        return Checkpoint(state, reason=message.reason[:_MAX_REASON_CHARS])
    files = tuple(FileDigest(file.name[:_MAX_NAME_CHARS], file.digest) for file in message.files)
    return Checkpoint(state, message.digest, files)


def tensors_to_proto(tensors: Iterable[StoredTensor]) -> list[types_pb2.TensorDigest]:
    """Encode tensors and their digests."""
    return [
        types_pb2.TensorDigest(name=t.name, dtype=t.dtype, dims=t.shape, digest=t.digest)
        for t in tensors
    ]


def tensors_from_proto(messages: Iterable[types_pb2.TensorDigest]) -> list[StoredTensor]:
    """Decode tensors and their digests."""
    return [StoredTensor(m.name, m.dtype, tuple(m.dims), m.digest) for m in messages]
