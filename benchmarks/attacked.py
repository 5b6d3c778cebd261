"""``python -m benchmarks.attacked``: what attacks on the coordinator cost a legitimate push.

A pool of one replica (engine double, a process of its own) where all show certificates; an
adapter of 4 KiB is pushed again and again, before each attack and while a process that does
nothing else attacks the coordinator. Every attempt of it must be answered as it should be.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.push import tiny_adapter
from benchmarks.secured import secured_pool
from tests.doubles.attacks import ACCESS, ATTACKS, identities
from tests.doubles.certificates import Authority
from trainer_side import Publisher, Tls
from weft_rl.cli.demo.processes import Process

_PUSHES = 101
_WARMUP = 5
_DEADLINE_SECONDS = 10.0
_START_SECONDS = 60.0


def _push(publisher: Publisher, adapter: Path, count: int) -> list[float]:
    """Milliseconds of each of so many pushes; all end by their deadline."""
    took = []
    for _ in range(count):
        report = publisher.push_adapter(adapter, "math").report
        took.append(report.seconds * 1e3)
    return took


def main() -> None:
    """Measure, and print a line for each attack."""
    table = Table("attack", "attempts", "usual push", "under attack", "longest", "ratio")
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        work = Path(folder)
        authority = Authority(work)
        known = identities(authority, work)
        server = authority.credentials("localhost", "127.0.0.1", file="server")
        (work / "access.toml").write_text(ACCESS)
        target = secured_pool(stack, work, server, work / "access.toml")
        attackers = {}
        for name, attack in ATTACKS.items():  # before gRPC has threads here, which no fork likes
            command = ("-m", "tests.doubles.attacks", name, target)
            env = known[attack.who].to_environment()
            attackers[name] = Process(name, command, work, env)
            stack.callback(attackers[name].stop)
        own = known["trainer"]
        tls = Tls(ca=own.tls_ca, cert=own.tls_cert, key=own.tls_key)
        publisher = stack.enter_context(
            Publisher(
                target, trainer_id="t", timeout_seconds=_DEADLINE_SECONDS, progress=None, tls=tls
            )
        )
        adapter = tiny_adapter(work)
        _push(publisher, adapter, _WARMUP)
        for name, attack in ATTACKS.items():
            usual = statistics.median(_push(publisher, adapter, _PUSHES))
            process = attackers[name]
            process.tell("begin")
            process.line(lambda text: text == "attacking", _START_SECONDS)
            began = time.monotonic()
            under = _push(publisher, adapter, _PUSHES)
            process.tell("enough")
            answers = process.answer(_START_SECONDS)
            assert set(answers) == {attack.answer}, f"{attack.text}: {answers}"
            rate = answers[attack.answer] / (time.monotonic() - began)
            median = statistics.median(under)
            table.add_row(
                attack.text,
                attack.answer if attack.answer == "held" else f"{rate:.0f}/s: {attack.answer}",
                f"{usual:.1f} ms",
                f"{median:.1f} ms",
                f"{max(under):.1f} ms",
                f"{median / usual:.2f}",
            )
            process.wait(_START_SECONDS)
    print(describe())
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
