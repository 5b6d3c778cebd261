"""Two machines of one network: namespaces with an address, a /tmp and files of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.network.hosts import network
from tests.waits import until

ROOT = Path(__file__).parents[2]
#: Where the files of a machine are, as its processes see them.
_HOME = "/mnt"
_START_SECONDS, _STOP_SECONDS = 300.0, 30.0
#: Copies files to the machine at an address, in the place of an SSH server.
_SCP = """#!/bin/bash
set -euo pipefail
files=("${@:1:$#-1}")
case "${!#}" in
%s
*) echo "scp: no machine at ${!#}" >&2; exit 1 ;;
esac
tar -c "${files[@]}" | nsenter --target "$pid" --mount --wdns=%s tar -x
"""


def lacking() -> str:
    """Name what this machine lacks; empty where namespaces can be made."""
    if os.geteuid() != 0:
        return "root"
    if Path("/tmp") in ROOT.parents:
        return "a checkout that is not below /tmp, which each machine has an own one of"
    return ""


@dataclass
class Server:
    """A block of commands that ends in a server."""

    text: str
    process: subprocess.Popen[str]
    log: Path

    def wait_until_ready(self) -> None:
        """Return once it says that it serves."""

        def serves() -> bool:
            said = self.log.read_text()
            assert self.process.poll() is None, f"{self.text}\nended:\n{said}"
            return bool(re.search(r"^(listening|serving) on ", said, re.MULTILINE))

        until(serves, _START_SECONDS, every_seconds=0.2, why=lambda: self.log.read_text())

    def stop(self) -> None:
        """End it as Ctrl-C in its terminal does, by force if need be."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    continue


class Machine:
    """A host: what runs in it has its address, its files and its /tmp, and sees no other's."""

    def __init__(self, address: str, space: str, files: Path, ends: ExitStack) -> None:
        self.address = address
        self.files = files
        self._ends = ends
        self._num_servers = 0
        (files / "bin").mkdir(parents=True)
        mounts = f"mount --bind {files} {_HOME} && mount -t tmpfs tmpfs /tmp"
        self._first = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "--mount", "--propagation", "private",
             "bash", "-c", f"{mounts} && echo mounted && exec sleep infinity"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        ends.callback(self._end)
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "mounted\n"

    def _end(self) -> None:
        self._first.kill()
        self._first.communicate()

    @property
    def pid(self) -> int:
        """Process whose namespaces are this machine's."""
        return self._first.pid

    def know(self, others: list[Machine]) -> None:
        """Let ``scp`` reach other machines."""
        cases = "\n".join(f"{other.address}:) pid={other.pid} ;;" for other in others)
        (self.files / "bin/scp").write_text(_SCP % (cases, _HOME))
        (self.files / "bin/scp").chmod(0o755)

    def _popen(self, text: str, log: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
        path = f"{_HOME}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: os.environ[name] for name in ("LANG", "HOME") if name in os.environ}
        with log.open("w") as output:
            return subprocess.Popen(
                ["nsenter", "--target", str(self.pid), "--mount", "--net", f"--wdns={_HOME}",
                 "bash", "-eo", "pipefail", "-c", text],
                env={**kept, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
                     "HF_HOME": f"{_HOME}/huggingface", **variables},
                stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip

    def serve(self, text: str, **variables: str) -> Server:
        """Start commands that end in a server; it is stopped with the machine."""
        self._num_servers += 1
        log = self.files / f"server{self._num_servers}.log"
        server = Server(text, self._popen(text, log, variables), log)
        self._ends.callback(server.stop)
        return server

    def run(self, text: str, timeout_seconds: float, **variables: str) -> tuple[int, str]:
        """Run commands to their end; returns the exit code and what they print."""
        log = self.files / "run.log"
        process = self._popen(text, log, variables)
        try:
            code = process.wait(timeout_seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, log.read_text()


@contextmanager
def two_machines(work: Path, *addresses: str) -> Iterator[list[Machine]]:
    """Two machines of one network, at the addresses of its first two hosts."""
    with network() as net, ExitStack() as ends:
        hosts = [net.host(f"machine-{n}") for n in range(len(addresses))]
        assert addresses == tuple(host.address for host in hosts)
        machines = [Machine(host.address, host.space, work / host.address, ends) for host in hosts]
        for machine in machines:
            machine.know([other for other in machines if other is not machine])
        yield machines
