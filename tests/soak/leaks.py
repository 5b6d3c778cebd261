"""Nothing grows over many pushes: threads, descriptors, shared memory, memory.

Every process of a pool is looked at every so many pushes. The bounds:

- threads, descriptors and segments of shared memory do not grow at all once the
  pool is warm, but for the thread of a call that comes and goes: a thread that is leaked
  every twentieth push of sixty is seen, a descriptor that is leaked once;
- memory may grow by less than half of the smallest thing that a push moves, on
  average over the pushes after the warm-up: a leaked version of any policy is more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.replicas import (
    LORA_ARGS,
    MODEL_NAME,
    running_coordinator,
    serving_url,
    start_replica,
)
from tests.models import make_model
from tests.processes import Holding, holding, least, members, title
from tests.report import table
from tests.soak import delta_trainer
from tests.soak.double_models import ELEMENTS, NUM_TENSORS
from tests.soak.traffic import request
from tests.soak.trainers import POLICIES
from tests.soak.weights import FIRST_SEED
from weft_rl.cli.demo.processes import Process

# Longer than two heartbeats (2 s) and what they have a replica drop. The thread of a call stays
# for 1 s: a shorter look could find it each time.
_LOOKS, _BETWEEN_SECONDS = 14, 0.3
#: The thread that calls are made on ends after a second without one, which may not come in a look.
#: A thread that is leaked every hundred pushes is one more than that at the end.
_COMING_AND_GOING = {"threads": 1}
_PUSH_SECONDS = 150.0
_PUSHES_OF_A_PUBLISHER = 7
_MIB = 2**20
#: Environment in which freed memory of some size is given back at once: no noise of megabytes.
_GIVING_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "16384"}


@dataclass(frozen=True)
class Growth:
    """How the figures of one process went, look by look."""

    process: str
    holdings: tuple[Holding, ...]

    def counted(self) -> dict[str, tuple[int, ...]]:
        """What must not grow at all."""
        return {
            "threads": tuple(h.threads for h in self.holdings),
            "descriptors": tuple(h.descriptors for h in self.holdings),
            "segments": tuple(h.segments for h in self.holdings),
        }


@dataclass
class Course:
    """Pushes to a pool, and what its processes held meanwhile."""

    looked_at: list[int] = field(default_factory=list)
    """Pushes that had returned at each look."""
    num_warm: int = 0
    """Looks that belong to the warm-up."""
    memory_bound: float = 0.0
    """Bytes a push that memory may grow by after the warm-up."""
    seen: dict[str, list[Holding]] = field(default_factory=dict)
    """By process."""

    def growths(self) -> list[Growth]:
        """Of every process that lived from the first look to the last."""
        return [
            Growth(name, tuple(holdings))
            for name, holdings in self.seen.items()
            if len(holdings) == len(self.looked_at)
        ]

    def slope(self, growth: Growth) -> float:
        """Bytes of memory a push after the warm-up, by least squares."""
        pushes = self.looked_at[self.num_warm :]
        memory = [h.memory_bytes for h in growth.holdings[self.num_warm :]]
        return slope(pushes, memory)

    def table(self) -> str:
        """For people: figures at each look, and the slope of memory."""
        head = ["process", "figure", *(f"push {n}" for n in self.looked_at), "after the warm-up"]
        rows: list[list[object]] = []
        for growth in self.growths():
            for name, counts in growth.counted().items():
                rows.append([growth.process, name, *counts, "must not grow"])
            memory = [f"{h.memory_bytes / _MIB:.1f}" for h in growth.holdings]
            bound = f"{self.slope(growth) / 1024:+.1f} KiB a push, < {self.memory_bound / 1024:.0f}"
            rows.append([growth.process, "memory, MiB", *memory, bound])
        return table(head, rows)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line that fits best."""
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - x_mean) ** 2 for x in xs)


def problems_of(course: Course) -> list[str]:
    """What has grown beyond its bound."""
    problems = []
    for growth in course.growths():
        for name, counts in growth.counted().items():
            warm, last = max(counts[: course.num_warm]), counts[-1]
            if last > warm + _COMING_AND_GOING.get(name, 0):
                problems.append(f"{growth.process}: {name} grew from {warm} to {last}: {counts}")
        grown = course.slope(growth)
        if grown > course.memory_bound:
            memory = [round(h.memory_bytes / _MIB, 1) for h in growth.holdings]
            problems.append(
                f"{growth.process}: memory grows by {grown / 1024:.1f} KiB a push: {memory} MiB"
            )
    return problems


def run_course(
    course: Course,
    trainer: Process,
    processes: dict[str, Process],
    *,
    pushes: int,
    looks: int,
    say: Callable[[str], None],
    ask: Callable[[str], None] = lambda version: None,
) -> Course:
    """Push each policy in turn and look at every process so many times.

    Now and then with another publisher, so that side groups are formed anew.

    Args:
        ask: Called after each push with what was pushed.
    """
    every = pushes // looks
    for number in range(1, pushes + 1):
        if number % _PUSHES_OF_A_PUBLISHER == 0:
            trainer.tell("another publisher")
        trainer.tell(f"{POLICIES[number % len(POLICIES)]} {number}")
        answer = trainer.answer(_PUSH_SECONDS)
        assert "version" in answer, f"push {number} failed: {answer}"
        ask(answer["version"])
        if number % every == 0:
            say(f"{number} pushes")
            course.looked_at.append(number)
            for name, figures in _look({**processes, "trainer": trainer}).items():
                course.seen.setdefault(name, []).append(figures)
    return course


def delta_course(work: Path, pushes: int, *, say: Callable[[str], None]) -> Course:
    """Deltas in a row to a double that stages and one that loads in place, each content compared
    with the trainer's. Old elements of some ten deltas have room in place.

    Memory is bounded by half of what a delta changes, were it kept.
    """
    course = Course(num_warm=2)
    size = delta_trainer.NUM_TENSORS, delta_trainer.ELEMENTS
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(running_coordinator(work))
        processes = {"coordinator": coordinator.process}
        options = {"staging": (), "in-place": ("--in-place", "--staging", str(3 * _MIB // 2))}
        for name, own in options.items():
            arguments = (coordinator.target, name, *map(str, size), "--keep", *own)
            command = ("-m", "tests.doubles.replica_process", *arguments)
            process = Process(name, command, work, _GIVING_BACK)
            stack.callback(process.stop)
            process.line(lambda text: text == "ready", 60)
            processes[name] = process
        trainer = Process(
            "trainer", ("-m", "tests.soak.delta_trainer", coordinator.target), work, _GIVING_BACK
        )
        stack.callback(trainer.stop)
        trainer.line(lambda text: text == "ready", 60)
        replicas, processes["trainer"] = [processes[name] for name in options], trainer
        for number in range(pushes + 1):  # the first of them is whole
            pushed = trainer.ask(f"push {number}", _PUSH_SECONDS)
            assert pushed["is_delta"] is (number > 0), pushed
            assert pushed["num_replicas"] == len(replicas), pushed
            for process in replicas:
                served = process.ask("?", _PUSH_SECONDS)
                assert served["base"] == pushed["version"] == number + 1
                assert served["digests"]["base"] == pushed["digest"], (process.name, served)
            if number and number % (pushes // 5) == 0:
                say(f"{number} deltas, the last of {pushed['sent_bytes']} bytes")
                course.memory_bound = pushed["sent_bytes"] / 2
                course.looked_at.append(number)
                for name, figures in _look(processes).items():
                    course.seen.setdefault(name, []).append(figures)
    return course


def _look(processes: dict[str, Process]) -> dict[str, Holding]:
    """Each process of each session: the least of several looks."""
    seen: dict[str, list[Holding]] = {}
    for _ in range(_LOOKS):
        for name, process in processes.items():
            for pid in members(process.pid):
                with contextlib.suppress(OSError):  # one may end meanwhile
                    part = "" if pid == process.pid else f", {_part(pid)}"
                    held = holding(pid)
                    seen.setdefault(f"{name}{part}", []).append(held)
        time.sleep(_BETWEEN_SECONDS)
    return {name: least(figures) for name, figures in seen.items()}


def _part(pid: int) -> str:
    """What a replica's child is for."""
    words = title(pid)
    for sign, name in (
        ("EngineCore", "engine"), ("VLLM::Worker", "worker"), ("resource_tracker", "tracker")
    ):  # fmt: skip
        if sign in words:
            return name
    return words.split(" ")[0].rpartition("/")[2] or "?"


@contextlib.contextmanager
def _trainer(target: str, models: str, work: Path) -> Iterator[Process]:
    process = Process("trainer", ("-m", "tests.soak.trainers", target, models), work, {})
    try:
        process.line(lambda text: text == "ready", 120)
        yield process
    finally:
        process.stop()


def real_course(work: Path, pushes: int, *, say: Callable[[str], None]) -> Course:
    """To two real vLLM replicas. The smallest push, ``math``, is some 150 KiB."""
    course = Course(num_warm=2, memory_bound=32 * 1024)
    base = make_model("qwen2", work / "model", seed=FIRST_SEED)
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(running_coordinator(work))
        processes = {"coordinator": coordinator.process}
        for name in ("replica-0", "replica-1"):
            process = start_replica(work, coordinator.target, name, base, *LORA_ARGS)
            stack.callback(process.stop)
            processes[name] = process
        urls = [serving_url(processes[name]) for name in ("replica-0", "replica-1")]
        trainer = stack.enter_context(_trainer(coordinator.target, str(base), work))

        def ask(version: str) -> None:
            model = MODEL_NAME if version.startswith("base@") else version
            for url in urls:
                path, body = request(model, range(10, 18), 16, names_base=False)
                reply = httpx.post(f"{url}{path}", json=body, timeout=60)
                reply.raise_for_status()

        return run_course(course, trainer, processes, pushes=pushes, looks=6, say=say, ask=ask)


def double_course(work: Path, pushes: int, *, say: Callable[[str], None]) -> Course:
    """To two replicas with the engine double: seconds instead of minutes.

    What the coordinator remembers of a hundred transfers is still filling up, and
    so are caches: memory is bounded by what no such thing takes, an eighth of a base.
    """
    course = Course(num_warm=2, memory_bound=NUM_TENSORS * ELEMENTS * 4 / 8)
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(running_coordinator(work))
        processes = {"coordinator": coordinator.process}
        for name in ("replica-0", "replica-1"):
            process = Process(
                name,
                ("-m", "tests.doubles.replica_process", coordinator.target, name,
                 str(NUM_TENSORS), str(ELEMENTS)),
                work,
                {},
            )  # fmt: skip
            stack.callback(process.stop)
            processes[name] = process
        for name in ("replica-0", "replica-1"):
            processes[name].line(lambda text: text == "ready", 60)
        trainer = stack.enter_context(_trainer(coordinator.target, "double", work))
        return run_course(course, trainer, processes, pushes=pushes, looks=6, say=say)
