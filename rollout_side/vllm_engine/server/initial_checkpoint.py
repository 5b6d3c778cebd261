"""Checkpoint that an engine was started with, read while the engine warms up."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollout_side.waits import answer_within
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.files import local_model_dir, weight_files
from weft_rl.checkpoints.reader import CheckpointReader, read_tensors
from weft_rl.contract.checkpoint import (
    DUMMY,
    READING,
    Checkpoint,
    CheckpointState,
    StoredTensor,
    checkpoint_digest,
    not_compared,
)
from weft_rl.contract.errors import NotReadyError, TransferTimeoutError, WeftError

# Load formats of vLLM that read a model's safetensors files unchanged.
_FORMATS = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "runai_streamer",
        "bitsandbytes",
    }
)


_LOOK_SECONDS = 0.25
# Deadline of digesting all files; most digests are cached.
_FILES_SECONDS = 600.0


class InitialCheckpoint:
    """Checkpoint that an engine was started with, read from its files only."""

    def __init__(
        self, load_format: str, cache: DigestCache | None = None, *, download_dir: str | None = None
    ) -> None:
        self._cache, self._download_dir = cache, download_dir
        self._dir: Path | None = None
        self._reader: CheckpointReader | None = None
        self._known: Checkpoint | None = None
        if load_format == "dummy":
            self._known = DUMMY
        elif load_format not in _FORMATS:
            self._known = not_compared(f"--load-format {load_format} reads no safetensors files")

    @property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint as it is known now; does not block."""
        if self._known is not None:
            return self._known
        return self._reader.checkpoint if self._reader else READING

    def read(self, model: str, revision: str | None, *, is_loaded: bool = False) -> None:
        """Begin to read a model's files, if they exist and were not read already.

        Args:
            model: Directory or name, as vLLM's argument, or as vLLM resolved it.
            revision: Revision, where the model is given by name.
            is_loaded: Whether the engine has loaded it: files that are missing then stay missing.
        """
        if self._known is not None:
            return
        found = local_model_dir(model, revision, self._download_dir)
        if found is None:
            if is_loaded:
                self.close()
                self._known = not_compared(f"the files of {model} are not on this machine")
            return
        failed = self.checkpoint.state is CheckpointState.NOT_COMPARED
        if found != self._dir or failed:  # the download may not have been complete
            self.close()
            self._dir = found
            self._reader = CheckpointReader(lambda: _files(found), self._cache)

    def tensors(self) -> list[StoredTensor]:
        """Return the tensors of its files, with cached digests. Blocks for the disk if digests are
        not cached."""
        known = self.checkpoint
        if known.state is not CheckpointState.DIGESTED or self._dir is None:
            why = {
                CheckpointState.READING: "its files are being read; try again later",
                CheckpointState.DUMMY: "the replica was started with dummy weights",
            }.get(known.state, known.reason)
            raise NotReadyError(f"base@0 cannot be compared here: {why}", reason="NOT_RETAINED")
        try:
            files = _files(self._dir)
            cache = self._cache or DigestCache.of_user()
            return [tensor for _, found in read_tensors(files, cache) for tensor in found]
        except (LookupError, OSError, WeftError) as error:
            raise NotReadyError(
                f"the files of base@0 cannot be read: {error}", reason="NOT_RETAINED"
            ) from error

    @property
    def known_tensors(self) -> tuple[StoredTensor, ...]:
        """Tensors that its files held when they were read. Empty until then, and if they cannot be
        compared. Does not block."""
        return self._reader.tensors if self._reader is not None else ()

    async def read_tensors(self) -> tuple[StoredTensor, ...]:
        """Wait until its files are read; return their tensors, none if they cannot be compared."""
        while self.checkpoint.state is CheckpointState.READING:
            await asyncio.sleep(_LOOK_SECONDS)
        return self.known_tensors

    async def check_unchanged(self) -> None:
        """Check that the files are still what the engine was started with. Called before they are
        loaded again. Succeeds where they cannot be compared."""
        known = self.checkpoint
        if known.state is not CheckpointState.DIGESTED:
            return
        try:
            tensors = await answer_within(
                _FILES_SECONDS, f"the checkpoint in {self._dir}", self.tensors
            )
        except TransferTimeoutError as error:
            raise NotReadyError(error.message, reason="NOT_RETAINED") from error
        if checkpoint_digest(tensors) != known.digest:
            raise NotReadyError(
                f"the files in {self._dir} have changed since the replica was started",
                reason="NOT_RETAINED",
            )

    def close(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.close()


def _files(model_dir: Path) -> list[Path]:
    files = weight_files(model_dir)
    if not files:
        raise LookupError(f"there are no safetensors files in {model_dir}")
    return files
