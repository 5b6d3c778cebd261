"""``make fault``: the whole kill matrix; writes its table into tests/fault/README.md."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.machine import describe
from tests.fault.matrix import Case, Outcome
from tests.fault.strikes import POINTS, ROLES, SIGNALS, Strike

_README = Path(__file__).with_name("README.md")
_MARK = "<!-- made by `make fault` -->"


def main() -> int:
    """Run the cases whose text holds all given words; 0 only if all passed."""
    words = sys.argv[1:]
    cases = [
        c for c in itertools.product(ROLES, POINTS, SIGNALS) if all(w in " ".join(c) for w in words)
    ]
    outcomes: list[Outcome] = []
    failed: list[str] = []
    for role, point, signum in cases:
        name = f"{role}, {point}, {signum}"
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            strike = Strike(role, point, signum, directory)
            case = None
            try:
                case = Case(strike, Path(directory))
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
    if not words:
        _write(outcomes)
    print(f"{len(outcomes)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _write(outcomes: list[Outcome]) -> None:
    lines = [
        "| who | where | signal | push in hand | its caller knew after | next served after |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {o.strike.role} | {o.strike.point} | {o.strike.signal} | {o.push} | "
        f"{o.push_seconds:.1f} s | {o.recovery_seconds:.1f} s |"
        for o in outcomes
    ]
    text = _README.read_text().split(_MARK)[0].rstrip()
    table = "\n".join(lines)
    _README.write_text(f"{text}\n\n{_MARK}\n\n{describe()}\n\n{table}\n")


if __name__ == "__main__":
    sys.exit(main())
