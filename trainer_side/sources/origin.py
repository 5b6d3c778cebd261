"""Version of the base that an adapter was trained on, as far as its trainer can know."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.files import local_model_dir, weight_files
from weft_rl.checkpoints.reader import CheckpointReader
from weft_rl.containers.lru import LruMapping
from weft_rl.contract.checkpoint import Checkpoint, CheckpointState
from weft_rl.contract.names import provenance

# Checkpoints that are being read or known; a trainer has one, rarely two.
_MAX_CHECKPOINTS = 4
# A small checkpoint, or one that is remembered, is known within this: the first push of
# a publisher waits so long for it, none after it.
_GRACE_SECONDS = 0.25


@dataclass(frozen=True)
class AdapterBase:
    """Base of an adapter, as it was handed over."""

    module: torch.nn.Module | None = None
    """Base model itself; never read, compared by identity."""
    loaded_from: str = ""
    """Directory, or name in the Hugging Face cache, that it was loaded from."""
    revision: str | None = None

    @classmethod
    def of(cls, module: Any) -> AdapterBase:
        """Describe a base model; those of transformers know what they were loaded from."""
        config = getattr(module, "config", None)
        name = getattr(module, "name_or_path", "") or getattr(config, "_name_or_path", "")
        revision = getattr(config, "_commit_hash", None)
        return cls(module, name if isinstance(name, str) else "", revision)


@dataclass(frozen=True)
class TrainingBase:
    """Version of the base that an adapter was trained on."""

    version: int | None
    why: str = ""
    """Reason why it is not known, for messages."""

    def encode(self, rest: bytes) -> bytes:
        """Encode this origin, followed by ``rest``, for the other ranks."""
        return json.dumps([self.version, self.why]).encode() + b"\0" + rest

    @classmethod
    def decode(cls, data: bytes) -> tuple[TrainingBase, bytes]:
        """Decode the result of ``encode``."""
        head, _, rest = data.partition(b"\0")
        return cls(*json.loads(head)), rest

    def remarks(self, served_over: int, *, is_other: bool) -> tuple[str, ...]:
        """Return remarks on an adapter that is served over this version of the base.

        Args:
            is_other: True if that has another content than the base it was trained on.
        """
        if self.version is not None and not is_other:
            return ()
        said = provenance(self.version, served_over)
        return (f"{said}: {self.why}" if self.why else said,)


@dataclass
class KnownBases:
    """Knowledge of one publisher about its bases; used by one thread at a time.

    Args:
        cache: Cache of checkpoints' digests; by default the user's own.
    """

    cache: DigestCache | None = None
    _pushed: WeakKeyDictionary[torch.nn.Module, int] = field(default_factory=WeakKeyDictionary)
    _readers: LruMapping[tuple[str, str | None], CheckpointReader] = field(
        default_factory=lambda: LruMapping(_MAX_CHECKPOINTS, CheckpointReader.close)
    )

    def pushed(self, base: AdapterBase, version: int) -> None:
        """Note that a model is that version of the base now."""
        if base.module is not None:
            self._pushed[base.module] = version

    def of(
        self,
        base: AdapterBase,
        said: int | None,
        base_checkpoint: bytes,
        deadline: float,
        *,
        must_know: bool = False,
    ) -> TrainingBase:
        """Return the version that an adapter on this base was trained on.

        Blocks with ``must_know`` until its checkpoint is read; otherwise for a moment at most.

        Args:
            base: Base of the adapter.
            said: Version that the user gave; None if not given.
            base_checkpoint: Digest of the pool's base@0; empty where that is not known.
            deadline: ``time.monotonic()`` of the push.
            must_know: True if the push is refused unless the version is known.
        """
        if said is not None:
            return TrainingBase(said)
        if base.module is not None and base.module in self._pushed:
            return TrainingBase(self._pushed[base.module])
        if not base.loaded_from:
            return TrainingBase(
                None, "its base does not say what it was loaded from: say base='base@N'"
            )
        key = (base.loaded_from, base.revision)
        seconds = deadline - time.monotonic() if must_know else 0.0
        reader = self._readers.get(key)
        if reader is None:
            seconds = max(seconds, min(_GRACE_SECONDS, deadline - time.monotonic()))
            reader = CheckpointReader(lambda: _files(*key), self.cache)
            self._readers.put(key, reader)
        return _compare(base.loaded_from, reader.wait(seconds), base_checkpoint)

    def close(self) -> None:
        """Stop reading; block for the reads that are under way."""
        while self._readers:
            self._readers.drop_oldest()


def _compare(name: str, own: Checkpoint, base_checkpoint: bytes) -> TrainingBase:
    match own.state:
        case CheckpointState.READING:
            return TrainingBase(
                None, f"{name}, which its base was loaded from, is still being read"
            )
        case CheckpointState.NOT_COMPARED:
            return TrainingBase(None, f"{own.reason}: say base='base@N'")
    if not base_checkpoint:
        return TrainingBase(None, "no replica has told what base@0 is: say base='base@N'")
    if own.digest != base_checkpoint:
        return TrainingBase(None, f"its base was loaded from {name}, which is not what base@0 is")
    return TrainingBase(0)


def _files(name: str, revision: str | None) -> list[Path]:
    """Return the weight files of a checkpoint that a model was loaded from.

    Raises:
        LookupError: They are not on this machine, or not in safetensors files.
    """
    found = local_model_dir(name, revision)
    if found is None:
        raise LookupError(f"the files of {name} are not on this machine")
    files = weight_files(found)
    if not files:
        raise LookupError(f"there are no safetensors files in {found}")
    return files
