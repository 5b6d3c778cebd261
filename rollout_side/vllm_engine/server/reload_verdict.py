"""Verdict on whether vLLM's reload repeats a start, kept for the next start of the same.

"The same" are the model's files and code, vLLM, this package and the others that load weights, the
machine's kind of device, and all settings of vLLM that change how weights are held.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft_rl import __version__
from weft_rl.checkpoints.digest_cache import CacheFolder, FileState, user_folder

_log = logging.getLogger(__name__)

#: Changes with what is compared, or how.
_FORMAT = 2
#: Packages that load or process weights, beside vLLM and torch.
_PACKAGES = ("transformers", "compressed-tensors", "flashinfer-python")


class ReloadVerdict:
    """Verdict of ``loading.reload_proof`` on one engine, in a cache folder."""

    def __init__(self, engine: str, folder: Path | None = None) -> None:
        self._engine = engine
        self._folder = CacheFolder(folder or user_folder("reloads"))

    def get(self) -> str | None:
        """Return the kept reason why a reload does not repeat a start ("": it does), or None."""
        if not self._engine:
            return None
        kept = self._folder.get(self._engine.encode(), [self._engine], format=_FORMAT)
        return kept if isinstance(kept, str) else None

    def put(self, of_ranks: Sequence[str | None]) -> None:
        """Keep the first reason that a rank found; nothing if one could not tell."""
        found = [verdict for verdict in of_ranks if verdict is not None]
        if self._engine and len(found) == len(of_ranks):
            verdict = next(filter(None, found), "")
            self._folder.put(self._engine.encode(), [self._engine], verdict, format=_FORMAT)


def engine_identity(vllm_config: Any, version: str, model_dir: Path | None) -> str:
    """Return a digest of what tells an engine from others; empty if that is not known."""
    try:
        # All of them: which ones vLLM takes depends on its version, and on the model.
        files = sorted(model_dir.glob("*.safetensors")) if model_dir is not None else []
        platform: Any = importlib.import_module("vllm.platforms").current_platform
        envs: Any = importlib.import_module("vllm.envs")
        settings = envs.compile_factors() if hasattr(envs, "compile_factors") else {}
        if not files or model_dir is None:
            return ""
        files += sorted(model_dir.glob("*.py"))
        parts = [
            __version__,
            version,
            torch.__version__,
            *map(_installed, _PACKAGES),
            f"{platform.get_device_name()} {torch.backends.cpu.get_cpu_capability()}",
            vllm_config.compute_hash(),
            str(vllm_config.load_config.load_format),
            str(sorted(settings.items())),
            vllm_config.model_config.hf_config.to_json_string(),
            *(str(FileState.of(path).fields()) for path in files),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    except Exception as error:  # noqa: BLE001 - from vLLM's own code, or the disk
        _log.info("the verdict on a reload is not kept: %s: %s", type(error).__name__, error)
        return ""


def _installed(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
