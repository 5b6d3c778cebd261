"""A sample of the kill matrix that rotates by date; all of it by ``make fault``.

Budget: 80 s. ``WEFT_FAULT_CASES`` sets how many, of those with deltas and of the others.
"""

import datetime
import os
import subprocess
import sys

import pytest

from tests.fault.delta_case import case_of
from tests.fault.strikes import CASES, ROLES, Strike

# Strides through the matrix, so that every few days all roles and points had their turn.
_STRIDE = 7


def todays_sample():
    count = int(os.environ.get("WEFT_FAULT_CASES", "2"))
    first = datetime.datetime.now(tz=datetime.UTC).date().toordinal() * count
    found = []
    for sends_deltas in (False, True):
        cases = [case for case in CASES if ROLES[case[0]].sends_deltas is sends_deltas]
        assert len(cases) % _STRIDE, "the strides would come to some of them only"
        places = [(first + i) * _STRIDE % len(cases) for i in range(min(count, len(cases)))]
        found += [cases[place] for place in places]
    return found


@pytest.mark.parametrize(("role", "point", "signum"), todays_sample())
def test_case(role, point, signum, tmp_path):
    case = case_of(Strike(role, point, signum, str(tmp_path)), tmp_path)
    try:
        outcome = case.run()
        assert outcome.recovery_seconds > 0
    finally:
        case.close()


_ARM_ALL = """
import os
from tests.fault.strikes import CASES, ROLES, Strike
for role, point, signal in CASES:
    ROLES[role].arm(Strike(role, point, signal, "/nonexistent"))
print(len(CASES), flush=True)
os._exit(0)  # what was armed is of no use to this process's own end
"""


def test_every_case_comes_to_its_point():
    """The sample is small, and a function that was renamed would be found days later."""
    armed = subprocess.run(
        [sys.executable, "-c", _ARM_ALL], capture_output=True, text=True, timeout=120
    )
    assert armed.stdout.split() == [str(len(CASES))], armed.stderr
