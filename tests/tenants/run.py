"""Many tenants over two real vLLM replicas whose slots hold few of their versions."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.replicas import (
    PROMPT,
    ask,
    running_coordinator,
    serving_url,
    start_replica,
    wait_ready,
)
from tests.models import VOCAB, make_model
from tests.processes import Holding, holding
from tests.soak.traffic import Router
from tests.tenants.answers import MIN_APART, Answer, Judge, least_apart
from tests.tenants.fairness import MAX_OVERTAKEN, Push, largest_lead, most_overtaken
from tests.tenants.models import Tenant
from tests.waits import until
from trainer_side import Publisher, RolloutClient, Sampling
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.errors import NotFoundError
from weft_rl.contract.names import PolicyVersion
from weft_rl.v1 import inspect_pb2 as pb

#: vLLM's slots; its cache of adapters on the host has as many places.
SLOTS = 4
REPLICAS = ("replica-0", "replica-1")
_ARGS = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", str(SLOTS))
#: What a worker logs when vLLM asks for an adapter that it holds no more.
_RELOADED = "is loaded from memory"
_GREEDY = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
_SAMPLED = Sampling(temperature=1, max_tokens=24, ignore_eos=True)
_FIRST = Sampling(temperature=0, max_tokens=1, ignore_eos=True)
_SECONDS = 120.0


@dataclass
class Outcome:
    """What a run saw."""

    num_policies: int
    num_versions: int
    pushes: list[Push] = field(default_factory=list)
    """Of the first versions, by all tenants as fast as they can."""
    later_pushes: list[Push] = field(default_factory=list)
    """Of one more version each, at once, while everything is asked for."""
    evicted: list[float] = field(default_factory=list)
    """Seconds to the first token of versions that had lost their slot."""
    held: list[float] = field(default_factory=list)
    """The same right afterwards."""
    num_reloads: int = 0
    """Adapters that vLLM asked for again, in all."""
    apart: float = 0.0
    during_pushes: int = 0
    """Answers that were made while the later versions were pushed."""
    kept: list[int] = field(default_factory=list)
    """Versions that can be asked for at the end, by policy."""
    trainer: Holding | None = None
    num_answers: int = 0
    num_logprobs: int = 0
    worst: float = 0.0
    mean: float = 0.0
    problems: list[str] = field(default_factory=list)


def run(
    work: Path, *, num_policies: int, num_versions: int, seed: int, say: Callable[[str], None]
) -> Outcome:
    """Run it; what is asked, and in which order, follows from ``seed``."""
    base = make_model("qwen2", work / "model")
    tenants = [Tenant(base, index) for index in range(num_policies)]
    say(f"{num_policies} tenants are made")
    outcome = Outcome(num_policies, num_versions)
    with ExitStack() as stack:
        options = ("--retain-versions", str(num_versions))
        target = stack.enter_context(running_coordinator(work, options=options)).target
        replicas = []
        for name in REPLICAS:
            debug = ("--log-level", "debug")
            replicas.append(start_replica(work, target, name, base, *_ARGS, options=debug))
            stack.callback(replicas[-1].stop)
        urls = {process.name: serving_url(process) for process in replicas}
        for name, url in urls.items():
            wait_ready(target, name, url)
        say("two replicas serve")
        publishers = [
            stack.enter_context(
                Publisher(
                    target, trainer_id=f"trainer-of-{tenant.policy}", progress=None,
                    timeout_seconds=_SECONDS,
                )
            )
            for tenant in tenants
        ]  # fmt: skip
        client = stack.enter_context(RolloutClient(target, timeout_seconds=_SECONDS))
        _Run(outcome, tenants, publishers, client, target, replicas, urls, seed, say).all()
    return outcome


@dataclass
class _Run:
    outcome: Outcome
    tenants: list[Tenant]
    publishers: list[Publisher]
    client: RolloutClient
    target: str
    replicas: list[Process]
    urls: dict[str, str]
    seed: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.judge = Judge({tenant.policy: tenant for tenant in self.tenants})
        self.rng = random.Random(self.seed)

    def all(self) -> None:
        """Every part, in order, and what they found."""
        outcome, last = self.outcome, self.outcome.num_versions
        outcome.pushes = self._push(range(1, last + 1))
        outcome.trainer = holding(os.getpid())
        self.say(f"{len(outcome.pushes)} versions are pushed")
        self._check_fairness(outcome.pushes)
        first = [tenant.version(n) for tenant in self.tenants for n in range(1, last + 1)]
        self._ask_all(first)
        self.say(f"{len(first)} versions have answered at both replicas")
        self._time_first_tokens(first)
        self.say("first tokens are timed")
        self._ask_while_pushing(last + 1)
        self.say(f"{outcome.during_pushes} answers came while all pushed once more")
        self._check_fairness(outcome.later_pushes)
        self._check_end(range(2, last + 2))
        outcome.num_reloads = self._num_reloads()
        self.judge.check_mean()
        outcome.problems += self.judge.problems
        outcome.num_answers, outcome.num_logprobs = self.judge.num_answers, self.judge.num_logprobs
        outcome.worst, outcome.mean = self.judge.worst, self.judge.mean

    # -- pushes -------------------------------------------------------------------

    def _push(self, numbers: Sequence[int]) -> list[Push]:
        """All tenants at once, each one version after the other, as fast as they can."""
        barrier = threading.Barrier(len(self.tenants))

        def push(tenant: Tenant, publisher: Publisher) -> list[Push]:
            pushes = []
            barrier.wait(_SECONDS)
            for number in numbers:
                tenant.draw(number)
                began = time.monotonic()
                version, report = publisher.push_adapter(tenant.model, tenant.policy)
                pushes.append(Push(version, began, time.monotonic()))
                if version != tenant.version(number):
                    self.outcome.problems.append(f"{tenant.version(number)} became {version}")
                if report.num_replicas != len(REPLICAS) or report.remarks:
                    self.outcome.problems.append(f"{version}: {report}")
            return pushes

        with ThreadPoolExecutor(len(self.tenants)) as threads:
            every = list(threads.map(push, self.tenants, self.publishers))
        return [push for pushes in every for push in pushes]

    def _check_fairness(self, pushes: Sequence[Push]) -> None:
        overtaken, who = most_overtaken(pushes)
        if overtaken > MAX_OVERTAKEN:
            self.outcome.problems.append(f"not fair: {overtaken} pushes of {who}")
        if (lead := largest_lead(pushes)) > MAX_OVERTAKEN:
            self.outcome.problems.append(f"not fair: one tenant was ahead by {lead} pushes")

    # -- answers ------------------------------------------------------------------

    def _generate(
        self, version: PolicyVersion, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Answer]:
        groups = self.client.generate(prompts, model=version, sampling=sampling)
        return [
            Answer(
                asked=version,
                named=group.samples[0].adapter,
                replica=group.replica_ids[0],
                prompt=group.prompt_token_ids,
                tokens=group.samples[0].token_ids.tolist(),
                logprobs=group.samples[0].logprobs.tolist(),
            )
            for group in groups
        ]

    def _ask_all(self, versions: Sequence[PolicyVersion]) -> None:
        """Every version at both replicas: all but the last few have lost their slots."""
        before, found = self._num_reloads(), []
        for version in versions:
            answers = self._generate(version, [PROMPT] * len(REPLICAS), _GREEDY)
            if {answer.replica for answer in answers} != set(REPLICAS):
                self.outcome.problems.append(f"{version} was not asked at both replicas")
            found += answers
        for answer in found:
            self.judge.judge(answer)
        self.outcome.apart = least_apart(found)
        if self.outcome.apart < MIN_APART:
            self.outcome.problems.append(f"answers are too much alike: {self.outcome.apart:.1e}")
        reloads = self._num_reloads() - before
        if reloads < (len(versions) - SLOTS) * len(REPLICAS):
            self.outcome.problems.append(f"only {reloads} adapters were evicted and loaded again")

    def _time_first_tokens(self, versions: Sequence[PolicyVersion]) -> None:
        """In the order in which they were asked before, so that each was asked longest ago; then
        once more, where it has its slot."""
        before = self._num_reloads()
        for version in versions:
            for found in (self.outcome.evicted, self.outcome.held):
                prompt = self.rng.choices(range(4, VOCAB), k=len(PROMPT))
                began = time.perf_counter()
                (answer,) = self._generate(version, [prompt], _FIRST)
                found.append(time.perf_counter() - began)
                self.judge.judge(answer)
        if (reloads := self._num_reloads() - before) != len(versions):
            self.outcome.problems.append(f"{len(versions)} evicted and as many held: {reloads}")

    def _ask_while_pushing(self, number: int) -> None:
        """Every tenant's versions are asked for while all push once more."""
        over = threading.Event()

        def ask_all(tenant: Tenant) -> list[Answer]:
            rng, found = random.Random(f"{self.seed}-{tenant.policy}"), list[Answer]()
            while not over.is_set():
                version = tenant.version(rng.randrange(2, number))  # the first one is retired
                prompts = [rng.choices(range(4, VOCAB), k=rng.randint(3, 20)) for _ in REPLICAS]
                found += self._generate(version, prompts, _SAMPLED)
            return found

        with ThreadPoolExecutor(len(self.tenants)) as threads:
            asking = [threads.submit(ask_all, tenant) for tenant in self.tenants]
            try:
                self.outcome.later_pushes = self._push([number])
            finally:
                over.set()
            answers = [answer for tenant in asking for answer in tenant.result(_SECONDS)]
        for answer in answers:
            self.judge.judge(answer)
        self.outcome.during_pushes = len(answers)

    # -- the end ------------------------------------------------------------------

    def _check_end(self, numbers: Sequence[int]) -> None:
        """Over HTTP, at each replica: what is kept answers, what was retired is refused."""
        self._await_kept(list(numbers))
        kept = [tenant.version(number) for tenant in self.tenants for number in numbers]
        with ThreadPoolExecutor(len(self.urls)) as threads:
            asking = [threads.submit(self._ask_http, name, kept) for name in self.urls]
            answers = [answer for replica in asking for answer in replica.result()]
        for answer in answers:
            self.judge.judge(answer)
        for tenant in self.tenants:
            gone = tenant.version(numbers[0] - 1)
            try:
                self._generate(gone, [PROMPT], _FIRST)
                self.outcome.problems.append(f"{gone}, which was retired, is answered")
            except NotFoundError:
                continue

    def _ask_http(self, replica: str, versions: Sequence[PolicyVersion]) -> list[Answer]:
        found = []
        for version in versions:
            try:
                tokens, logprobs, model = ask(self.urls[replica], str(version))
            except httpx.HTTPError as error:
                self.outcome.problems.append(f"{version} at {replica}: {error}")
                continue
            ids = [int(token.removeprefix("token_id:")) for token in tokens]
            named = PolicyVersion.parse(model)
            found.append(Answer(version, named, replica, PROMPT, ids, logprobs))
        return found

    def _await_kept(self, numbers: list[int]) -> None:
        """Until both replicas have exactly these versions of every policy."""
        wanted = {tenant.policy: (numbers[-1], numbers) for tenant in self.tenants}
        router = Router(self.target)

        def is_kept() -> bool:
            seen = [_vector(replica) for replica in router.replicas()]
            self.outcome.kept = [len(versions) for _, versions in seen[0].values()]
            return seen == [wanted] * len(REPLICAS)

        try:
            until(is_kept, _SECONDS, every_seconds=0.2)
        except AssertionError:
            self.outcome.problems.append(f"replicas hold {router.replicas()}, to be {wanted}")
        finally:
            router.close()

    def _num_reloads(self) -> int:
        return sum(p.log_path.read_text().count(_RELOADED) for p in self.replicas)


def _vector(replica: pb.Replica) -> dict[str, tuple[int, list[int]]]:
    adapters = replica.version_vector.adapters
    return {a.policy: (a.alias, sorted(a.versions)) for a in adapters}
