"""``weft demo``: pushes to two vLLM replicas on one machine, checked against Hugging Face."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from weft_rl.cli.console.output import connect
from weft_rl.cli.demo.processes import Process, interrupt_once
from weft_rl.contract.errors import TransferTimeoutError, WeftError
from weft_rl.progress import STARTING, ShownProgress, shown
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: Bound of fp32 log-probabilities, vLLM's against Hugging Face's of the same weights: measured
#: 1e-5 for peaked models. Weights that are stale by 1e-4 are off by more than 1e-3.
MAX_DIFFERENCE = 5e-5
_NUM_REPLICAS = 2
_PROMPT = [5, 17, 99, 200, 33, 81, 150, 7]
_START_SECONDS = 120.0
_READY_SECONDS = _PUSH_SECONDS = 60.0
_BASE_NAME = "tiny"
#: With --keep: seconds between the pushes of the LoRA trainer, and of the base's.
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
class _DemoPool:
    """Processes of the demo, and the results of its checks."""

    work: Path
    console: Console
    began: float
    processes: list[Process] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    coordinator: str = ""
    page: str = ""
    metrics: dict[str, str] = field(default_factory=dict)
    """URL of metrics, by process."""
    largest_difference: float = 0.0
    checks: int = 0

    def start(self, name: str, *args: str, env: dict[str, str] | None = None) -> Process:
        process = Process(name, args, self.work, {"OMP_NUM_THREADS": "1", **(env or {})})
        self.processes.append(process)
        return process

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def run_demo(*, keep: bool) -> int:
    """Run the demo; return the exit code: 0 if every difference is within the bound.

    Call it on the main thread: SIGTERM ends it, with all its processes, as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, interrupt_once)
    # This process makes the model and computes references, with one thread like all others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # transformers imports DeepSpeed where it is installed, which warns of the choice otherwise.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    work = Path(tempfile.mkdtemp(prefix="weft-demo-"))
    demo = _DemoPool(work, Console(width=max(100, Console().width)), time.monotonic())
    code = 1
    try:
        _run(demo)
        code = 0 if demo.largest_difference <= MAX_DIFFERENCE and demo.checks else 1
        result = "[bold red]demo FAILED[/]" if code else "[bold green]demo passed[/]"
        demo.say(
            f"\n{result}: {demo.checks} answers checked, largest "
            f"log-probability difference to Hugging Face {demo.largest_difference:.1e} "
            f"(bound {MAX_DIFFERENCE:.0e}), {time.monotonic() - demo.began:.0f} s in all"
        )
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


def _run(demo: _DemoPool) -> None:
    with shown("demo") as progress:
        lora, base = _start_all(demo, progress)
    traffic = ClientThreads(demo.urls, _BASE_NAME)
    try:
        _check(demo, "base@0", _BASE_NAME, None)
        _push(demo, base, "base@0")
        _check(demo, "base@1", _BASE_NAME, None)
        # Trained on base@1, and no other base is pushed under it: docs/rollouts.md says why.
        _push(demo, lora, "base@1")
        traffic.model = "math"
        _check(demo, "base@1", "math@1", "math@1")
        _push(demo, lora, "base@1")
        _check(demo, "base@1", "math@1", "math@1")
        _check(demo, "base@1", "math@2", "math@2")
        _check(demo, "base@1", "math", "math@2")
    finally:
        traffic.stop()
    if traffic.failures:
        raise WeftError(f"{len(traffic.failures)} requests failed, first: {traffic.failures[0]}")
    answered = ", ".join(f"{name} {n}" for name, n in sorted(traffic.answered.items()))
    demo.say(f"requests answered meanwhile, by the version each names: {answered}; none failed")
    demo.say(f"\n$ weft status -c {demo.coordinator}")
    status = [sys.executable, "-m", "weft_rl", "status", "-c", demo.coordinator]
    subprocess.run(status, env={**os.environ, "COLUMNS": str(demo.console.width)}, check=False)


def _start_all(demo: _DemoPool, progress: ShownProgress) -> tuple[Process, Process]:
    """Start all processes in any order; return the trainers, of the adapter and of the base."""
    progress.step("making a model")
    model_path, any_port = str(demo.work / "model"), "127.0.0.1:0"
    coordinator = demo.start(
        "coordinator", "-m", "weft_rl", "coordinator", "--listen", any_port,
        "--catalog", str(demo.work / "weft.db"), "--metrics", any_port,
        # Starting two engines on two cores starves everything else for seconds.
        "--lost-after-seconds", "60",
    )  # fmt: skip
    from weft_rl.cli.demo.tiny_model import make_model

    make_model(Path(model_path))
    demo.coordinator = coordinator.line_after("listening on ", 30)
    demo.metrics["coordinator"] = coordinator.line_after("metrics on ", 10)
    demo.page = coordinator.line_after("page on ", 10)
    demo.say(
        f"coordinator listens on {demo.coordinator}; starting {_NUM_REPLICAS} vLLM replicas, which "
        "takes about a minute"
    )
    replicas = [
        demo.start(
            name, "-m", "weft_rl", "rollout", "--coordinator", demo.coordinator,
            "--http-port", "0", "--replica-id", name, "--metrics", any_port,
            "--adapter-memory-gib", "0.25", "--staging-memory-gib", "0.25",
            "--", model_path, *_ENGINE_ARGS, env=_ENGINE_ENV,
        )
        for name in (f"replica-{i}" for i in range(_NUM_REPLICAS))
    ]  # fmt: skip
    lora, base = (
        demo.start(
            f"{kind}-trainer", "-m", "weft_rl.cli.demo.trainers",
            kind, demo.coordinator, model_path, str(demo.work),
        )
        for kind in ("lora", "base")
    )  # fmt: skip
    progress.step(lambda: _how_far(replicas))
    for replica in replicas:
        demo.urls.append(re.split(r"[\s,]", replica.line_after("serving on ", _START_SECONDS))[0])
        demo.metrics[replica.name] = replica.line_after("metrics on ", 10)
    progress.step("waiting for the trainers")
    for trainer in (lora, base):
        trainer.answer(_START_SECONDS)
    progress.step("waiting for the replicas to be ready")
    _wait_until_ready(demo.coordinator)
    seconds = time.monotonic() - demo.began
    demo.say(f"replicas answer on {', '.join(demo.urls)} after {seconds:.0f} s")
    return lora, base


def _how_far(replicas: Sequence[Process]) -> str:
    """Describe each replica's progress, from its log."""
    steps = [
        f"{replica.name} {re.sub(r' of /.*| [(].*', '', found)}"
        for replica in replicas
        if (found := replica.last_after(f"{STARTING}: "))
    ]
    return ", ".join(steps) or "the replicas' processes start"


def _wait_until_ready(coordinator: str) -> None:
    """Wait until every replica is ready: before that it refuses bare names."""
    until = time.monotonic() + _READY_SECONDS
    with connect(coordinator) as channel:
        stub = InspectServiceStub(channel)
        while True:
            listed = stub.ListReplicas(inspect_pb2.ListReplicasRequest(), timeout=_READY_SECONDS)
            states = [replica.state for replica in listed.replicas]
            if states.count(inspect_pb2.REPLICA_STATE_READY) == _NUM_REPLICAS:
                return
            if time.monotonic() > until:
                why = "; ".join(f"{r.replica_id}: {r.state_reason}" for r in listed.replicas)
                raise TransferTimeoutError(f"the replicas are not ready: {why}")
            time.sleep(0.1)


@cache
def _reference(base: Path, adapter: Path | None) -> Any:
    """Load the weights that the trainers saved with Hugging Face."""
    from weft_rl.cli.demo.tiny_model import load_model

    if adapter is None:
        return load_model(base)
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(base), adapter).eval()


def _push(demo: _DemoPool, trainer: Process, base: str) -> None:
    report = trainer.ask(f"push {base}", _PUSH_SECONDS)
    if report["vllm_imported"]:
        raise WeftError(f"{trainer.name} has vLLM loaded; a trainer must not need it")
    demo.say(
        f"[bold]{trainer.name}[/] pushed [bold]{report['version']}[/]: "
        f"{report['total_bytes']:,} bytes, served by all replicas after "
        f"{report['seconds'] * 1e3:.0f} ms"
    )


def _check(demo: _DemoPool, base: str, model: str, adapter: str | None) -> None:
    """Compare every replica's answer with Hugging Face's; both must be of the same version."""
    from weft_rl.cli.demo.tiny_model import log_probs

    expected_name = adapter or _BASE_NAME
    saved = demo.work / ("model" if base == "base@0" else base)
    reference = _reference(saved, demo.work / adapter if adapter else None)
    answers = [complete(url, model, _PROMPT) for url in demo.urls]
    worst = 0.0
    for answer in answers:
        if answer.model != expected_name:
            raise WeftError(f"{answer.model} answered a request for {model}, not {expected_name}")
        want = log_probs(reference, _PROMPT, answer.tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(answer.log_probs, want, strict=True)))
        demo.checks += 1
    demo.largest_difference = max(demo.largest_difference, worst)
    shown = " ".join(f"w{token}" for token in answers[0].tokens[:6])
    name = base if adapter is None else f"{model} on {base}"
    demo.say(f"  {name:<18} answered {shown} …   max |Δ log p| to Hugging Face {worst:.1e}")


def _push_until_interrupted(demo: _DemoPool) -> None:
    """Keep the demo running and pushing, until Ctrl-C."""
    demo.say(f"\nstill running:\n  a page to look at       [bold]{demo.page}[/]")
    for name, url in demo.metrics.items():
        demo.say(f"  metrics of {name:<12} {url}")
    demo.say(
        f"the trainers push math every {_LORA_SECONDS:.0f} s and the same base again every "
        f"{_BASE_SECONDS:.0f} s; press Ctrl-C to stop"
    )
    lora, base = demo.processes[-2:]
    # The base's trainer pushes the same weights again: the adapter's base does not change.
    orders = {lora: ("push base@1", _LORA_SECONDS), base: ("again", _BASE_SECONDS)}
    due = {trainer: time.monotonic() + seconds for trainer, (_, seconds) in orders.items()}
    try:
        while True:
            time.sleep(0.2)
            for trainer in [t for t, when in due.items() if time.monotonic() >= when]:
                order, seconds = orders[trainer]
                due[trainer] = time.monotonic() + seconds
                try:
                    report = trainer.ask(order, _PUSH_SECONDS)
                except (WeftError, OSError) as error:
                    demo.say(f"{trainer.name} pushes no more: {error}")
                    del due[trainer]
                else:
                    shutil.rmtree(demo.work / report["version"], ignore_errors=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)


# -- requests -----------------------------------------------------------------------------------

#: Pause between a client's requests: two engines share two cores with everything else here.
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Answer:
    """Completion: the model that answered, its tokens and their log-probabilities."""

    model: str
    tokens: list[int]
    log_probs: list[float]


def complete(url: str, model: str, prompt: list[int], max_tokens: int = 12) -> Answer:
    """Complete token ids greedily through ``/v1/completions``; blocks at most 60 s."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "logprobs": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            reply: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        error.add_note(error.read().decode("utf-8", "replace"))
        raise
    choice = reply["choices"][0]
    return Answer(reply["model"], choice["token_ids"], choice["logprobs"]["token_logprobs"])


class ClientThreads:
    """Client threads, one a replica, that request ``model`` over and over.

    ``answered`` counts answers by the version that they name; ``failures`` describes requests
    that failed.
    """

    def __init__(self, urls: list[str], base_name: str) -> None:
        self.answered: Counter[str] = Counter()
        self.failures: list[str] = []
        self.model = base_name
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(url, seed), daemon=True)
            for seed, url in enumerate(urls)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after their running requests; blocks for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, url: str, seed: int) -> None:
        number = seed
        while not self._stop.wait(_PAUSE_SECONDS):
            number += 7
            prompt = [2 + (number * k) % 250 for k in range(1, 9)]
            try:
                answer = complete(url, self.model, prompt, max_tokens=24)
                with self._lock:
                    self.answered[answer.model] += 1
            except OSError as error:
                with self._lock:
                    self.failures.append(f"{url}: {error}")
