"""``make fault``: the kill matrix; writes what it ran into tests/fault/README.md."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.machine import describe
from tests.fault.delta_case import case_of
from tests.fault.matrix import Outcome
from tests.fault.strikes import CASES, Strike
from tests.report import replace_rows

_README = Path(__file__).with_name("README.md")
_SECTION = "made by `make fault`"
_HEAD = ("who", "where", "signal", "push in hand", "its caller knew after", "next served after")


def main() -> int:
    """Run the cases whose text holds all given words; 0 only if all passed."""
    words = sys.argv[1:]
    cases = [c for c in CASES if all(w in " ".join(c) for w in words)]
    outcomes: list[Outcome] = []
    failed: list[str] = []
    for role, point, signum in cases:
        name = f"{role}, {point}, {signum}"
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            strike = Strike(role, point, signum, directory)
            case = None
            try:
                case = case_of(strike, Path(directory))
                outcomes.append(case.run())
                print(f"ok    {name}: {outcomes[-1].push} ({time.monotonic() - began:.1f} s)")
            except Exception:
                failed.append(name)
                print(f"FAIL  {name}\n{traceback.format_exc()}")
                for log in sorted(Path(directory).glob("*.log")):
                    print(f"--- {log.name}\n{log.read_text()[-1500:]}")
            finally:
                if case is not None:
                    case.close()
        sys.stdout.flush()
    rows = {
        (o.strike.role, o.strike.point, o.strike.signal): (
            o.push, f"{o.push_seconds:.1f} s", f"{o.recovery_seconds:.1f} s"
        )
        for o in outcomes
    }  # fmt: skip
    replace_rows(_README, _SECTION, _HEAD, CASES, rows, facts=describe())
    print(f"{len(outcomes)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
