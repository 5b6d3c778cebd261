"""A pool whose replicas run in Weft's own environment, whatever that of the test is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.integrations.models import make_chat_model

ROOT = Path(__file__).parents[2]
#: Where vLLM is; made by `make install`.
PYTHON = ROOT / ".venv" / "bin" / "python"
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class RunningPool:
    """Where its processes are."""

    coordinator: str
    urls: list[str]
    """Of the replicas' OpenAI servers."""


@dataclass(frozen=True)
class Served:
    """A pool, and the folder of the model that it was started with."""

    pool: RunningPool
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Two replicas of a tiny chat model in ``folder``. Each push of a base changes what adapters
    are served over: the test that trains an adapter comes first."""
    model = make_chat_model(folder / "model")
    lora = ("--enable-lora", "--max-lora-rank", "16")
    with running_pool(folder, model, *lora, num_replicas=2) as pool:
        yield Served(pool, folder)


@contextmanager
def serving_struck(folder: Path) -> Iterator[Served]:
    """Three such replicas, two of which are killed: see ``struck.py``."""
    model = make_chat_model(folder / "model")
    with running_pool(folder, model, num_replicas="struck") as pool:
        yield Served(pool, folder)


@contextmanager
def running_pool(
    folder: Path, model: Path, *args: str, num_replicas: int | Literal["struck"] = 1
) -> Iterator[RunningPool]:
    """A coordinator and real vLLM replicas that serve ``model``, all ready.

    Args:
        folder: For the catalog and the logs.
        args: vLLM's, beside those of ``tests/e2e/replicas.py``.
    """
    command = [
        str(PYTHON), "-m", "tests.integrations.pool_process", str(folder), str(model),
        str(num_replicas), *args,
    ]  # fmt: skip
    log = folder / "pool.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise AssertionError(f"the pool did not start:\n{log.read_text()[-4000:]}")
            yield RunningPool(**json.loads(line))
        finally:
            process.stdin.close()  # it stops what it started
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
