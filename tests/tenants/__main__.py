"""``make tenants``: many tenants' versions over few slots; exits with 1 where a check fails."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported: two engines share the cores with this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers.utils import logging

from benchmarks.machine import describe
from tests.report import table
from tests.tenants.fairness import largest_lead, most_overtaken, percentile
from tests.tenants.run import SLOTS, Outcome, run

_BEGAN = time.monotonic()
_SHOWN_PROBLEMS = 20


def say(text: str) -> None:
    """Print with the time since the start."""
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {text}", flush=True)


def main() -> int:
    """Run it and print what was seen; 0 only if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.tenants", description=__doc__)
    parser.add_argument("--policies", type=int, default=32, help="tenants, each with a Publisher")
    parser.add_argument("--versions", type=int, default=6, help="that are kept of each policy")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a run that passed")
    args = parser.parse_args()
    if args.versions < 2 or args.policies * args.versions <= SLOTS:
        parser.error(f"give at least 2 versions, and more of all than {SLOTS} slots hold")
    logging.disable_progress_bar()
    work = Path(tempfile.mkdtemp(prefix="weft-tenants-"))
    outcome = run(
        work, num_policies=args.policies, num_versions=args.versions, seed=args.seed, say=say
    )
    print(describe())
    print(report_of(outcome))
    for problem in outcome.problems[:_SHOWN_PROBLEMS]:
        print(f"FAILED: {problem}")
    if outcome.problems:
        print(f"tenants failed: {len(outcome.problems)} problems (logs in {work})")
        return 1
    if not args.keep:
        shutil.rmtree(work)
    say("tenants passed")
    return 0


def report_of(outcome: Outcome) -> str:
    """A table in Markdown."""
    ends = [
        max(push.ended_at for push in outcome.pushes if push.version.policy == policy)
        for policy in {push.version.policy for push in outcome.pushes}
    ]
    began = min(push.began_at for push in outcome.pushes)
    apart = "all tokens differ" if math.isinf(outcome.apart) else f"{outcome.apart:.1e}"
    assert outcome.trainer is not None
    rows = [
        ("policies, versions kept of each, slots of a replica",
         f"{outcome.num_policies}, {min(outcome.kept)} to {max(outcome.kept)}, {SLOTS}"),
        (f"{len(outcome.pushes)} pushes at once, a push: min, median, max",
         _seconds([push.seconds for push in outcome.pushes])),
        ("last push of each tenant done after: first, median, last tenant",
         _seconds([end - began for end in ends])),
        ("pushes of one other tenant during one wait, at most; largest lead",
         f"{most_overtaken(outcome.pushes)[0]}; {largest_lead(outcome.pushes)}"),
        (f"{len(outcome.later_pushes)} more at once, while all is asked for: min, median, max",
         _seconds([push.seconds for push in outcome.later_pushes])),
        (f"first token after an eviction ({len(outcome.evicted)}): median, p95, max",
         _milliseconds(outcome.evicted)),
        ("first token of the same versions right afterwards", _milliseconds(outcome.held)),
        ("adapters that vLLM loaded again", f"{outcome.num_reloads:,}"),
        ("answers checked; of them while all pushed",
         f"{outcome.num_answers:,}; {outcome.during_pushes:,}"),
        ("log-probabilities compared; largest and mean difference",
         f"{outcome.num_logprobs:,}; {outcome.worst:.1e}, {outcome.mean:.1e}"),
        ("least difference between the answers of two versions", apart),
        ("wrong answers, 404s, failed pushes", str(len(outcome.problems))),
        ("threads and descriptors of the trainers' process",
         f"{outcome.trainer.threads}, {outcome.trainer.descriptors}"),
    ]  # fmt: skip
    return table(("what", "seen"), rows)


def _seconds(values: Sequence[float]) -> str:
    least, middle, most = min(values), statistics.median(values), max(values)
    return f"{least:.2f}, {middle:.2f}, {most:.2f} s"


def _milliseconds(values: Sequence[float]) -> str:
    three = statistics.median(values), percentile(values, 95), max(values)
    return ", ".join(f"{value * 1e3:.0f}" for value in three) + " ms"


if __name__ == "__main__":
    sys.exit(main())
