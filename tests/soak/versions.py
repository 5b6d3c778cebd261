"""Every answer is what the versions that it names would say, while all is moving.

Real vLLM replicas that come and go, three trainers that push at random, clients that
ask all the while; each log-probability is compared with transformers and PEFT.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.replicas import running_coordinator
from tests.models import make_model
from tests.soak.checks import MEAN_DIFFERENCE, Answer, Verdict, check
from tests.soak.churn import Replicas
from tests.soak.ledger import Ledger
from tests.soak.traffic import Clients, Router
from tests.soak.trainers import POLICIES, push_at_random
from tests.soak.weights import FIRST_SEED, Referee
from tests.waits import until
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.v1 import inspect_pb2 as pb

REPLICAS = ("replica-0", "replica-1")
_NUM_CLIENTS = 2
_END_SECONDS = 240.0
_SETTLE_SECONDS = 30.0
_SHOWN_PROBLEMS = 20


@dataclass
class Outcome:
    """What the soak saw."""

    seconds: float = 0.0
    answered: Counter[str] = field(default_factory=Counter)
    """Answers by kind."""
    spanning: int = 0
    """Of them, those to which more than one base version contributed."""
    excused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    """Replicas that were ended, by signal."""
    pushed: dict[str, int] = field(default_factory=dict)
    num_log_probs: int = 0
    worst: float = 0.0
    sum_differences: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean difference of a log-probability."""
        return self.sum_differences / max(1, self.num_log_probs)


class Judge:
    """Checks answers against the referee."""

    def __init__(self, base: Path, ledger: Ledger, outcome: Outcome) -> None:
        self._referee = Referee(base)
        self._ledger, self._outcome = ledger, outcome

    def judge(self, answer: Answer) -> None:
        """Check one answer, once all pushes that it may name have returned."""
        try:
            verdict = self._verdict(answer)
        except LookupError as error:
            verdict = Verdict(str(error))
        outcome = self._outcome
        if verdict.problem:
            outcome.problems.append(f"{answer.asked} at {answer.url}: {verdict.problem}: {answer}")
            return
        kind = "base" if answer.adapter is None else ("exact" if "@" in answer.asked else "bare")
        names_base = "base named" if answer.spans is not None else "base not named"
        outcome.answered[f"{kind}, {names_base}"] += 1
        outcome.spanning += verdict.num_bases > 1
        outcome.num_log_probs += len(verdict.differences)
        outcome.worst = max(outcome.worst, *verdict.differences)
        outcome.sum_differences += sum(verdict.differences)

    def _verdict(self, answer: Answer) -> Verdict:
        adapter = answer.adapter
        of_adapter = None if adapter is None else (adapter.policy, self._seed(adapter))
        known: dict[int, list[float]] = {}

        def expected(base: int) -> list[float]:
            if base not in known:
                seed = self._seed(PolicyVersion(BASE_POLICY, base))
                known[base] = self._referee.log_probs(
                    seed, of_adapter, answer.prompt, answer.tokens
                )
            return known[base]

        floor = answer.floor[BASE_POLICY]
        return check(answer, self._ledger.bases(floor, answer.ended_at), expected)

    def _seed(self, version: PolicyVersion) -> int:
        seed = self._ledger.seed(version)
        if seed is None:
            raise LookupError(f"it names {version}, which no push returned")
        return seed


def soak(work: Path, *, minutes: float, seed: int, say: Callable[[str], None]) -> Outcome:
    """Run it; everything that is random follows from ``seed``, what it meets does not."""
    outcome, ledger, stopping = Outcome(), Ledger(), threading.Event()
    base = make_model("qwen2", work / "model", seed=FIRST_SEED)
    judge = Judge(base, ledger, outcome)
    with contextlib.ExitStack() as stack:
        # Ends last: a replica is told to stop once the thread that started it has ended.
        threads = stack.enter_context(ThreadPoolExecutor(len(POLICIES) + 1))
        coordinator = stack.enter_context(running_coordinator(work, lost_after_seconds=15))
        replicas = Replicas(work, coordinator.target, base, REPLICAS, say)
        stack.callback(replicas.close)
        say(f"replicas answer; coordinator {coordinator.target}")
        began = time.monotonic()
        clients = Clients(
            coordinator.target, ledger, replicas.is_going, outcome.problems, _NUM_CLIENTS, seed
        )
        running = [
            threads.submit(
                push_at_random, coordinator.target, base, policy, ledger,
                random.Random(f"{seed}-{policy}"), stopping,
            )
            for policy in POLICIES
        ]  # fmt: skip
        running.append(threads.submit(replicas.churn, random.Random(f"{seed}-churn"), stopping))
        try:
            _judge_until(began + minutes * 60, clients.answers, judge, running, outcome, say)
        finally:
            stopping.set()
            wait(running)
        clients.stop()
        outcome.seconds = time.monotonic() - began
        for thread in running:
            error = thread.exception(_END_SECONDS)
            if error is not None:
                outcome.problems.append(f"a push, or a replica's return, failed: {error!r}")
        while not clients.answers.empty():
            judge.judge(clients.answers.get())
        outcome.problems += _state_at_end(coordinator.target, ledger)
        outcome.excused, outcome.ended = clients.excused, replicas.ended
        outcome.pushed = {policy: len(ledger.newest(policy, 10**6)) for policy in POLICIES}
        outcome.pushed[BASE_POLICY] -= 1  # base@0 was there
    _check_totals(outcome)
    return outcome


def _judge_until(
    end: float,
    answers: queue.Queue[Answer],
    judge: Judge,
    running: list[Future[None]],
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    """Check answers as they come, a while after they came: what they name has returned."""
    waiting: list[Answer] = []
    said = time.monotonic()
    while time.monotonic() < end and len(outcome.problems) < _SHOWN_PROBLEMS:
        if any(thread.done() for thread in running):
            return
        time.sleep(0.2)
        while not answers.empty():
            waiting.append(answers.get())
        ripe = [a for a in waiting if a.ended_at < time.monotonic() - 10.0]
        waiting = waiting[len(ripe) :]
        for answer in sorted(ripe, key=lambda a: (a.floor[BASE_POLICY], a.named)):
            judge.judge(answer)
        if time.monotonic() - said > 15.0:
            said = time.monotonic()
            total = sum(outcome.answered.values())
            say(f"{total} answers checked, largest difference {outcome.worst:.1e}")
    for answer in waiting:
        answers.put(answer)


def _state_at_end(target: str, ledger: Ledger) -> list[str]:
    """What is wrong with the pool once everything has stopped."""
    router = Router(target)
    problems = list[str]()

    def is_well() -> bool:
        problems[:] = _pool_problems(router.pool(), ledger)
        return not problems

    try:
        with contextlib.suppress(AssertionError):
            until(is_well, _SETTLE_SECONDS, every_seconds=0.2)
        return problems
    finally:
        router.close()


def _pool_problems(pool: pb.GetPoolResponse, ledger: Ledger) -> list[str]:
    problems = []
    if [r.replica_id for r in pool.replicas] != list(REPLICAS):
        problems.append(f"the pool has {[r.replica_id for r in pool.replicas]}")
    if pool.active_transfers:
        problems.append(f"{len(pool.active_transfers)} transfers are still under way")
    vector, floor = pool.version_vector, ledger.floor()
    served = {BASE_POLICY: vector.base, **{a.policy: a.alias for a in vector.adapters}}
    if served != dict(floor):
        problems.append(f"the pool serves {served}, pushed were {dict(floor)}")
    for replica in pool.replicas:
        if replica.state != pb.REPLICA_STATE_READY or replica.version_vector != vector:
            problems.append(f"{replica.replica_id} is not ready: {replica.state_reason}")
    return problems


def _check_totals(outcome: Outcome) -> None:
    """A soak that did nothing passes nothing."""
    if outcome.mean > MEAN_DIFFERENCE:
        outcome.problems.append(f"log-probabilities differ by {outcome.mean:.1e} on average")
    for policy, count in outcome.pushed.items():
        if not count:
            outcome.problems.append(f"{policy} was never pushed")
    for kind in ("base", "bare", "exact"):
        for names in ("base named", "base not named"):
            if not outcome.answered[f"{kind}, {names}"]:
                outcome.problems.append(f"no answer of the kind: {kind}, {names}")
