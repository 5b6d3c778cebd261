"""``python -m tests.sim --seed N [--trace]``, or ``--seeds N [--start K]``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.runner import replay, run_seeds


def main() -> int:
    """Run one seed or many; the exit code says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=main.__doc__)
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--trace", action="store_true", help="print what happens, step by step")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.seed is not None:
        failure = replay(args.seed, trace=print if args.trace else None)
        print(failure or f"seed {args.seed} holds")
        return int(failure is not None)
    began = time.perf_counter()
    failures = run_seeds(range(args.start, args.start + args.seeds), args.processes).failures
    for line in failures:
        print(line)
    seconds = time.perf_counter() - began
    print(
        f"{args.seeds} seeds, {len(failures)} failed, {seconds:.1f} s, "
        f"{args.seeds / seconds:.1f} seeds/s on {args.processes} process(es)"
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
