"""``weft demo``: the whole path on one machine, checked against Hugging Face."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weft_rl.cli.console.connection import connect
from weft_rl.cli.demo.openai_client import Answer, complete, list_models
from weft_rl.cli.demo.processes import Process, interrupt_once
from weft_rl.cli.demo.traffic import Traffic
from weft_rl.cli.lists.status import show_status
from weft_rl.contract.errors import TransferTimeoutError, WeftError
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: fp32 bounds: vLLM against Hugging Face on the same weights (measured 1e-5 for
#: peaked models; weights that are stale by 1e-4 are off by more than 1e-3).
MAX_DIFFERENCE = 5e-5
_NUM_REPLICAS = 2
_PROMPT = [5, 17, 99, 200, 33, 81, 150, 7]
_START_SECONDS = 120.0
_READY_SECONDS = _PUSH_SECONDS = 60.0
_BASE_NAME = "tiny"
#: With --keep, from push to push of the two trainers.
_LORA_SECONDS, _BASE_SECONDS = 5.0, 30.0
_ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_ENGINE_ARGS = (
    "--served-model-name", _BASE_NAME, "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "256", "--max-num-seqs", "8",
    "--enable-lora", "--max-lora-rank", "8", "--max-loras", "3",
)  # fmt: skip


@dataclass
class _Demo:
    """The demo's processes, and what was seen of them."""

    work: Path
    console: Console
    processes: list[Process] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    coordinator: str = ""
    page: str = ""
    metrics: dict[str, str] = field(default_factory=dict)
    """URLs of metrics, by process."""
    largest_difference: float = 0.0
    checks: int = 0

    def start(self, name: str, *args: str, env: dict[str, str] | None = None) -> Process:
        process = Process(name, args, self.work, {"OMP_NUM_THREADS": "1", **(env or {})})
        self.processes.append(process)
        return process

    def note_metrics(self, process: Process) -> None:
        """Learn where a process's metrics are, from what it prints once it listens."""
        line = process.line(lambda text: text.startswith("metrics on "), 10)
        self.metrics[process.name] = line.removeprefix("metrics on ")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)


def run_demo(*, keep: bool) -> int:
    """Run the demo; return the exit code: 0 only if every difference is within bounds.

    Call it on the main thread: SIGTERM ends it as Ctrl-C does, with all its processes.
    """
    signal.signal(signal.SIGTERM, interrupt_once)
    # This process makes the model and computes references, one thread like all others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # DeepSpeed, where it is installed, is imported by transformers and warns of the choice.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    work = Path(tempfile.mkdtemp(prefix="weft-demo-"))
    demo = _Demo(work, Console(width=max(100, Console().width)))
    began = time.monotonic()
    code = 1
    try:
        _run(demo, began)
        ok = demo.largest_difference <= MAX_DIFFERENCE and demo.checks > 0
        colour, word = ("green", "passed") if ok else ("red", "FAILED")
        demo.say(
            f"\n[bold {colour}]demo {word}[/]: {demo.checks} answers checked, largest "
            f"log-probability difference to Hugging Face {demo.largest_difference:.1e} "
            f"(bound {MAX_DIFFERENCE:.0e}), {time.monotonic() - began:.0f} s in all"
        )
        code = 0 if ok else 1
        if keep:
            _push_until_interrupted(demo)
    except WeftError as error:
        demo.say(f"[bold red]demo failed[/]: {error}\nlogs are kept in {work}")
    finally:
        for process in reversed(demo.processes):
            process.stop()
        if code == 0:
            shutil.rmtree(work, ignore_errors=True)
    return code


def _run(demo: _Demo, began: float) -> None:
    model_path = demo.work / "model"
    _start_all(demo, model_path, began)
    traffic = Traffic(demo.urls, _BASE_NAME)
    lora, base = demo.processes[-2:]
    pushes = []
    try:
        reference = _Reference(model_path, demo.work)
        _check(demo, reference, "base@0", _BASE_NAME, None)
        pushes.append(_push(demo, base, "base@0"))
        _check(demo, reference, "base@1", _BASE_NAME, None)
        # Trained on base@1, and no other base is pushed under it: docs/modes.md says why.
        pushes.append(_push(demo, lora, "base@1"))
        traffic.model = "math"
        _check(demo, reference, "base@1", "math@1", "math@1")
        pushes.append(_push(demo, lora, "base@1"))
        _check(demo, reference, "base@1", "math@1", "math@1")
        _check(demo, reference, "base@1", "math@2", "math@2")
        _check(demo, reference, "base@1", "math", "math@2")
    finally:
        traffic.stop()
    if traffic.failures:
        raise WeftError(f"{len(traffic.failures)} requests failed, first: {traffic.failures[0]}")
    _show_pushes(demo, pushes)
    answered = ", ".join(f"{name} {n}" for name, n in sorted(traffic.answered.items()))
    demo.say(f"requests answered meanwhile, by the version each names: {answered}; none failed")
    demo.say(f"\n$ weft status -c {demo.coordinator}")
    show_status(
        demo.coordinator, watch=False, json_output=False, interval_seconds=1, console=demo.console
    )
    _show_grpcurl(demo)


def _start_all(demo: _Demo, model_path: Path, began: float) -> None:
    """Start coordinator, replicas and trainers; they find each other in any order."""
    coordinator = demo.start(
        "coordinator", "-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0",
        "--catalog", str(demo.work / "weft.db"), "--metrics", "127.0.0.1:0",
        # Starting two engines on two cores starves everything else for seconds.
        "--lost-after-seconds", "60",
    )  # fmt: skip
    from weft_rl.cli.demo.tiny_model import make_model

    make_model(model_path)
    line = coordinator.line(lambda text: text.startswith("listening on "), 30)
    demo.coordinator = line.removeprefix("listening on ")
    demo.note_metrics(coordinator)
    line = coordinator.line(lambda text: text.startswith("page on "), 10)
    demo.page = line.removeprefix("page on ")
    demo.say(f"coordinator listens on {demo.coordinator}; starting {_NUM_REPLICAS} vLLM replicas")
    replicas = [
        demo.start(
            f"replica-{i}",
            "-m",
            "weft_rl",
            "rollout",
            "--coordinator",
            demo.coordinator,
            "--http-port",
            "0",
            "--replica-id",
            f"replica-{i}",
            "--metrics",
            "127.0.0.1:0",
            "--adapter-memory-gib",
            "0.25",
            "--staging-memory-gib",
            "0.25",
            "--",
            str(model_path),
            *_ENGINE_ARGS,
            env=_ENGINE_ENV,
        )
        for i in range(_NUM_REPLICAS)
    ]
    trainers = [
        demo.start(
            f"{kind}-trainer",
            "-m",
            "weft_rl.cli.demo.trainers",
            kind,
            demo.coordinator,
            str(model_path),
            str(demo.work),
        )
        for kind in ("lora", "base")
    ]
    for replica in replicas:
        line = replica.line(lambda text: text.startswith("serving on "), _START_SECONDS)
        match = re.search(r"http://[^\s,]+", line)
        assert match is not None
        demo.urls.append(match.group())
        demo.note_metrics(replica)
    for trainer in trainers:
        trainer.answer(_START_SECONDS)
    _wait_until_ready(demo.coordinator)
    demo.say(f"replicas answer on {', '.join(demo.urls)} after {time.monotonic() - began:.0f} s")


def _wait_until_ready(coordinator: str) -> None:
    """Wait until every replica is ready: one that has not heard of the pool yet refuses bare
    names."""
    until = time.monotonic() + _READY_SECONDS
    with connect(coordinator) as channel:
        stub = InspectServiceStub(channel)
        while True:
            listed = stub.ListReplicas(inspect_pb2.ListReplicasRequest(), timeout=_READY_SECONDS)
            is_ready = [r.state == inspect_pb2.REPLICA_STATE_READY for r in listed.replicas]
            if is_ready.count(True) == _NUM_REPLICAS:
                return
            if time.monotonic() > until:
                why = "; ".join(f"{r.replica_id}: {r.state_reason}" for r in listed.replicas)
                raise TransferTimeoutError(f"the replicas are not ready: {why}")
            time.sleep(0.1)


class _Reference:
    """Hugging Face models of the weights that the trainers saved."""

    def __init__(self, model_path: Path, saved: Path) -> None:
        self._paths = {"base@0": model_path}
        self._saved = saved
        self._models: dict[tuple[str, str | None], Any] = {}

    def log_probs(self, base: str, adapter: str | None, tokens: list[int]) -> list[float]:
        from weft_rl.cli.demo.tiny_model import load_model, log_probs

        if (base, adapter) not in self._models:
            model = load_model(self._paths.get(base, self._saved / base))
            if adapter is not None:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, self._saved / adapter).eval()
            self._models[base, adapter] = model
        return log_probs(self._models[base, adapter], _PROMPT, tokens)


def _push(demo: _Demo, trainer: Process, base: str) -> dict[str, Any]:
    report = _told(trainer, f"push {base}")
    if report["vllm_imported"]:
        raise WeftError(f"{trainer.name} has vLLM loaded; a trainer must not need it")
    demo.say(
        f"[bold]{trainer.name}[/] pushed [bold]{report['version']}[/]: {report['bytes']:,} bytes, "
        f"served by all replicas after {report['seconds'] * 1e3:.0f} ms"
    )
    return report


def _told(trainer: Process, order: str) -> dict[str, Any]:
    trainer.tell(order)
    return trainer.answer(_PUSH_SECONDS)


def _check(demo: _Demo, reference: _Reference, base: str, model: str, adapter: str | None) -> None:
    """Ask every replica and compare with Hugging Face; both must name the version."""
    expected_name = adapter or _BASE_NAME
    answers: list[Answer] = [complete(url, model, _PROMPT) for url in demo.urls]
    worst = 0.0
    for answer in answers:
        if answer.model != expected_name:
            raise WeftError(f"asked for {model}, {answer.model} answered, not {expected_name}")
        want = reference.log_probs(base, adapter, answer.tokens)
        diffs = [abs(a - b) for a, b in zip(answer.log_probs, want, strict=True)]
        worst = max(worst, *diffs)
        demo.checks += 1
    demo.largest_difference = max(demo.largest_difference, worst)
    shown = " ".join(f"w{token}" for token in answers[0].tokens[:6])
    name = base if adapter is None else f"{model} on {base}"
    demo.say(f"  {name:<18} answered {shown} …   max |Δ log p| to Hugging Face {worst:.1e}")


def _show_pushes(demo: _Demo, pushes: list[dict[str, Any]]) -> None:
    table = Table(title="pushes", title_justify="left")
    for column in ("version", "bytes", "total", "forming", "staging", "committing", "pause"):
        table.add_column(column, justify="left" if column == "version" else "right")
    for push in pushes:
        times = [
            f"{push[key] * 1e3:.1f} ms"
            for key in (
                "seconds", "forming_seconds", "staging_seconds", "committing_seconds",
                "pause_seconds",
            )
        ]  # fmt: skip
        table.add_row(push["version"], f"{push['bytes']:,}", *times)
    demo.console.print(table)
    demo.say(f"models that any replica's /v1/models lists: {', '.join(list_models(demo.urls[0]))}")


def _show_grpcurl(demo: _Demo) -> None:
    demo.say("\nlook around with grpcurl (or buf curl) while a coordinator runs:")
    for method in ("list", "weft.v1.InspectService/GetPool", "weft.v1.InspectService/WatchEvents"):
        demo.say(f"  grpcurl -plaintext {demo.coordinator} {method}")


def _push_until_interrupted(demo: _Demo) -> None:
    """Keep the demo running and pushing, until Ctrl-C."""
    demo.say("\nstill running:")
    demo.say(f"  a page to look at       [bold]{demo.page}[/]")
    for name, url in demo.metrics.items():
        demo.say(f"  metrics of {name:<12} {url}")
    demo.say(
        f"the trainers push math every {_LORA_SECONDS:.0f} s and the same base again every "
        f"{_BASE_SECONDS:.0f} s; press Ctrl-C to stop"
    )
    lora, base = demo.processes[-2:]
    now = time.monotonic()
    due = {lora: now + _LORA_SECONDS, base: now + _BASE_SECONDS}
    try:
        while True:
            time.sleep(0.2)
            # The same weights under a new number are no other base below an adapter.
            for trainer, order, seconds in (
                (lora, "push base@1", _LORA_SECONDS),
                (base, "again", _BASE_SECONDS),
            ):
                if time.monotonic() >= due.get(trainer, float("inf")):
                    due[trainer] = time.monotonic() + seconds
                    try:
                        report = _told(trainer, order)
                    except (WeftError, OSError) as error:
                        demo.say(f"{trainer.name} pushes no more: {error}")
                        del due[trainer]
                    else:
                        shutil.rmtree(demo.work / report["version"], ignore_errors=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)
