"""``make fault-vllm``: a part of the kill matrix with real vLLM replicas.

One pool for all cases. The process that comes to the point is the coordinator or the
replica's own, neither of which knows of buckets in a worker or of a process below;
the victim is whichever the case names: the replica's process, vLLM's engine process
under it, or a worker under that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.pool import settled

# Before torch is imported: two engines share the cores with this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx

from benchmarks.machine import describe
from rollout_side.vllm_engine.worker.state import parent_of
from tests.fault.strikes import VICTIM, Strike
from tests.models import draw_base, load_hf, make_adapter, make_model
from tests.processes import await_ended, members, title
from tests.report import replace_rows
from tests.soak.checks import MAX_DIFFERENCE
from tests.soak.churn import Replicas
from tests.soak.traffic import Router, read_answer, request
from tests.soak.weights import FIRST_SEED, Referee
from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.errors import WeftError

REPLICAS = ("replica-0", VICTIM)
CASES = [
    ("replica", "at a bucket", "SIGKILL"),
    ("engine", "at a bucket", "SIGKILL"),
    ("worker", "at a bucket", "SIGSTOP"),
    ("replica", "inside commit", "SIGKILL"),
    ("engine", "inside commit", "SIGKILL"),
    ("worker", "inside commit", "SIGKILL"),
    ("worker", "inside commit", "SIGSTOP"),
    ("engine", "before begin", "SIGSTOP"),
    ("worker", "before begin", "SIGSTOP"),
    ("engine", "at a bucket", "SIGSTOP"),
    ("engine", "inside commit", "SIGSTOP"),
]
_README = Path(__file__).with_name("README.md")
_SECTION = "made by `make fault-vllm`"
_HEAD = ("who", "where", "signal", "push in hand", "its caller knew after", "next served after")
_PUSH_SECONDS, _STOP_SECONDS, _END_SECONDS, _SETTLE_SECONDS = 60.0, 12.0, 60.0, 60.0
#: The coordinator's; and what a push may take beyond it where a replica is stopped: 2 s, as is
#: promised, and as long as a push takes on this machine.
_STALL_SECONDS, _SLACK_SECONDS = 4.0, 4.0
_BUCKET_BYTES = 2**16
_PROMPT = [5, 17, 99, 200, 33, 81, 150, 7]


@dataclass(frozen=True)
class Outcome:
    """What a case showed; seconds from the strike."""

    push: str
    push_seconds: float
    recovery_seconds: float


class Pool:
    """A coordinator and two vLLM replicas, armed; used by one case after the other."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.model = make_model("qwen2", work / "model", seed=FIRST_SEED)
        self.trained = load_hf(self.model)
        self.referee = Referee(self.model)
        self.strikes = {
            "at a bucket": self._strike("coordinator", "at a bucket"),
            "inside commit": self._strike("vllm replica", "inside commit"),
        }
        command = (
            "-m", "tests.fault.victims", "weft_rl", "coordinator", "--listen", "127.0.0.1:0",
            "--catalog", str(work / "weft.db"), "--lost-after-seconds", "5",
            "--heartbeat-seconds", "0.5", "--stall-seconds", str(_STALL_SECONDS),
        )  # fmt: skip
        self.coordinator = Process("coordinator", command, work, self.strikes["at a bucket"].env)
        line = self.coordinator.line(lambda text: text.startswith("listening on "), 60)
        self.target = line.removeprefix("listening on ")
        env = self.strikes["inside commit"].env
        self.replicas = Replicas(
            work, self.target, self.model, REPLICAS, print, victims={VICTIM: env}
        )
        self.router = Router(self.target)
        self.adapter = make_adapter(self.model, work / "adapter", seed=FIRST_SEED)
        self.publisher, self.other = self._publisher("trainer"), self._publisher("other")
        self.pushed: dict[int, int] = {}

    def _publisher(self, trainer_id: str) -> Publisher:
        return Publisher(
            self.target, trainer_id=trainer_id, require=1, bucket_bytes=_BUCKET_BYTES,
            timeout_seconds=_PUSH_SECONDS, progress=None,
        )  # fmt: skip

    def _strike(self, role: str, point: str) -> Strike:
        directory = self.work / point.replace(" ", "-")
        directory.mkdir()
        return Strike(role, point, "", str(directory))

    def close(self) -> None:
        """End everything."""
        self.publisher.close()
        self.other.close()
        self.router.close()
        self.replicas.close()
        self.coordinator.stop()

    def pids(self) -> dict[str, int]:
        """Of the victim replica: its process, the engine's and the worker's."""
        replica = self.replicas.processes[VICTIM].pid
        below = members(replica)
        (worker,) = [pid for pid in below if "VLLM::Worker" in title(pid)]
        return {"replica": replica, "engine": parent_of(worker), "worker": worker}

    def push(self, seed: int) -> str:
        """Push a base; the version, or why it failed."""
        draw_base(self.trained, seed)
        try:
            version = self.publisher.push_base(self.trained).version
        except WeftError as error:
            return error.reason
        self.pushed[version.version] = seed
        return str(version)

    def run(self, who: str, where: str, signum: str, seed: int) -> Outcome:
        """One case; leaves the pool whole."""
        assert self.push(seed).startswith("base@"), "the push before failed"
        below = members(self.replicas.processes[VICTIM].pid)
        with ThreadPoolExecutor(2) as threads:
            if where == "before begin":
                pushing, struck_at, pid = self._strike_idle(who, signum, threads, seed + 1)
            else:
                pushing, struck_at, pid = self._strike_at(where, who, signum, threads, seed + 1)
            if signum == "SIGSTOP":
                waiting = threads.submit(self._push_other)
                time.sleep(_STOP_SECONDS)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                waited = waiting.result(_PUSH_SECONDS)
                most = _STALL_SECONDS + _SLACK_SECONDS
                assert waited <= most, f"the other policy's push took {waited:.1f} s"
            push, pushed_at = pushing.result(_PUSH_SECONDS + 10)
            if signum == "SIGSTOP":
                took = pushed_at - struck_at
                assert took <= most, f"the push took {took:.1f} s: {push}"
        if signum == "SIGKILL":
            # Whoever of the three was killed, the others end by themselves.
            self.replicas.processes[VICTIM].wait(_END_SECONDS)
            await_ended(below, _END_SECONDS, "the test")
            self._check_survivor()
            self.replicas.start(VICTIM)
            self.replicas.await_ready(VICTIM)
        again, served_at = self._timed_push(seed + 2)
        assert again.startswith("base@"), f"the push after failed: {again}"
        self._check_all()
        return Outcome(push, pushed_at - struck_at, served_at - struck_at)

    def _strike_at(
        self, where: str, who: str, signum: str, threads: ThreadPoolExecutor, seed: int
    ) -> tuple[Future[tuple[str, float]], float, int]:
        """Strike at a point of a push; that push, when, and whom."""
        strike = self.strikes[where]
        strike.struck.unlink(missing_ok=True)
        strike.target.write_text(f"{self.pids()[who]} {signum}")
        strike.armed.touch()
        pushing = threads.submit(self._timed_push, seed)
        struck_at, pid = strike.await_struck(_PUSH_SECONDS)
        strike.armed.unlink()
        return pushing, struck_at, pid

    def _strike_idle(
        self, who: str, signum: str, threads: ThreadPoolExecutor, seed: int
    ) -> tuple[Future[tuple[str, float]], float, int]:
        """Strike before a push, which forms a new group."""
        self.publisher.close()
        self.publisher = self._publisher("trainer")
        pid = self.pids()[who]
        os.kill(pid, getattr(signal, signum))
        struck_at = time.time()
        return threads.submit(self._timed_push, seed), struck_at, pid

    def _push_other(self) -> float:
        """Push the adapter of another trainer; how long it took."""
        began = time.monotonic()
        self.other.push_adapter(self.adapter, "math")
        return time.monotonic() - began

    def _timed_push(self, seed: int) -> tuple[str, float]:
        return self.push(seed), time.time()

    def _check_survivor(self) -> None:
        version = self.router.pool().version_vector.base
        self._check_answer(self.replicas.urls[REPLICAS[0]], version)

    def _check_all(self) -> None:
        """Both serve the one version that was pushed last."""
        pool = settled(self.router.pool, _SETTLE_SECONDS, len(REPLICAS))
        assert pool.version_vector.base == max(self.pushed)
        for replica in pool.replicas:
            assert replica.version_vector.base == max(self.pushed)
            self._check_answer(replica.http_url, max(self.pushed))

    def _check_answer(self, url: str, version: int) -> None:
        path, body = request("tiny", _PROMPT, 12, names_base=True)
        reply = httpx.post(f"{url}{path}", json=body, timeout=60)
        answer = read_answer(
            reply.raise_for_status().json(), url=url, asked="tiny", prompt=tuple(_PROMPT),
            floor={}, ended_at=0.0,
        )  # fmt: skip
        assert answer.spans == ((version, 0, 12),), f"{url} says {answer.spans}, not {version}"
        want = self.referee.log_probs(self.pushed[version], None, _PROMPT, answer.tokens)
        worst = max(abs(a - b) for a, b in zip(answer.log_probs, want, strict=True))
        assert worst <= MAX_DIFFERENCE, f"{url} is off by {worst:.1e}"


def main() -> int:
    """Run the cases whose text holds all given words; 0 only if all passed."""
    words = sys.argv[1:]
    cases = [c for c in CASES if all(w in " ".join(c) for w in words)]
    rows: dict[tuple[str, ...], tuple[Any, ...]] = {}
    work = Path(tempfile.mkdtemp(prefix="weft-fault-"))
    pool = Pool(work)
    try:
        for number, case in enumerate(cases):
            outcome = pool.run(*case, seed=10 * (number + 1))
            rows[case] = (
                outcome.push,
                f"{outcome.push_seconds:.1f} s",
                f"{outcome.recovery_seconds:.1f} s",
            )
            print(f"ok    {', '.join(case)}: {outcome}", flush=True)
    except Exception:
        print(f"FAIL  {', '.join(case)} (logs in {work})\n{traceback.format_exc()}")
    finally:
        pool.close()
    if len(rows) == len(cases):
        shutil.rmtree(work)
    replace_rows(_README, _SECTION, _HEAD, CASES, rows, facts=describe())
    print(f"{len(rows)} passed, {len(cases) - len(rows)} failed or not run")
    return 0 if len(rows) == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
