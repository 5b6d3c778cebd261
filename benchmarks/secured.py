"""``python -m benchmarks.secured``: what certificates cost the control plane of a push.

Two pools of one replica (engine double, processes of their own), one with mutual TLS, roles
and the audit log, one without; an adapter of 4 KiB is pushed to each in turn.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.push import tiny_adapter
from tests.doubles.certificates import Authority
from trainer_side import Publisher, Tls
from weft_rl.cli.demo.processes import Process
from weft_rl.rpc.security.credentials import Credentials

_PUSHES = 101
_WARMUP = 5
_ACCESS = """
[[identity]]
san = "127.0.0.1"
roles = ["replica", "coordinator"]

[[identity]]
san = "trainer.test"
roles = ["publish"]
policies = ["*"]
"""


def secured_pool(stack: ExitStack, work: Path, server: Credentials, access: Path) -> str:
    """Start a coordinator and a replica that ask who calls; returns HOST:PORT."""
    return _pool(stack, work, "secured", server.to_environment(), str(access))


def _pool(stack: ExitStack, work: Path, name: str, env: dict[str, str], access: str) -> str:
    """Start a coordinator and a replica; returns HOST:PORT."""
    guarded = ("--access", access) if access else ()
    args = ("-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0",
            "--catalog", str(work / f"{name}.db"), *guarded)  # fmt: skip
    coordinator = Process(f"coordinator-{name}", args, work, env)
    stack.callback(coordinator.stop)
    target = coordinator.line(lambda text: text.startswith("listening on "), 60).split()[-1]
    args = ("-m", "tests.doubles.replica_process", target, "replica-0", "1", "16", *guarded)
    replica = Process(f"replica-{name}", args, work, env)
    stack.callback(replica.stop)
    replica.line(lambda text: text == "ready", 60)
    return target


def main() -> None:
    """Measure, and print a line for each."""
    console = Console()
    console.print(describe())
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        work = Path(folder)
        authority = Authority(work)
        server = authority.credentials("localhost", "127.0.0.1", file="server")
        own = authority.credentials("trainer.test")
        access = work / "access.toml"
        access.write_text(_ACCESS)
        tls = Tls(ca=own.tls_ca, cert=own.tls_cert, key=own.tls_key)
        plain = _pool(stack, work, "plain", {}, "")
        secured = secured_pool(stack, work, server, access)
        publishers = {
            "without": stack.enter_context(Publisher(plain, trainer_id="t", progress=None)),
            "with mTLS, roles and audit": stack.enter_context(
                Publisher(secured, trainer_id="t", progress=None, tls=tls)
            ),
        }
        seconds: dict[str, list[float]] = {name: [] for name in publishers}
        adapter = tiny_adapter(work)
        for _ in range(_PUSHES):
            for name, publisher in publishers.items():
                report = publisher.push_adapter(adapter, "tiny").report
                seconds[name].append(report.seconds)
    before, after = (statistics.median(kept[_WARMUP:]) * 1e3 for kept in seconds.values())
    for name, kept in seconds.items():
        console.print(f"  {name}: median {statistics.median(kept[_WARMUP:]) * 1e3:.1f} ms")
    console.print(f"  the difference: {after - before:.1f} ms (< 2 ms)")


if __name__ == "__main__":
    main()
