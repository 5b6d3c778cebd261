"""Tensors in safetensors files, read one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer_side.params.names import saved_names
from trainer_side.params.params import copy_into
from trainer_side.sources.adapter_source import check_config, config_in_names, config_of_dir
from trainer_side.sources.origin import AdapterBase
from trainer_side.sources.source import Adapter, CastRule, Source, make_metas, tensor_source
from trainer_side.sources.tied_heads import IsBase, are_equal, copied_heads, no_copy
from weft_rl.checkpoints.digest_cache import FileState
from weft_rl.checkpoints.files import INDEX, model_files, read_json, read_text
from weft_rl.contract.adapter_config import MAX_CONFIG_BYTES
from weft_rl.contract.draft_layers import draft_prefixes, is_draft, num_layers_of
from weft_rl.contract.errors import InvalidManifestError, InvalidRequestError
from weft_rl.contract.tensors import DataType, TensorMeta

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_LORA_A = ".lora_A.weight"
_BASE_ENDS = (".base_layer.weight", ".base_layer.bias", ".weight", ".bias")


def is_adapter_dir(path: Path) -> bool:
    """Return whether PEFT's save_pretrained wrote a directory."""
    return os.path.isfile(path / _ADAPTER_CONFIG)  # False of a name that no file system takes


def file_states(path: Path) -> dict[str, FileState | None]:
    """Return the states of the files that are read of a checkpoint: in its directory, or itself.
    Others may come and go while it is pushed."""
    if not os.path.isdir(path):
        return _states([path])
    try:
        weights = model_files(path).files
    except InvalidRequestError:  # the push says so when it opens them
        weights = [*path.glob("*.safetensors")]
    return _states([*weights, *(path / name for name in (_CONFIG, _ADAPTER_CONFIG, INDEX))])


def adapter_states(path: Path) -> dict[str, FileState | None]:
    """Return the states of the files that are read of an adapter that PEFT saved."""
    return _states([path / _ADAPTER_CONFIG, path / _ADAPTER_WEIGHTS])


def _states(files: Sequence[Path]) -> dict[str, FileState | None]:
    return {file.name: FileState.of(file) for file in sorted(files) if os.path.isfile(file)}


def adapter_of_dir(
    path: Path,
    cast: CastRule,
    *,
    copy: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Adapter:
    """Return the adapter that PEFT saved in a directory.

    Args:
        copy: Copies a tensor of the file: it may lie in memory that the file is mapped to.

    Raises:
        InvalidRequestError: A file is missing, with what to do.
        InvalidAdapterError: The config cannot be read.
    """
    weights = path / _ADAPTER_WEIGHTS
    if not is_adapter_dir(path) or not os.path.isfile(weights):
        raise InvalidRequestError(
            f"{str(path)[:200]} is not a PEFT adapter: it needs {_ADAPTER_CONFIG} and "
            f"{_ADAPTER_WEIGHTS} (save_pretrained with safe_serialization=True writes both)"
        )
    config_json = config_of_dir(read_text(path / _ADAPTER_CONFIG, MAX_CONFIG_BYTES))
    check_config(config_json)
    loaded = _load(weights)
    named = _without_targeted_bases({own: loaded[n] for n, own in saved_names(loaded).items()})
    tensors = {name: copy(tensor) for name, tensor in named.items()}
    source = tensor_source(tensors, cast, f"PEFT directory {path}")
    return Adapter(source, config_in_names(config_json, tensors, None), None)


def _without_targeted_bases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors without copies of base weights. PEFT saves those beside a LoRA of
    an embedding or an output layer; a live model's push has none."""
    pairs = {name.removesuffix(_LORA_A) for name in tensors if name.endswith(_LORA_A)}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not any(name.removesuffix(end) in pairs for end in _BASE_ENDS if name.endswith(end))
    }


def _load(path: Path) -> dict[str, torch.Tensor]:
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _opened(path: Path) -> Any:
    open_file = _safe_open()
    if not path.is_file():  # a pipe or a device would have no end
        raise InvalidRequestError(f"{path} is no regular file")
    from safetensors import SafetensorError

    try:
        return open_file(path, "pt")
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError(
            f"{path} is not a whole safetensors file: {str(error)[:200]}"
        ) from None


def base_of_dir(path: Path) -> AdapterBase:
    """Return the base of a saved adapter, as PEFT recorded it."""
    config = read_json(path / _ADAPTER_CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return AdapterBase(
        None,
        name if isinstance(name, str) else "",
        revision if isinstance(revision, str) else None,
    )


class CheckpointSource(Source):
    """Tensors of a checkpoint directory or of one safetensors file.

    Tensors are read in the order of their names, layer by layer, each from disk as
    it is packed: extra memory is that of the largest tensor. Those for drafts come last.

    Args:
        path: Directory or file.
        cast: Rule for the dtype that each tensor travels in.
        drafts: Names to keep among the layers for drafts, which are left out otherwise.
        is_base: Function that tells whether these are all tensors of the pool's base; None where
            that is not known. See ``copied_heads``.

    Raises:
        InvalidRequestError: There is no safetensors file, or one that the index names is missing.
        InvalidManifestError: See ``WeightFiles.place``; or an output layer that the pool does not
            have is no copy of the embedding.
    """

    is_collective = False

    def __init__(
        self,
        path: Path,
        cast: CastRule,
        drafts: Collection[str] = (),
        is_base: IsBase | None = None,
    ) -> None:
        found = model_files(path)
        if is_adapter_dir(path) and all(file.name == _ADAPTER_WEIGHTS for file in found.files):
            raise InvalidRequestError(
                f"{path} is a PEFT adapter, not a whole model: push it by push_adapter, or the "
                "model with it merged in (merge_and_unload)"
            )
        opened = {file: _opened(file) for file in found.files}
        places = found.place((file, each.keys()) for file, each in opened.items())
        #: Names in the files, and the open file of each, by names without wrappers.
        self._by_name: dict[str, tuple[str, Any]] = {}
        for name, own in saved_names(places).items():
            if own in self._by_name:
                raise InvalidManifestError(f"{path} holds {own!r} twice: as {name!r}, too")
            self._by_name[own] = name, opened[places[name]]
        prefixes = draft_prefixes(self._by_name, _num_layers(path))
        left_out = {n for n in self._by_name if is_draft(n, prefixes) and n not in drafts}
        names = sorted(
            self._by_name.keys() - left_out,  # the engine has no place for them
            key=lambda name: (name in drafts, _natural_key(name)),
        )
        # Slices tell shape and dtype without reading; meta tensors carry both.
        metas = make_metas([(name, _meta(self._slice(name))) for name in names], cast)
        heads = copied_heads(metas, is_base, is_said=_ties_head(path))
        self.metas = tuple(meta for meta in metas if meta.name not in heads)
        self._names = [meta.name for meta in self.metas]
        more = f", without {len(left_out)} of layers for drafts" if left_out else ""
        self.description = f"checkpoint {path}, {len(self._names)} tensors{more}"
        for meta in metas:
            if meta.name in heads:
                self._check_head(meta)

    def _slice(self, name: str) -> Any:
        own, file = self._by_name[name]
        return file.get_slice(own)

    def _tensor(self, name: str) -> torch.Tensor:
        own, file = self._by_name[name]
        tensor: torch.Tensor = file.get_tensor(own)
        return tensor

    def _check_head(self, head: TensorMeta) -> None:
        """Refuse an output layer that is left out and is no copy of the embedding."""
        of = [meta.name for meta in self.metas if meta.shape == head.shape]
        if not any(are_equal(self._tensor(head.name), self._tensor(name)) for name in of):
            raise no_copy(head.name, of)

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        assert views is not None
        for name, view in zip(self._names[first:], views, strict=False):
            copy_into([view], [self._tensor(name)])


def _meta(piece: Any) -> torch.Tensor:
    dtype = DataType.of_safetensors(piece.get_dtype())
    if dtype is None:
        raise InvalidManifestError(f"element type {piece.get_dtype()!r} cannot be sent")
    torch_dtype = getattr(torch, dtype.torch_name)
    return torch.empty(piece.get_shape(), dtype=torch_dtype, device="meta")


def _natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")]


def _ties_head(path: Path) -> bool:
    """Return whether the config says that the output layer is the embedding."""
    config = path / _CONFIG
    is_told = path.is_dir() and config.is_file()
    return is_told and bool(read_json(config).get("tie_word_embeddings"))


def _num_layers(path: Path) -> int:
    config = path / _CONFIG
    return num_layers_of(read_json(config)) if path.is_dir() and config.is_file() else 0


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InvalidRequestError(
            "reading safetensors files needs the package safetensors: pip install safetensors"
        ) from None
    return safe_open
