"""Strangers who connect and say nothing take no descriptor that a server needs itself."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft_rl.coordinator.runtime.catalog.database import Catalog
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import publish_pb2, types_pb2
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

#: Open files that the server may have, and more connections than that.
_LIMIT = 128
_STRANGERS = 200
_SECONDS = 15.0


class _Server:
    """A coordinator in a process that may open few files."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        self.child = child
        self.target = child.stdout.readline().split()[-1]
        self.metrics = re.sub(r"/metrics$", "", child.stdout.readline().split()[-1])

    @property
    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.child.pid}/fd").iterdir()))

    def acquire(self, stub: PublishServiceStub, name: str) -> None:
        """Order to write a fact into the catalog."""
        request = publish_pb2.AcquirePolicyRequest(
            trainer_id="t", session_id="s", policy=name, kind=types_pb2.POLICY_KIND_ADAPTER
        )
        stub.AcquirePolicy(request, timeout=_SECONDS)


@pytest.fixture
def server(catalog_path: Path) -> Iterator[_Server]:
    serve = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({_LIMIT}, {_LIMIT})); "
        "import runpy, sys; sys.argv[0] = 'weft'; runpy.run_module('weft_rl', run_name='__main__')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", serve, "coordinator", "--listen", "127.0.0.1:0",
         "--catalog", str(catalog_path), "--metrics", "127.0.0.1:0", "--log-level", "warning"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield _Server(child)
    finally:
        child.kill()
        child.communicate()


@contextmanager
def strangers(*targets: str) -> Iterator[None]:
    """Connections that stay silent."""
    with contextlib.ExitStack() as held:
        for target in targets:
            host, _, port = target.removeprefix("http://").rpartition(":")
            for _ in range(_STRANGERS):
                with contextlib.suppress(OSError):
                    held.enter_context(socket.create_connection((host, int(port)), 1.0))
        yield


def test_a_coordinator_goes_on_writing_while_strangers_fill_its_ports(server: _Server) -> None:
    with open_channel(server.target) as channel:
        stub = PublishServiceStub(channel)
        server.acquire(stub, "before")
        with strangers(server.target, server.metrics):
            for number in range(20):
                server.acquire(stub, f"policy-{number}")
                time.sleep(0.05)
            assert server.num_files < _LIMIT - 16
            with urllib.request.urlopen(f"{server.metrics}/healthz", timeout=_SECONDS) as answer:
                assert answer.status == 200
        server.acquire(stub, "after")
    assert server.child.poll() is None


_FULL = """
import os, resource, sys, threading
from pathlib import Path
from weft_rl.coordinator.decisions.state.effects import SaveEpoch
from weft_rl.coordinator.runtime.catalog.database import Catalog
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
catalog = Catalog.open(Path(sys.argv[1]))
full = list[int]()

def fill() -> None:
    try:
        while True:
            full.append(os.dup(0))
    except OSError:
        pass

fill()
catalog.apply([SaveEpoch(7)])  # from what it keeps for itself
assert catalog.list_versions("base", 5, 1) == []
catalog._spare.close()
fill()
timer = threading.Timer(0.5, lambda: [os.close(fd) for fd in full[:10]])
timer.start()
catalog.apply([SaveEpoch(8)])  # waits
timer.join()
catalog.close()
print("whole")
"""


def test_the_catalog_is_written_though_no_descriptor_is_left(catalog_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", _FULL, str(catalog_path)], capture_output=True, text=True, timeout=60
    )
    assert said.stdout == "whole\n", said.stderr
    catalog = Catalog.open(catalog_path)
    assert catalog.snapshot().epoch == 8
    catalog.close()
