"""``python -m benchmarks.pool``: one coordinator under a thousand replicas.

A real coordinator process; the replicas are clients that only speak (no engine, no
torch), a connection and a port for each. Measures what heartbeats cost, and how long a
push to all of them takes to plan: in ``step`` alone, as its trainer sees BeginTransfer,
and until the last replica was told to join the group. ``--page`` has the coordinator keep
the history of the page, and polls it once a second all the while.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import statistics
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.pool_replicas import CAPABILITIES, PROJECTION, REFERENCE
from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.values import VersionLayout
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.rpc.manifest_codec import manifest_to_chunks
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

_PREFIX = "base_model.model." + PROJECTION.removesuffix(".weight")
MANIFEST = plan_buckets(
    [
        TensorMeta(f"{_PREFIX}.lora_A.weight", DataType.BFLOAT16, (4, 64)),
        TensorMeta(f"{_PREFIX}.lora_B.weight", DataType.BFLOAT16, (64, 4)),
    ]
)
CONFIG = '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def heartbeat_load(pid: int, seconds: float) -> float:
    """CPU seconds a second of a process, over a while."""
    began, used = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / (time.monotonic() - began)


def plan_alone(num_replicas: int, repeats: int) -> float:
    """Median seconds that ``step`` takes from a begun push to its plan; no process."""
    seconds = []
    for _ in range(repeats):
        m = Machine().pool(*(f"replica-{i:04d}" for i in range(num_replicas)))
        m.acquire("math")
        began = time.perf_counter()
        ticket = m.begin(layout=VersionLayout.of(MANIFEST))
        seconds.append(time.perf_counter() - began)
        assert len(m.transfer(ticket).targets) == num_replicas
    return statistics.median(seconds)


def beat_alone(num_replicas: int, repeats: int) -> float:
    """Median seconds that ``step`` takes for one heartbeat."""
    m = Machine().pool(*(f"replica-{i:04d}" for i in range(num_replicas)))
    seconds = []
    for i in range(repeats):
        replica = m.state.replicas[f"replica-{i % num_replicas:04d}"]
        began = time.perf_counter()
        m.do(events.Heartbeat(0, replica.replica_id, replica.incarnation, replica.report))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Trainer:
    """Begins pushes to the whole pool and gives them up."""

    def __init__(self, target: str) -> None:
        self._stub = PublishServiceStub(open_channel(target))
        lease = self._stub.AcquirePolicy(
            pb.AcquirePolicyRequest(
                trainer_id="bench",
                session_id="1",
                policy="math",
                kind=types_pb2.POLICY_KIND_ADAPTER,
            ),
            timeout=10.0,
        ).lease
        self._token = lease.fencing_token
        chunks = [pb.PutManifestRequest(chunk=chunk) for chunk in manifest_to_chunks(MANIFEST)]
        self._stub.PutManifest(iter(chunks), timeout=10.0)

    def begin(self) -> tuple[float, float, pb.BeginTransferResponse]:
        """When it was called, when it was answered, and the answer."""
        self._stub.RenewLease(
            pb.RenewLeaseRequest(policy="math", fencing_token=self._token), timeout=10.0
        )
        request = pb.BeginTransferRequest(
            request_id=secrets.token_hex(8),
            policy="math",
            fencing_token=self._token,
            layout_digest=MANIFEST.layout_digest,
            adapter=types_pb2.AdapterSpec(
                config_json=CONFIG, base_fingerprint=REFERENCE.fingerprint
            ),
            backend=CAPABILITIES.backends[0],
            timeout=duration_to_proto(60.0),
            protocol_revision=PROTOCOL_REVISION,
        )
        began = time.monotonic()
        answer = self._stub.BeginTransfer(request, timeout=60.0)
        return began, time.monotonic(), answer

    def give_up(self, transfer_id: str) -> None:
        """End it, so that the next can begin."""
        self._stub.AbortTransfer(
            pb.AbortTransferRequest(
                transfer_id=transfer_id, policy="math", fencing_token=self._token
            ),
            timeout=60.0,
        )


def last_join(doubles: list[Process], group_id: str, num_replicas: int) -> float:
    """When the last replica was told to join (monotonic)."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        count, last = 0, 0.0
        for double in doubles:
            double.tell("report")
            answer = double.answer(30.0)
            assert not answer["failed"], f"{answer['failed']} replicas of {double.name} failed"
            told, when = answer["joins"].get(group_id, (0, 0.0))
            count, last = count + told, max(last, when)
        if count == num_replicas:
            return last
        time.sleep(0.2)
    raise TimeoutError(f"only {count} of {num_replicas} replicas were told to join")


class Reader(threading.Thread):
    """Polls the page as a browser does, once a second."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.sizes: list[int] = []
        self._page, self._ended = page, threading.Event()

    def __enter__(self) -> Reader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Poll until it is told to end."""
        cursor, wait = "", 0.0
        while not self._ended.wait(wait):
            began = time.perf_counter()
            with urllib.request.urlopen(f"{self._page}v1/pool.json?since={cursor}") as answer:
                body = answer.read()
            self.seconds.append(time.perf_counter() - began)
            self.sizes.append(len(body))
            told = json.loads(body)
            cursor, wait = told["cursor"], 0.05 if told["is_more"] else 1.0


def measure(table: Table, work: Path, args: argparse.Namespace) -> None:
    """Start everything, measure, fill the table."""
    with ExitStack() as stack:
        command = ["-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0", "--catalog",
                   str(work / "pool.db"), "--log-level", "warning"]  # fmt: skip
        if args.page:
            command += ["--metrics", "127.0.0.1:0"]
        coordinator = Process("coordinator", command, work, {})
        stack.callback(coordinator.stop)
        line = coordinator.line(lambda text: text.startswith("listening on "), 30)
        target = line.removeprefix("listening on ")
        reader = None
        if args.page:
            line = coordinator.line(lambda text: text.startswith("page on "), 30)
            reader = stack.enter_context(Reader(line.removeprefix("page on ")))
        doubles, share = [], args.replicas // args.processes
        for i in range(args.processes):
            command = ("-m", "benchmarks.pool_replicas", target, str(i * share), str(share))
            doubles.append(Process(f"replicas-{i}", command, work, {}))
            stack.callback(doubles[-1].stop)
        for double in doubles:
            double.line(lambda text: text == "ready", 120)
        num_replicas = share * args.processes
        time.sleep(3.0)
        load = heartbeat_load(coordinator.pid, args.seconds)
        table.add_row(
            f"CPU of the coordinator, {num_replicas / 2:.0f} heartbeats a second",
            f"{load * 100:.1f} % of a core",
            "< 30 %",
        )
        trainer = Trainer(target)
        answers, joins = [], []
        for i in range(args.pushes + 1):
            began, answered, begun = trainer.begin()
            assert len(begun.replica_ids) == num_replicas
            last = last_join(doubles, begun.group.group_id, num_replicas)
            trainer.give_up(begun.transfer_id)
            time.sleep(1.0)
            if i:  # the first one opens a connection to every replica
                answers.append(answered - began)
                joins.append(last - began)
            else:
                table.add_row(
                    "first push: BeginTransfer answered / last replica told",
                    f"{(answered - began) * 1e3:.0f} / {(last - began) * 1e3:.0f} ms",
                    "-",
                )
        table.add_row(
            f"BeginTransfer to {num_replicas} replicas, from call to answer",
            f"median {statistics.median(answers) * 1e3:.1f}, max {max(answers) * 1e3:.1f} ms",
            "< 100 ms",
        )
        table.add_row(
            "the same, until the last JoinGroup was received",
            f"median {statistics.median(joins) * 1e3:.0f}, max {max(joins) * 1e3:.0f} ms",
            "-",
        )
        if reader is not None:
            table.add_row(
                f"{len(reader.seconds)} answers to a page that polls",
                f"median {statistics.median(reader.seconds) * 1e3:.1f}, max "
                f"{max(reader.seconds) * 1e3:.1f} ms; "
                f"{statistics.median(reader.sizes):,.0f} bytes, "
                f"{max(reader.sizes):,} at first",
                "-",
            )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4, help="that the replicas share")
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeats")
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--page", action="store_true", help="have the page polled meanwhile")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    table = Table("what", "measured", "to reach")
    table.add_row(
        f"planning a push to {args.replicas} in step alone",
        f"{plan_alone(args.replicas, 7) * 1e3:.1f} ms",
        "< 100 ms",
    )
    table.add_row(
        "one heartbeat in step alone", f"{beat_alone(args.replicas, 2000) * 1e6:.0f} us", "-"
    )
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as directory:
        measure(table, Path(directory), args)
    print(describe())
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
