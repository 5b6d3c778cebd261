"""``make soak``: answers under churn, then 300 pushes; writes tests/soak/README.md."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

# Before torch is imported: two engines share the cores with this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.machine import describe
from tests.report import replace_section, table
from tests.soak.leaks import problems_of, real_course
from tests.soak.versions import Outcome, soak

_README = Path(__file__).with_name("README.md")
_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print with the time since the start."""
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {text}", flush=True)


def main() -> int:
    """Run what is asked for; 0 only if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="of answers; 0 leaves them out")
    parser.add_argument("--pushes", type=int, default=300, help="to look for leaks; 0 for none")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what is random")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a run that passed")
    args = parser.parse_args()
    say(f"seed {args.seed}")
    work = Path(tempfile.mkdtemp(prefix="weft-soak-"))
    problems: list[str] = []
    if args.minutes:
        (work / "versions").mkdir()
        outcome = soak(work / "versions", minutes=args.minutes, seed=args.seed, say=say)
        problems += outcome.problems
        say(f"{len(outcome.problems)} problems; {dict(outcome.answered)}")
        if not outcome.problems:
            replace_section(_README, "made by `make soak`: answers", report_of(outcome, args.seed))
    if args.pushes and not problems:
        (work / "leaks").mkdir()
        course = real_course(work / "leaks", args.pushes, say=say)
        problems += problems_of(course)
        print(course.table())
        if not problems:
            replace_section(
                _README, "made by `make soak`: leaks", f"{_facts()}\n\n{course.table()}"
            )
    if not problems and not args.keep:
        shutil.rmtree(work)
    for problem in problems[:20]:
        print(f"FAILED: {problem}")
    print("soak failed" if problems else "soak passed", f"(logs in {work})" if problems else "")
    return 1 if problems else 0


def _facts() -> str:
    return "  \n".join(describe().splitlines())


def report_of(outcome: Outcome, seed: int) -> str:
    """The section about answers."""
    rows = [
        ("time, seed", f"{outcome.seconds:.0f} s, {seed}"),
        ("versions pushed", _counts(outcome.pushed)),
        ("replicas ended and started again", _counts(outcome.ended)),
        ("answers checked", f"{sum(outcome.answered.values()):,}"),
        ("by what was asked", _counts(outcome.answered)),
        ("with tokens of more than one base version", f"{outcome.spanning:,}"),
        ("log-probabilities compared", f"{outcome.num_log_probs:,}"),
        ("largest and mean difference", f"{outcome.worst:.1e}, {outcome.mean:.1e}"),
        ("wrong answers, undocumented errors, failed pushes", "0, 0, 0"),
        ("requests that ended otherwise", _counts(outcome.excused) or "none"),
    ]
    return f"{_facts()}\n\n{table(('what', 'seen'), rows)}"


def _counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{what}: {n:,}" for what, n in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
