"""``python -m tests.fuzz --seconds 60``: generated requests, until the time is over."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.session import fuzz


def main() -> int:
    """Run, and print a table of what was answered; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.seconds:.0f} s", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(Path(folder), seed=options.seed, seconds=options.seconds)
    for outcome, count in sorted(report.outcomes.items()):
        print(f"{count:7,}  {outcome}")
    for wrong in report.found:
        print(f"\nWRONG  {wrong}")
    seconds = time.monotonic() - began
    print(f"\n{report.num_calls:,} calls, {len(report.found)} wrong, {seconds:.0f} s", flush=True)
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main())
