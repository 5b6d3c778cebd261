"""What a replica costs while nobody asks it anything, beside plain vLLM.

``weft rollout`` (in a pool, an adapter was pushed to it) and plain vLLM's server of the same
model and settings run side by side; both are left alone for the same seconds, and the
processor's time of all their processes is read from /proc. A trainer that is there, idle too,
has a side group kept up: gloo's thread looks a hundred times a second.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process

_START_SECONDS = 300.0
_SETTLE_SECONDS = 10.0
_WINDOW_SECONDS = 5.0
_NUM_WINDOWS = 5


@dataclass(frozen=True)
class Shares:
    """The processor's seconds a second of all processes; medians of windows."""

    plain: float
    replica: float
    attached: float
    """Of the replica while a trainer's side group is kept up."""


def compare(work: Path, coordinator: str, num_ranks: int) -> Shares:
    """Measure both.

    Args:
        work: For logs and the model; reused if it is there.
        coordinator: HOST:PORT of one that runs.
        num_ranks: Tensor parallel size.
    """
    from weft_rl.cli.demo.main import _ENGINE_ARGS, _ENGINE_ENV
    from weft_rl.cli.demo.tiny_model import make_model

    model = work / "idle-model"
    if not model.exists():
        make_model(model)
    args = (str(model), *_ENGINE_ARGS, "--tensor-parallel-size", str(num_ranks))
    port = _free_port()
    with ExitStack() as stack:
        plain = Process(
            f"plain-{num_ranks}",
            ("-m", "vllm.entrypoints.openai.api_server", "--model", *args,
             "--host", "127.0.0.1", "--port", str(port)),
            work, _ENGINE_ENV,
        )  # fmt: skip
        stack.callback(plain.stop)
        _await_health(port, plain)
        replica = Process(
            f"idle-{num_ranks}",
            ("-m", "weft_rl", "rollout", "-c", coordinator, "--http-port", "0", "--replica-id",
             f"idle-{num_ranks}", "--log-level", "warning", "--", *args),
            work, _ENGINE_ENV,
        )  # fmt: skip
        stack.callback(replica.stop)
        replica.line(lambda text: text.startswith("serving on "), _START_SECONDS)
        with Publisher(coordinator, trainer_id=f"idle-{num_ranks}", progress=None) as publisher:
            publisher.push_adapter(_adapter(model), f"idle{num_ranks}")
            _, attached = _measure(plain.pid, replica.pid)
        of_plain, of_replica = _measure(plain.pid, replica.pid)
    return Shares(of_plain, of_replica, attached)


def _measure(*sessions: int) -> list[float]:
    """Of the processes of each session, once they have settled."""
    time.sleep(_SETTLE_SECONDS)
    windows = [_shares(*sessions) for _ in range(_NUM_WINDOWS)]
    return [statistics.median(column) for column in zip(*windows, strict=True)]


def _adapter(model: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    from weft_rl.cli.demo.tiny_model import load_model

    return get_peft_model(load_model(model), LoraConfig(r=4, target_modules=["q_proj"]))


def _shares(*sessions: int) -> list[float]:
    """Processor's seconds a second of the processes of each session, over one window."""
    began, before = time.monotonic(), [_cpu_seconds(session) for session in sessions]
    time.sleep(_WINDOW_SECONDS)
    after, seconds = [_cpu_seconds(session) for session in sessions], time.monotonic() - began
    return [(b - a) / seconds for a, b in zip(before, after, strict=True)]


def _cpu_seconds(session: int) -> float:
    """User's and system's time of all processes of a session, nanoseconds exact where the
    kernel says them (``schedstat``)."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) != session:
                continue
            for task in (entry / "task").iterdir():
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _await_health(port: int, process: Process) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise TimeoutError(f"plain vLLM did not start:\n{process.tail()}") from None
            time.sleep(0.5)
