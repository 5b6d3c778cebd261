"""``python -m tests.network``: pushes between hosts of a network, and what it does to them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from typing import get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from tests.network.cases import CASES, Row
from tests.network.hosts import lacking
from weft_rl.cli.demo.processes import interrupt_once
from weft_rl.contract.backends import BackendChoice


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(rows: list[Row]) -> Table:
    table = Table(title="staged: from the start of the transfer until every replica had verified "
                  "it; floor: one copy over the slowest link; whole: until all served the next "
                  "push")  # fmt: skip
    table.add_column("case", no_wrap=True)
    for name in ("backend", "replicas", "MB", "Mbit/s", "floor s", "staged s", "ratio", "push s",
                 "whole s", "lost", "wrong"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("backend", "lost", "wrong") else "right")
    for row in rows:
        floor, staged = row.floor_seconds, row.staged_seconds
        table.add_row(
            row.case,
            row.backend,
            str(row.num_replicas),
            f"{row.megabytes:.1f}",
            f"{row.mbit:,.0f}" if row.mbit else "any",
            _seconds(floor),
            row.error if staged is None else _seconds(staged),
            f"{staged / floor:.2f}" if staged and floor else "",
            _seconds(row.push_seconds),
            _seconds(row.whole_seconds),
            row.lost or "none",
            row.wrong or "none",
        )
    return table


def main() -> int:
    """Run the cases and print a table; 1 if one failed or a byte was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.network", description=__doc__)
    parser.add_argument("--backend", choices=get_args(BackendChoice), default="auto")
    parser.add_argument("--case", choices=CASES, action="append", help="may be repeated; all")
    options = parser.parse_args()
    if reason := lacking():
        print(f"this machine lacks {reason}")
        return 2
    signal.signal(signal.SIGTERM, interrupt_once)  # so that nothing is left
    print(describe(), flush=True)
    rows: list[Row] = []
    failed = []
    for name in options.case or CASES:
        try:
            for row in CASES[name](options.backend):
                rows.append(row)
                print(f"  {row}", file=sys.stderr, flush=True)
        except Exception:  # one case says nothing about the next
            failed.append(name)
            traceback.print_exc()
    Console(width=180).print(_table(rows))
    for name in failed:
        print(f"FAILED  {name}")
    return 1 if failed or any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
