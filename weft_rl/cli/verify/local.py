"""Tensors of a checkpoint or of a PEFT adapter on this machine, digested."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer_side.sources.adapter_source import config_in_names
from trainer_side.sources.file_source import base_of_dir, is_adapter_dir
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.files import local_model_dir, read_json, read_text, weight_files
from weft_rl.checkpoints.reader import read_tensors
from weft_rl.contract.adapter_config import MAX_CONFIG_BYTES
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.tensors import DataType
from weft_rl.transport.digests.wsum64 import tensor_digest

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class LocalTensors:
    """The tensors of some files, which are read once: their digests are remembered."""

    path: Path
    tensors: tuple[StoredTensor, ...]
    tied: frozenset[str] = frozenset()
    """The output head, where the config ties it to the embedding."""
    config: dict[str, Any] = field(default_factory=dict)
    """PEFT's config of an adapter, with names in place of patterns."""
    _files: dict[str, Path] = field(default_factory=dict)

    def cast_digest(self, name: str, dtype: DataType) -> int:
        """Compute the digest of a tensor as a push would cast it; see ``tensors.Cast``."""
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        cast = tensor.to(getattr(torch, dtype.torch_name)).contiguous()
        return tensor_digest(cast.view(-1).view(torch.uint8))


def read_checkpoint(path: Path) -> LocalTensors:
    """Read a checkpoint of a whole model: a directory, or one safetensors file.

    Raises:
        InvalidRequestError: There is none, or it cannot be read.
    """
    if path.is_dir() and is_adapter_dir(path):
        raise InvalidRequestError(f"{path} is a PEFT adapter: give its name as --policy")
    config = path / "config.json"
    settings = read_json(config) if path.is_dir() and config.is_file() else {}
    tied = frozenset({_HEAD} if settings.get("tie_word_embeddings") else ())
    return _read(path, weight_files(path) if path.is_dir() else [path], tied=tied)


def read_adapter(path: Path) -> LocalTensors:
    """Read a PEFT adapter's directory.

    Raises:
        InvalidRequestError: It is none, or cannot be read.
    """
    if not is_adapter_dir(path):
        raise InvalidRequestError(
            f"{path} is not a PEFT adapter, which has an adapter_config.json; for a checkpoint of "
            "the whole model say --policy base"
        )
    return _read(path, [path / _ADAPTER_WEIGHTS])


def base_dir_of(adapter: Path) -> tuple[Path | None, str]:
    """Find where the base that an adapter was trained on lies here, None if it does not; return
    also what its config calls it."""
    base = base_of_dir(adapter)
    return (local_model_dir(base.loaded_from, base.revision) if base.loaded_from else None), (
        base.loaded_from
    )


def _read(path: Path, files: list[Path], *, tied: frozenset[str] = frozenset()) -> LocalTensors:
    if not files or not all(file.is_file() for file in files):
        missing = next((file.name for file in files if not file.is_file()), "*.safetensors")
        raise InvalidRequestError(f"{path} holds no {missing}")
    tensors: dict[str, StoredTensor] = {}
    places: dict[str, Path] = {}
    try:
        for file, found in read_tensors(files, DigestCache.of_user()):
            tensors |= {tensor.name: tensor for tensor in found}
            places |= {tensor.name: file for tensor in found}
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
    config: dict[str, Any] = {}
    if is_adapter_dir(path):
        text = read_text(path / "adapter_config.json", MAX_CONFIG_BYTES)
        config = json.loads(config_in_names(text, tensors, None))
    return LocalTensors(path, tuple(tensors.values()), tied, config, places)


#: What of PEFT's config changes an answer, beside the tensors.
_SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


def differing_settings(served_json: str, local: LocalTensors) -> list[str]:
    """List the settings that differ and change what the tensors of an adapter mean, for
    messages."""
    served = json.loads(served_json)
    return [
        f"{name} is {served.get(name) or None}, here {local.config.get(name) or None}"
        for name in _SCALING
        if (served.get(name) or None) != (local.config.get(name) or None)
    ]
