"""A real Prometheus on loopback, with its data in a folder of the caller's, and questions to it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_START_SECONDS: Final = 30.0
_ASK_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 20.0


@dataclass(frozen=True)
class Target:
    """A process that is scraped."""

    url: str
    job: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Series:
    """One series of an answer."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str

    def query(self, expression: str) -> list[Series]:
        """What an expression is now."""
        found = self._get("query", query=expression)["result"]
        return [Series(each["metric"], float(each["value"][1])) for each in found]

    def targets(self) -> list[dict[str, Any]]:
        """What is scraped, with its health."""
        found: list[dict[str, Any]] = self._get("targets", state="active")["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The rules, with their health and state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_ASK_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None


@contextmanager
def running(
    program: str, targets: Sequence[Target], rules: Path, work: Path
) -> Iterator[Prometheus]:
    """Scrape these every second, and evaluate the rules of a file."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {
                        "targets": [urllib.parse.urlsplit(target.url).netloc],
                        "labels": dict(target.labels),
                    }
                    for target in targets
                    if target.job == job
                ],
            }
            for job in dict.fromkeys(target.job for target in targets)
        ],
    }
    file = work / "prometheus.yaml"
    file.write_text(json.dumps(config))
    address = f"127.0.0.1:{_free_port()}"
    command = [
        program, f"--config.file={file}", f"--storage.tsdb.path={work / 'data'}",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (work / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            found = Prometheus(f"http://{address}")
            _await_ready(found, process, work / "prometheus.log")
            yield found
        finally:
            process.terminate()
            process.wait(_STOP_SECONDS)


def _free_port() -> int:
    """A port that was free a moment ago: Prometheus does not say which one it was given."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _await_ready(found: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{found.url}/-/ready", timeout=_ASK_SECONDS):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Prometheus does not run:\n{log.read_text()}") from None
            time.sleep(0.1)
