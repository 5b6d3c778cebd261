"""``python -m tests.strikes --seconds 600``: a pool of real processes, struck at random."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.strikes.run import Run


def main() -> int:
    """Run, and print what was struck and what came of it; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.strikes", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.seconds:.0f} s", flush=True)
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="weft-strikes-"))
    report = Run(work, options.seed).run(options.seconds)
    print()
    for kind, count in sorted(report.strikes.items()):
        print(f"{count:7,}  {kind}")
    for reasons, count in sorted(report.failures.items()):
        print(f"{count:7,}  pushes failed while struck, {reasons}")
    for wrong in report.wrong:
        print(f"\nWRONG  {wrong}")
    print(
        f"\n{time.monotonic() - began:.0f} s, {report.num_rounds} rounds, "
        f"{report.strikes.total()} strikes, {report.num_pushes:,} pushes acknowledged, "
        f"{report.failures.total()} failed while struck, {report.num_looks:,} looks, "
        f"{len(report.wrong)} violations; seed {options.seed}"
    )
    if report.wrong:
        print(f"the processes' logs are in {work}")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
