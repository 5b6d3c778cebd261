"""A pool of real replicas, for tests in an environment without vLLM: ``pool.py`` starts it.

``python -m tests.integrations.pool_process FOLDER MODEL NUM_REPLICAS [VLLM_ARGS]`` says in a
line of JSON where the pool is, and ends once its standard input does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.e2e.replicas import running_coordinator, running_replicas, wait_ready


def main(folder: str, model: str, num_replicas: str, *args: str) -> None:
    work = Path(folder)
    models = [Path(model)] * int(num_replicas)
    with (
        running_coordinator(work) as coordinator,
        running_replicas(work, coordinator.target, models, *args) as urls,
    ):
        for i in range(len(models)):
            wait_ready(coordinator.target, f"replica-{i}")
        print(json.dumps({"coordinator": coordinator.target, "urls": urls}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
