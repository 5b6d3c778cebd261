"""Where a checkpoint's weights lie on this machine."""

from __future__ import annotations

import json
from pathlib import Path

_INDEX = "model.safetensors.index.json"
_OTHER = ("adapter_model", "consolidated", "training_args")


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files that a loader takes: those in the index, else all of the
    model's; none where there are none."""
    index = model_dir / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [model_dir / name for name in sorted(names)]
    files = sorted(model_dir.glob("*.safetensors"))
    return [path for path in files if not path.name.startswith(_OTHER)] or files


def local_model_dir(model: str, revision: str | None) -> Path | None:
    """Where a model has been read from: a directory, or the Hugging Face cache.

    Returns:
        None if it cannot be found without network.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # no hub client, not cached, not a repository
        return None
