"""Version of the base that an adapter was trained on, as far as its trainer can know."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from trainer_side.params.params import TensorStates
from trainer_side.sources.base_content import BaseContent, PushedContent
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.files import local_model_dir, weight_files
from weft_rl.checkpoints.reader import CheckpointReader
from weft_rl.containers import LruMapping
from weft_rl.contract.checkpoint import (
    Checkpoint,
    CheckpointState,
    StoredTensor,
    checkpoint_digest,
)
from weft_rl.contract.names import provenance
from weft_rl.contract.tensors import DataType

# Checkpoints that are being read or known; a trainer has one, rarely two.
_MAX_CHECKPOINTS = 4
# Contents of versions that were pushed here, which an adapter's base may hold.
_MAX_CONTENTS = 8
# So often a push that waits for a checkpoint says how far its reading is.
_REPORT_SECONDS = 0.2
# Name of a base that is read in this process's memory.
_LIVE_BASE = "the base model"

#: Function that is told what is read, the bytes that are, and the bytes in all.
OnReading = Callable[[str, int, int], None]


def _ignore(name: str, read_bytes: int, total_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class AdapterBase:
    """Base of an adapter, as it was handed over."""

    module: torch.nn.Module | None = None
    """Base model itself, by which what is known of it is kept."""
    loaded_from: str = ""
    """Directory, or name in the Hugging Face cache, that it was loaded from."""
    revision: str | None = None
    states: TensorStates | None = None
    """States of its tensors as it was handed over."""
    content: BaseContent | None = None
    """Its content; None where it does not lie whole in this process."""

    def has_states(self, states: TensorStates) -> bool:
        """Return whether its tensors are in these states. Where their content cannot be compared,
        frameworks may have moved them: their elements count."""
        if self.states is None:
            return False
        if self.content is not None:
            return self.states == states
        return self.states.has_elements_of(states)

    @classmethod
    def of(
        cls, module: Any, states: TensorStates | None = None, content: BaseContent | None = None
    ) -> AdapterBase:
        """Describe a base model; those of transformers know what they were loaded from."""
        config = getattr(module, "config", None)
        name = getattr(module, "name_or_path", "") or getattr(config, "_name_or_path", "")
        revision = getattr(config, "_commit_hash", None)
        return cls(module, name if isinstance(name, str) else "", revision, states, content)


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
class _KnownBase:
    """Knowledge about one module, while its tensors stay in these states."""

    states: TensorStates
    version: int | None = None
    """Version of the base that holds the same; None if none is known."""
    former: int | None = None
    """Version that it was before it was changed to be in these states."""
    digests: dict[frozenset[tuple[str, DataType]], dict[str, StoredTensor]] = field(
        default_factory=dict
    )
    """Digests of its tensors, by those dtypes that are not their own."""

    def digested(
        self, base: AdapterBase, dtypes: Mapping[str, DataType]
    ) -> Mapping[str, StoredTensor]:
        """Return the digests of the base's tensors as they are in these dtypes; read once. Empty
        where they cannot be read, or are not in these states any more."""
        own = self._read(base, {})
        others = {
            name: dtype
            for name, dtype in dtypes.items()
            if name in own and own[name].dtype != dtype.safetensors_name
        }
        return self._read(base, others) if others else own

    def can_be_read(self, base: AdapterBase) -> bool:
        """Return whether its tensors can be digested here: not on the meta device, say."""
        return bool(self.digested(base, {})) or (
            base.content is not None and frozenset() not in self.digests
        )

    def _read(self, base: AdapterBase, dtypes: Mapping[str, DataType]) -> dict[str, StoredTensor]:
        key = frozenset(dtypes.items())
        if base.content is not None and key not in self.digests:
            found = base.content.digests(dtypes)
            if self.states.moved(base.content.watcher.states()):
                return {}
            self.digests[key] = found
        return self.digests.get(key, {})


@dataclass
class KnownBases:
    """Knowledge of one publisher about its bases; used by one thread at a time.

    A base is what its tensors hold now, whatever it was loaded from or pushed as before.

    Args:
        cache: Cache of checkpoints' digests; by default the user's own.
    """

    cache: DigestCache | None = None
    _known: WeakKeyDictionary[torch.nn.Module, _KnownBase] = field(
        default_factory=WeakKeyDictionary
    )
    _contents: LruMapping[int, PushedContent] = field(
        default_factory=lambda: LruMapping(_MAX_CONTENTS)
    )
    _readers: LruMapping[tuple[str, str | None], CheckpointReader] = field(
        default_factory=lambda: LruMapping(_MAX_CHECKPOINTS, CheckpointReader.close)
    )

    def pushed(self, base: AdapterBase, version: int, content: PushedContent | None = None) -> None:
        """Note the content of a version of the base, and that a model held it when it was pushed;
        a base without a module is that of none."""
        if content is not None:
            self._contents.put(version, content)
        if base.module is not None and base.states is not None:
            self._known[base.module] = _KnownBase(base.states, version)

    def _of_module(self, base: AdapterBase) -> _KnownBase | None:
        """Return what is known of a base while its tensors are in their states."""
        if base.module is None or base.states is None:
            return None
        known = self._known.get(base.module)
        if known is None or not base.has_states(known.states):
            former = (
                None
                if known is None
                else known.version
                if known.version is not None
                else known.former
            )
            known = self._known[base.module] = _KnownBase(base.states, former=former)
        return known

    def _by_content(
        self, base: AdapterBase, known: _KnownBase, base_checkpoint: bytes
    ) -> int | None:
        """Return the version that holds what a base holds now, of those that were pushed here and
        base@0; None where it is none of them."""
        if known.version is None and base.content is not None:
            for version, pushed in reversed(self._contents.items()):
                if pushed.equals(known.digested(base, pushed.dtypes)):
                    known.version = version
                    return version
            if base_checkpoint:
                own = known.digested(base, {}).values()
                return 0 if checkpoint_digest(own) == base_checkpoint else None
        return known.version

    def of(
        self,
        base: AdapterBase,
        said: int | None,
        base_checkpoint: bytes,
        deadline: float,
        *,
        must_know: bool = False,
        may_wait: bool = True,
        on_reading: OnReading = _ignore,
    ) -> TrainingBase:
        """Return the version that an adapter on this base was trained on.

        Blocks until its checkpoint is read, where the pool has told what it is to be compared with:
        with ``must_know`` until the deadline, otherwise for half of the time until then, since a
        push follows. What was read is kept for later pushes, and on disk for later processes.

        Args:
            base: Base of the adapter.
            said: Version that the user gave; None if not given.
            base_checkpoint: Digest of the pool's base@0; empty where that is not known.
            deadline: ``time.monotonic()`` of the push.
            must_know: True if the push is refused unless the version is known.
            may_wait: False if nobody compares the version: then nothing is waited for.
            on_reading: Called now and then while it blocks: for its checkpoint, or for the base
                itself.
        """
        if said is not None:
            return TrainingBase(said)
        if base.content is not None:
            content = replace(base.content, on_reading=partial(on_reading, _LIVE_BASE))
            base = replace(base, content=content)
        known = self._of_module(base)
        if known is not None:
            version = self._by_content(base, known, base_checkpoint)
            if version is not None:
                return TrainingBase(version)
            if known.former is not None:
                return TrainingBase(
                    None,
                    f"its base was changed since it was base@{known.former}: push it, or say "
                    "base='base@N'",
                )
        if not base.loaded_from:
            return TrainingBase(
                None, "its base does not say what it was loaded from: say base='base@N'"
            )
        key = (base.loaded_from, base.revision)
        reader = self._readers.get(key)
        if reader is None:
            reader = CheckpointReader(lambda: _files(*key), self.cache)
            self._readers.put(key, reader)
        seconds = (deadline - time.monotonic()) / (1 if must_know else 2)
        if not must_know and not (may_wait and base_checkpoint):
            seconds = 0.0
        own = _read(reader, base.loaded_from, time.monotonic() + seconds, on_reading)
        found = _compare(base.loaded_from, own, base_checkpoint)
        if found.version is None or known is None or not known.can_be_read(base):
            return found
        if differing := _differing(base, known, reader.tensors):
            return TrainingBase(
                None,
                f"its base was loaded from {base.loaded_from}, but was changed since: "
                f"{differing} is not what is there; say base='base@N'",
            )
        known.version = found.version
        return found

    def close(self) -> None:
        """Stop reading; block for the reads that are under way."""
        while self._readers:
            self._readers.drop_oldest()


def _read(
    reader: CheckpointReader, name: str, deadline: float, on_reading: OnReading
) -> Checkpoint:
    """Return a checkpoint once it is known, or as far as it is at the deadline; blocks."""
    while (own := reader.checkpoint).state is CheckpointState.READING:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        reader.wait(min(left, _REPORT_SECONDS))
        on_reading(name, reader.read_bytes, reader.total_bytes)
    return own


def _differing(base: AdapterBase, known: _KnownBase, stored: Iterable[StoredTensor]) -> str:
    """Return the name of a tensor that is not what the checkpoint of its base holds; empty if there
    is none. A tensor of fewer bits than the file's is not compared."""
    by_name = {tensor.name: tensor for tensor in stored}
    own = known.digested(base, {})
    narrower = {
        name: dtype
        for name, tensor in own.items()
        if name in by_name
        and (dtype := DataType.of_safetensors(by_name[name].dtype)) is not None
        and dtype.is_float
        and dtype.itemsize_bytes < _itemsize(tensor)
    }
    own = known.digested(base, narrower)
    if not own:
        return "what it holds now"
    for name, tensor in own.items():
        other = by_name.get(name)
        is_alike = other is not None and (other.dtype, other.dims) == (tensor.dtype, tensor.dims)
        if other is not None and is_alike and other.digest != tensor.digest:
            return repr(name)
    return ""


def _itemsize(tensor: StoredTensor) -> int:
    dtype = DataType.of_safetensors(tensor.dtype)
    return 0 if dtype is None else dtype.itemsize_bytes


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
