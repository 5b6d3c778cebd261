"""Programs of examples/ that take the place of another tool, run as they are pasted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.downloads import put_into_cache
from tests.integrations.pool import ROOT

_SECONDS = 400.0


def run_pasted(
    work: Path,
    files: Sequence[str],
    command: Sequence[str],
    coordinator: str,
    model: Path,
    env: Mapping[str, str],
) -> str:
    """Run a command beside copies of examples; returns what it prints.

    Args:
        work: Folder to run in, with what the examples say is the user's.
        files: Of examples/, to be copied there.
        coordinator: Of the pool, for WEFT_COORDINATOR.
        model: What the hub has by the name that the examples say.
        env: Further environment, for a CPU.
    """
    for file in files:
        shutil.copy(ROOT / "examples" / file, work)
    put_into_cache(model, work / "huggingface")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an active environment
    ended = subprocess.run(
        command, cwd=work, timeout=_SECONDS, text=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "WEFT_COORDINATOR": coordinator,
             "HF_HOME": str(work / "huggingface"), "HF_HUB_OFFLINE": "1",
             "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **env},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-8000:]
    return ended.stdout
