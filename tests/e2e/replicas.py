"""``weft coordinator`` and ``weft rollout`` as processes, for tests of the whole path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft_cli.demo.processes import Process

MODEL_NAME = "tiny"
_START_SECONDS = 240.0
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ARGS = (
    "--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "256", "--max-num-seqs", "8", "--disable-uvicorn-access-log",
)  # fmt: skip
LORA_ARGS = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3")


@dataclass
class Coordinator:
    """A coordinator process on a port of its own, which a restart keeps."""

    work: Path
    process: Process
    target: str

    @classmethod
    def start(cls, work: Path, listen: str = "127.0.0.1:0") -> Coordinator:
        """Start on ``work``'s catalog; returns once it listens."""
        args = ("-m", "weft_cli", "coordinator", "--listen", listen, "--catalog",
                str(work / "weft.db"), "--lost-after-seconds", "60")  # fmt: skip
        process = Process("coordinator", args, work, {})
        line = process.line(lambda text: text.startswith("listening on "), 60)
        return cls(work, process, line.removeprefix("listening on "))


@contextmanager
def running_coordinator(work: Path) -> Iterator[Coordinator]:
    """A coordinator for the length of a test."""
    coordinator = Coordinator.start(work)
    try:
        yield coordinator
    finally:
        coordinator.process.stop()


@contextmanager
def running_replicas(
    work: Path,
    target: str,
    models: Sequence[Path],
    *args: str,
    first: int = 0,
    options: Sequence[str] = (),
) -> Iterator[list[str]]:
    """A replica for each of ``models``, started side by side.

    Args:
        args: vLLM's.
        first: Number in the name of the first; further ones follow.
        options: Of ``weft rollout``.

    Yields:
        Base URLs of their OpenAI servers.
    """
    with ExitStack() as stack:
        processes = []
        for i, model in enumerate(models, first):
            process = start_replica(work, target, i, model, *args, options=options)
            stack.callback(process.stop)
            processes.append(process)
        yield [url_of(process) for process in processes]


def start_replica(
    work: Path, target: str, number: int, model: Path, *args: str, options: Sequence[str] = ()
) -> Process:
    """Start ``replica-<number>``; see ``running_replicas``. The caller ends it."""
    command = ("-m", "weft_cli", "rollout", "-c", target, "--http-port", "0",
               "--replica-id", f"replica-{number}", "--adapter-memory-gib", "0.25",
               "--staging-memory-gib", "0.25", *options,
               "--", str(model), *ARGS, *args)  # fmt: skip
    return Process(f"replica-{number}", command, work, ENV)


def url_of(process: Process) -> str:
    """Base URL of a replica's OpenAI server, once it serves."""
    line = process.line(lambda text: text.startswith("serving on "), _START_SECONDS)
    match = re.search(r"http://[^\s,]+", line)
    assert match is not None
    return match.group()
