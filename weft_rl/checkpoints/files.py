"""Files of a checkpoint's weights on this machine."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from weft_rl.contract.errors import InvalidRequestError

_INDEX = "model.safetensors.index.json"
_OTHER = ("adapter_model", "consolidated", "training_args")


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


def weight_files(model_dir: Path) -> list[Path]:
    """List the safetensors files that a loader takes: those in the index, else all of the model's.
    Empty where there are none.

    Raises:
        InvalidRequestError: The index cannot be read, or names no files of the directory.
    """
    index = model_dir / _INDEX
    if index.is_file():
        named = read_json(index).get("weight_map")
        names = set(map(str, named.values())) if isinstance(named, dict) else set()
        if not names or any(Path(name).name != name for name in names):
            raise InvalidRequestError(f"{index} names no files that lie beside it")
        return [model_dir / name for name in sorted(names)]
    files = sorted(model_dir.glob("*.safetensors"))
    return [path for path in files if not path.name.startswith(_OTHER)] or files


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
