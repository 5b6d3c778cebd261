"""Files of a checkpoint's weights on this machine."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft_rl.contract.errors import InvalidManifestError, InvalidRequestError

#: Name of the file that says which file holds each tensor of a model.
INDEX = "model.safetensors.index.json"
_OTHER = ("adapter_model", "consolidated", "training_args")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")


#: Longest config or index that is read; those of the largest models have a tenth.
MAX_JSON_BYTES = 2**26


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file that others wrote: a config, an index.

    Raises:
        InvalidRequestError: It is no regular file, too long, cannot be read, or holds no object.
    """
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{path} holds no JSON object")
    return found


def read_text(path: Path, most_bytes: int = MAX_JSON_BYTES) -> str:
    """Read the text of a regular file of at most ``most_bytes`` bytes.

    Raises:
        InvalidRequestError: It is something else, longer, or cannot be read.
    """
    try:
        # A pipe that nobody writes to would not be opened without O_NONBLOCK.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidRequestError(f"{path} is no regular file")
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > most_bytes:
        raise InvalidRequestError(f"{path} has more than {most_bytes} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{path} is not UTF-8 text") from None


@dataclass(frozen=True)
class WeightFiles:
    """Safetensors files of one model, as its loader takes them."""

    files: Sequence[Path]
    """Files in the order of their names; each is a regular file."""
    index: Path | None = None
    """Index of the files; None where there is none."""
    places: Mapping[str, Path] = field(default_factory=dict)
    """File of each tensor, as the index says."""

    def place(self, held: Iterable[tuple[Path, Iterable[str]]]) -> dict[str, Path]:
        """Return the file of each tensor.

        Args:
            held: Files, each with the names of the tensors that it holds.

        Raises:
            InvalidManifestError: Two files hold a tensor, and no index says which one counts; or
                the index names a tensor that its file lacks.
        """
        found: dict[str, Path] = {}
        for path, names in held:
            for name in names:
                said = self.places.get(name)
                if said is not None and said != path:
                    continue  # a left-over beside the one that counts
                if name in found:
                    raise InvalidManifestError(
                        f"two files hold a tensor {name!r}, {found[name]} and {path.name}, and no "
                        "index says which one counts: remove the one that is no part of the model"
                    )
                found[name] = path
        for name, path in self.places.items():
            if name not in found:
                raise InvalidManifestError(
                    f"{self.index} says that {name!r} is in {path.name}, which holds no such tensor"
                )
        return found


def weight_files(model_dir: Path) -> list[Path]:
    """List the safetensors files of a model's directory; see ``model_files``. Empty where there are
    none.

    Raises:
        InvalidRequestError: The index cannot be read, or names a file that is not there.
    """
    return [*_files_in(model_dir).files]


def model_files(path: Path) -> WeightFiles:
    """Return the safetensors files that a loader takes: those in the directory's index, else all of
    the model's; or the one file that ``path`` is.

    Raises:
        InvalidRequestError: There are none, with what to do; the index cannot be read, or names a
            file that is not there.
    """
    try:
        if not path.exists():
            raise InvalidRequestError(f"{path} does not exist")
        found = _files_in(path) if path.is_dir() else WeightFiles([path])
        others = [] if found.files else sorted(each.name for each in path.iterdir())
    except (OSError, ValueError) as error:  # a name that no file system takes, say
        raise InvalidRequestError(f"{str(path)[:200]} cannot be read: {error}"[:500]) from None
    if found.files:
        return found
    other = next((name for name in others if name.endswith(_OTHER_FORMATS)), "")
    held = f", but {other}: save the model with safe_serialization=True" if other else ""
    raise InvalidRequestError(f"{path} holds no *.safetensors: no .safetensors file{held}")


def _files_in(model_dir: Path) -> WeightFiles:
    index = model_dir / INDEX
    if not index.is_file():
        distinct = {
            path.resolve(): path  # once, where another one is a link to it
            for path in sorted(model_dir.glob("*.safetensors"), reverse=True)
            if not path.name.startswith(".")
        }
        listed = sorted(distinct.values())
        own = [path for path in listed if not path.name.startswith(_OTHER)]
        return WeightFiles(own or listed)
    named = read_json(index).get("weight_map")
    named = named if isinstance(named, dict) else {}
    if not named or not all(isinstance(n, str) and Path(n).name == n for n in named.values()):
        raise InvalidRequestError(f"{index} names no files that lie beside it")
    places = {name: model_dir / file for name, file in named.items()}
    files = sorted(set(places.values()))
    for path in files:
        if not path.is_file():
            raise InvalidRequestError(f"{index} names {path.name}, which is not there")
    return WeightFiles(files, index, places)


def local_model_dir(
    model: str, revision: str | None, download_dir: str | None = None
) -> Path | None:
    """Find where a model has been read from: a directory, or the Hugging Face cache.

    Args:
        download_dir: Cache that vLLM was told to use instead (``--download-dir``).

    Returns:
        None if it cannot be found without network.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (ImportError, OSError, ValueError):  # no hub client, not cached, not a repository
        return None
