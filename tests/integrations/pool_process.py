"""A pool of real replicas, for tests in an environment without vLLM: ``pool.py`` starts it.

``python -m tests.integrations.pool_process FOLDER MODEL NUM_REPLICAS|struck [VLLM_ARGS]`` says in a
line of JSON where the pool is, and ends once its standard input does. ``struck`` is the pool of
``struck.py``, armed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.e2e.replicas import running_coordinator, running_replicas, wait_ready
from tests.integrations.struck import struck_pool


def main(folder: str, model: str, num_replicas: str, *args: str) -> None:
    work = Path(folder)
    if num_replicas == "struck":
        with struck_pool(work, Path(model), *args) as pool:
            _tell(pool.target, pool.arm())
        return
    models = [Path(model)] * int(num_replicas)
    with (
        running_coordinator(work) as coordinator,
        running_replicas(work, coordinator.target, models, *args) as urls,
    ):
        for i in range(len(models)):
            wait_ready(coordinator.target, f"replica-{i}")
        _tell(coordinator.target, urls)


def _tell(coordinator: str, urls: list[str]) -> None:
    """Say where the pool is, and wait until it is to end."""
    print(json.dumps({"coordinator": coordinator, "urls": urls}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
