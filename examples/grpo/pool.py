"""The pool of the example: a coordinator and two real vLLM replicas, as processes of this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft_rl.cli.demo.processes import Process

_NUM_REPLICAS = 2
_START_SECONDS = 180.0
_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_ENGINE = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "32", "--max-num-seqs", "128",
    "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2",
)  # fmt: skip


@contextmanager
def running_pool(work: Path, model: Path) -> Iterator[str]:
    """Start them, on ports that the system chooses; yields the coordinator's HOST:PORT once both
    replicas serve ``model``, and ends them by their pids. Logs go to ``work``."""
    with ExitStack() as stack:

        def start(name: str, *args: str) -> Process:
            process = Process(name, ("-m", "weft_rl", *args), work, _ENV)
            stack.callback(process.stop)
            return process

        coordinator = start(
            "coordinator", "coordinator", "--listen", "127.0.0.1:0",
            "--catalog", str(work / "weft.db"),
            "--lost-after-seconds", "60",  # two engines that start on two cores starve the rest
        )  # fmt: skip
        target = coordinator.line(lambda text: text.startswith("listening on "), 60)
        target = target.removeprefix("listening on ")
        replicas = [
            start(
                f"replica-{number}", "rollout", "--coordinator", target, "--http-port", "0",
                "--replica-id", f"replica-{number}", "--adapter-memory-gib", "0.25",
                "--staging-memory-gib", "0.25", "--", str(model), *_ENGINE,
            )
            for number in range(_NUM_REPLICAS)
        ]  # fmt: skip
        for replica in replicas:
            replica.line(lambda text: bool(re.match(r"serving on http", text)), _START_SECONDS)
        yield target
