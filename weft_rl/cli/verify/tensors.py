"""Tensors of local files, digested, and their comparison with those that replicas serve."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from trainer_side.params.names import saved_names
from trainer_side.sources.adapter_source import config_in_names
from trainer_side.sources.file_source import base_of_dir, is_adapter_dir
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.files import (
    WeightFiles,
    local_model_dir,
    model_files,
    read_json,
    read_text,
)
from weft_rl.checkpoints.reader import read_tensors
from weft_rl.contract.adapter_config import MAX_CONFIG_BYTES
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.draft_layers import DRAFT_MODEL, draft_prefixes, is_draft, num_layers_of
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.tensors import DataType, shape_text
from weft_rl.progress import ShownProgress
from weft_rl.transport.digests.wsum64 import tensor_digest

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HEAD = "lm_head.weight"
#: Settings of PEFT's config that change an adapter's answers, beside the tensors.
_SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")

# -- local files -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalTensors:
    """Tensors of files on this machine, with their digests."""

    path: Path
    tensors: tuple[StoredTensor, ...]
    tied: frozenset[str] = frozenset()
    """Name of the output head, if it is a copy of the embedding, or the config says so."""
    num_layers: int = 0
    """Layers that the config says that the model has; 0 where that is not known."""
    config: dict[str, Any] = field(default_factory=dict)
    """PEFT's config of an adapter, its patterns replaced by module names."""
    _files: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """File of each tensor, and its name there."""

    def optional(self, served: Iterable[StoredTensor]) -> frozenset[str]:
        """Return the names that one side may lack: a head that is a copy, and layers for drafts."""
        ours, theirs = [t.name for t in self.tensors], [t.name for t in served]
        # Served layers above the config's may be those of another model.
        drafts = draft_prefixes(ours, self.num_layers) + draft_prefixes(theirs, 0) + (DRAFT_MODEL,)
        return self.tied | {name for name in (*ours, *theirs) if is_draft(name, drafts)}

    def cast_digest(self, name: str, dtype: DataType) -> int:
        """Digest a tensor after the cast that a push would do."""
        from safetensors import safe_open

        path, own = self._files[name]
        with safe_open(path, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(own)
        cast = tensor.to(getattr(torch, dtype.torch_name)).contiguous()
        return tensor_digest(cast.view(-1).view(torch.uint8))


def read_checkpoint(path: Path, progress: ShownProgress) -> LocalTensors:
    """Read a checkpoint of a whole model: a directory, or one safetensors file.

    Raises:
        InvalidRequestError: It is missing or cannot be read.
    """
    if path.is_dir() and is_adapter_dir(path):
        raise InvalidRequestError(f"{path} is a PEFT adapter: give its name as --policy")
    config = path / "config.json"
    settings = read_json(config) if path.is_dir() and config.is_file() else {}
    read = _read(path, model_files(path), progress)
    head = next((tensor for tensor in read.tensors if tensor.name == _HEAD), None)
    others = (tensor for tensor in read.tensors if tensor.name != _HEAD)
    is_copy = any(replace(tensor, name=_HEAD) == head for tensor in others)
    tied = frozenset({_HEAD} if is_copy or settings.get("tie_word_embeddings") else ())
    return replace(read, tied=tied, num_layers=num_layers_of(settings))


def read_adapter(path: Path, progress: ShownProgress) -> LocalTensors:
    """Read a PEFT adapter's directory.

    Raises:
        InvalidRequestError: It is not one, or cannot be read.
    """
    if not is_adapter_dir(path):
        raise InvalidRequestError(
            f"{path} is not a PEFT adapter, which has an adapter_config.json; for a checkpoint of "
            "the whole model say --policy base"
        )
    if not (path / _ADAPTER_WEIGHTS).is_file():
        raise InvalidRequestError(f"{path} holds no {_ADAPTER_WEIGHTS}")
    return _read(path, model_files(path / _ADAPTER_WEIGHTS), progress)


def base_dir_of(adapter: Path) -> tuple[Path | None, str]:
    """Return the local directory of an adapter's base, None if it is not here, and the name that
    the adapter's config gives it."""
    base = base_of_dir(adapter)
    return (local_model_dir(base.loaded_from, base.revision) if base.loaded_from else None), (
        base.loaded_from
    )


def _read(path: Path, weights: WeightFiles, progress: ShownProgress) -> LocalTensors:
    held: dict[Path, dict[str, StoredTensor]] = {}
    known_bytes = read_bytes = 0

    def on_read(num_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes += num_bytes
        progress.done(known_bytes + read_bytes)

    try:
        sizes = (file.stat().st_size for file in weights.files)
        progress.step(f"reading {path.name}", sum(sizes))
        for file, found in read_tensors(weights.files, DigestCache.of_user(), on_read=on_read):
            known_bytes, read_bytes = known_bytes + file.stat().st_size, 0
            progress.done(known_bytes)
            held[file] = {tensor.name: tensor for tensor in found}
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
    places = weights.place(held.items())
    names = saved_names(places)
    tensors = {own: replace(held[places[name]][name], name=own) for name, own in names.items()}
    config: dict[str, Any] = {}
    if is_adapter_dir(path):
        text = read_text(path / "adapter_config.json", MAX_CONFIG_BYTES)
        config = json.loads(config_in_names(text, tensors, None))
    files = {own: (places[name], name) for name, own in names.items()}
    return LocalTensors(path, tuple(tensors.values()), config=config, _files=files)


def differing_settings(served_json: str, local: LocalTensors) -> list[str]:
    """Describe the settings of an adapter that differ and change its answers."""
    served = json.loads(served_json)
    return [
        f"{name} is {served.get(name) or None}, here {local.config.get(name) or None}"
        for name in _SCALING
        if (served.get(name) or None) != (local.config.get(name) or None)
    ]


# -- comparison --------------------------------------------------------------------------------


class Verdict(StrEnum):
    """Result for one tensor; the first two are fine."""

    EQUAL = "equal"
    EQUAL_AFTER_CAST = "equal after a cast"
    DIFFERENT = "different"
    MISSING = "missing"
    """Local tensor that is not served."""
    EXTRA = "extra"
    """Served tensor that the local files lack."""


FINE = frozenset({Verdict.EQUAL, Verdict.EQUAL_AFTER_CAST})


@dataclass(frozen=True)
class ComparedTensor:
    """One tensor and its verdict."""

    name: str
    verdict: Verdict
    says: str = ""
    """Description of the difference."""


#: Function that digests a local tensor after a cast to another type of floats.
Cast = Callable[[str, DataType], int]


def compare(
    served: Iterable[StoredTensor],
    local: Iterable[StoredTensor],
    cast: Cast,
    optional: Collection[str] = (),
) -> list[ComparedTensor]:
    """Compare every tensor of either side, by name.

    Args:
        served: Tensors that a replica holds.
        local: Tensors of the local files.
        cast: Called where only the types of floats differ.
        optional: Names of tensors that one side may lack.
    """
    theirs, ours = ({t.name: t for t in tensors} for tensors in (served, local))
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        if name in optional and (name not in theirs or name not in ours):
            continue
        if name not in theirs:
            found.append(ComparedTensor(name, Verdict.MISSING, f"here {_text(ours[name])}"))
        elif name not in ours:
            found.append(ComparedTensor(name, Verdict.EXTRA, f"served {_text(theirs[name])}"))
        else:
            found.append(_compare_one(theirs[name], ours[name], cast))
    return found


def _compare_one(served: StoredTensor, local: StoredTensor, cast: Cast) -> ComparedTensor:
    name = served.name
    if (served.dtype, served.dims) == (local.dtype, local.dims):
        if served.digest == local.digest:
            return ComparedTensor(name, Verdict.EQUAL)
        values = f"{_text(served)} of other values: {served.digest:016x}, here {local.digest:016x}"
        return ComparedTensor(name, Verdict.DIFFERENT, values)
    both = f"served {_text(served)}, here {_text(local)}"
    wanted, given = (DataType.of_safetensors(t.dtype) for t in (served, local))
    is_cast = wanted is not None and given is not None and wanted.is_float and given.is_float
    if served.dims != local.dims or not is_cast:
        return ComparedTensor(name, Verdict.DIFFERENT, both)
    assert wanted is not None
    if cast(name, wanted) == served.digest:
        return ComparedTensor(name, Verdict.EQUAL_AFTER_CAST, both)
    return ComparedTensor(name, Verdict.DIFFERENT, f"{both}, of other values after a cast")


def counts(found: Iterable[ComparedTensor]) -> dict[str, int]:
    """Count the tensors of each verdict, leaving out verdicts without any."""
    counted = Counter(compared.verdict for compared in found)
    return {verdict.value: counted[verdict] for verdict in Verdict if counted[verdict]}


def _text(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} ({shape_text(tensor.dims)})"
