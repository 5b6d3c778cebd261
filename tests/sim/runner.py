"""Runs seeds, in one process or a few."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from tests.sim.lease_checks import Violation
from tests.sim.world import World


def replay(seed: int, *, trace: Callable[[str], object] | None = None) -> str | None:
    """Run one seed; what it violated and how to run it again, or None."""
    try:
        World(seed, trace=trace).run()
    except Violation as violation:
        return f"seed {seed}: {violation}\n  python -m tests.sim --seed {seed} --trace"
    return None


@dataclass
class Outcome:
    """What became of many seeds."""

    failures: list[str] = field(default_factory=list)
    """What was violated, a line each."""
    reached: Counter[str] = field(default_factory=Counter)
    """How many lines of the traces had each of the words that were asked for."""


def run_seeds(seeds: Sequence[int], processes: int = 1, words: Sequence[str] = ()) -> Outcome:
    """Run them all; ``words`` are counted in what happens."""
    run, outcome = partial(_run, words=tuple(words)), Outcome()
    with ExitStack() as stack:
        runs: Iterable[tuple[str | None, Counter[str]]] = map(run, seeds)
        if processes > 1:
            pool = multiprocessing.get_context("spawn").Pool(processes)
            runs = stack.enter_context(pool).imap(run, seeds, chunksize=20)
        for failure, reached in runs:
            outcome.failures += [failure] if failure else []
            outcome.reached += reached
    return outcome


def _run(seed: int, words: tuple[str, ...]) -> tuple[str | None, Counter[str]]:
    reached: Counter[str] = Counter()

    def count(line: str) -> None:
        reached.update(word for word in words if word in line)

    return replay(seed, trace=count if words else None), reached
