"""Runs seeds, in one process or a few."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from tests.sim.lease_checks import Violation
from tests.sim.world import World


def replay(seed: int, *, trace: bool = False) -> str | None:
    """Run one seed; what it violated and how to run it again, or None."""
    world = World(seed, trace=print if trace else None)
    try:
        world.run()
    except Violation as violation:
        if trace:
            raise
        return f"seed {seed}: {violation}\n  python -m tests.sim --seed {seed} --trace"
    return None


def run_seeds(seeds: Sequence[int], processes: int = 1) -> list[str]:
    """What the seeds violated, a line each."""
    if processes == 1:
        return [failure for seed in seeds if (failure := replay(seed))]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [failure for failure in pool.imap(replay, seeds, chunksize=20) if failure]
