"""A pool of three real replicas, two of which are killed while a framework trains over it: one
as it generates, one as it receives a push.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2e.replicas import LORA_ARGS, answering_url, start_replica, wait_ready
from tests.integrations.strike_points import in_generation, in_push
from weft_rl.cli.demo.processes import Process

REPLICAS = SURVIVOR, GENERATES, RECEIVES = "replica-0", "replica-1", "replica-2"
_VICTIMS = ("-m", "tests.fault.victims", "weft_rl")
_START_SECONDS = 60.0


class StruckPool:
    """A coordinator and its replicas. Each ``arm`` has both victims killed once.

    Args:
        work: For the catalog, the logs and the strikes.
        args: vLLM's, beside those of ``tests/e2e/replicas.py``.
    """

    def __init__(self, work: Path, model: Path, *args: str) -> None:
        self.work, self._model, self._args = work, model, args
        self._stack = ExitStack()
        self._replicas: dict[str, Process] = {}
        self._urls: dict[str, str] = {}
        self._in_generation, self._in_push = self._strikes = in_generation(work), in_push(work)
        for strike in self._strikes:
            Path(strike.directory).mkdir()
        command = (
            *_VICTIMS, "coordinator", "--listen", "127.0.0.1:0", "--catalog", str(work / "weft.db"),
        )  # fmt: skip
        coordinator = Process("coordinator", command, work, self._in_push.env)
        self._stack.callback(coordinator.stop)
        line = coordinator.line(lambda text: text.startswith("listening on "), _START_SECONDS)
        self.target = line.removeprefix("listening on ")

    def arm(self) -> list[str]:
        """Start whoever does not run, and have both victims killed in what comes next; blocks
        until all serve.

        Returns:
            Base URLs of the OpenAI servers.
        """
        for strike in self._strikes:
            strike.armed.unlink(missing_ok=True)
            strike.struck.unlink(missing_ok=True)
        ended = [
            name
            for name in REPLICAS
            if name not in self._replicas or self._replicas[name].poll() is not None
        ]
        for name in ended:  # side by side
            self._start(name)
        for name in ended:
            self._urls[name] = answering_url(self._replicas[name])
            wait_ready(self.target, name, self._urls[name])
        self._in_push.target.write_text(f"{self._replicas[RECEIVES].pid} SIGKILL")
        for strike in self._strikes:
            strike.armed.touch()
        return list(self._urls.values())

    def close(self) -> None:
        """End everything."""
        self._stack.close()

    def _start(self, name: str) -> None:
        env = self._in_generation.env if name == GENERATES else {}
        process = start_replica(
            self.work, self.target, name, self._model, *LORA_ARGS, *self._args,
            entry=_VICTIMS, env=env,
        )  # fmt: skip
        self._stack.callback(process.stop)
        self._replicas[name] = process


@contextmanager
def struck_pool(work: Path, model: Path, *args: str) -> Iterator[StruckPool]:
    """A pool for the length of a test."""
    pool = StruckPool(work, model, *args)
    try:
        yield pool
    finally:
        pool.close()
