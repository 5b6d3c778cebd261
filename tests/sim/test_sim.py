"""Pools, each with other faults; a failure says how to run it again."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from tests.sim.runner import replay, run_seeds
from tests.sim.world import World

# What CI has time for; `make sim` runs as many as one likes.
NUM_SEEDS = 1500
PROCESSES = 2


@pytest.mark.timeout(600)
def test_what_must_be_true_is_true_under_faults() -> None:
    failures = run_seeds(range(NUM_SEEDS), PROCESSES)
    shown = "\n".join(failures[:5])
    assert not failures, f"{len(failures)} of {NUM_SEEDS} seeds failed:\n{shown}"


def test_a_seed_is_always_the_same_run() -> None:
    runs = []
    for _ in range(2):
        out = io.StringIO()
        with redirect_stdout(out):
            replay(7, trace=True)
        runs.append(out.getvalue())
    assert runs[0] == runs[1]
    assert "serves" in runs[0]


def test_the_runs_reach_what_they_are_to_check() -> None:
    """Faults that nothing survives would let every check hold."""
    reached: dict[str, int] = {}

    def count(line: str) -> None:
        for word in _WORDS:
            reached[word] = reached.get(word, 0) + (word in line)

    for seed in range(240):
        World(seed, trace=count).run()
    assert not [word for word in _WORDS if reached[word] < 5], reached


_WORDS = [
    "transfer_committed",
    "transfer_aborted",
    "is committed by the survivors",
    "clone_ended",
    "clone_failed",
    "clone_interrupted",
    "restore_ended",
    "rolled_back base@",
    "rolled_back math@",
    "version_pinned",
    "retains no copy of it",
    "was never served",
    "version_retired",
    "by an operator",
    "retention_set",
    "replica_cordoned",
    "replica_draining",
    "drains for",
    "publish_again_wanted",
    "replica_lost",
    "replica_quarantined",
    "serves base@",
    "in place",
    "was not loaded whole",
    "had begun to load it in place",
    "serves math@",
    "coordinator  restarts",
    "LEASE_FENCED",
    "POLICY_OWNED",
    "DIGEST_MISMATCH",
    "PEER_GONE",
    "DEADLINE",
    "LOAD_FAILED",
]
