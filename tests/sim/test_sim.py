"""Pools, each with other faults; a failure says how to run it again."""

from __future__ import annotations

import pytest

from tests.sim.runner import Outcome, replay, run_seeds

# What CI has time for; `make sim` runs as many as one likes.
NUM_SEEDS = 1100
PROCESSES = 2
#: Seeds beyond those that have failed; see tests/ledger.md.
FOUND = (
    21688, 22085, 70019, 70061, 70067, 71138, 301874, 501101, 507681, 511466, 515008, 603744,
    9412082,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run_seeds(range(NUM_SEEDS), PROCESSES, _WORDS)


@pytest.mark.timeout(600)
def test_what_must_be_true_is_true_under_faults(outcome: Outcome) -> None:
    shown = "\n".join(outcome.failures[:5])
    assert not outcome.failures, f"{len(outcome.failures)} of {NUM_SEEDS} seeds failed:\n{shown}"


@pytest.mark.parametrize("seed", FOUND)
def test_what_once_failed_holds(seed: int) -> None:
    assert replay(seed) is None


def test_the_runs_reach_what_they_are_to_check(outcome: Outcome) -> None:
    """Faults that nothing survives would let every check hold."""
    rare = {"rolled_back base@": 20, "has lost a sender of its delta": 3}
    few = [word for word in _WORDS if outcome.reached[word] < rare.get(word, 30)]
    assert not few, outcome.reached


def test_a_seed_is_always_the_same_run() -> None:
    runs: list[list[str]] = [[], []]
    for lines in runs:
        replay(7, trace=lines.append)
    assert runs[0] == runs[1]
    assert any("serves" in line for line in runs[0])


_WORDS = [
    "transfer_committed",
    "is committed as a delta",
    "sends it whole",
    "takes deltas back to base@",
    "has no room to go back to base@",
    "has lost a sender of its delta",
    "transfer_aborted",
    "is committed by the survivors",
    "cannot keep up: its link",
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
    "policy_forgotten",
    "policy_lost",
    "policy_found",
    "replica_out_of_service",
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
