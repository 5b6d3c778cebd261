"""Two processes with one trainer's name: which of them waits, takes over or is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainer_side.pool.leases import RivalHolder, describe, has_ended, is_this_process, this_process


def _holder(token: int = 3, renewals: int = 5, **process: object) -> dict[str, str]:
    return {
        "fencing_token": str(token),
        "num_renewals": str(renewals),
        **{key: str(value) for key, value in process.items()},
    }


def _metadata(process: object) -> dict[str, object]:
    start = process.start_time  # type: ignore[attr-defined]
    return {
        "host_key": process.host_key,  # type: ignore[attr-defined]
        "pid": process.pid,  # type: ignore[attr-defined]
        "start_time": start.seconds + start.nanos / 1e9,
    }


def test_a_silent_holder_is_waited_for() -> None:
    rival = RivalHolder(takeover=False)
    for _ in range(3):
        assert rival.displaced_token(_holder()) == 0
        assert not rival.is_alive(_holder())


def test_a_coordinator_that_was_restarted_counts_renewals_anew() -> None:
    rival = RivalHolder(takeover=False)
    assert not rival.is_alive(_holder(renewals=5))
    assert not rival.is_alive(_holder(renewals=0))
    assert not rival.is_alive(_holder(renewals=0))
    assert rival.is_alive(_holder(renewals=1))


@pytest.mark.parametrize("seen", [_holder(renewals=6), _holder(token=4)])
def test_a_holder_that_renews_or_is_followed_by_another_is_alive(seen: dict[str, str]) -> None:
    rival = RivalHolder(takeover=False)
    assert not rival.is_alive(_holder())
    assert rival.is_alive(seen)


def test_a_takeover_displaces_whoever_holds_it() -> None:
    assert RivalHolder(takeover=True).displaced_token(_holder(token=9)) == 9


def test_one_known_to_have_ended_is_displaced_and_one_that_runs_is_not() -> None:
    here = _metadata(this_process())
    assert is_this_process(_holder(**here))
    assert not has_ended(_holder(**here))
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    gone = {**here, "pid": child.pid}
    assert RivalHolder(takeover=False).displaced_token(_holder(token=7, **gone)) == 7
    # Its number may be another's by now: the start tells them apart.
    recycled = {**here, "start_time": float(str(here["start_time"])) - 3600}
    assert has_ended(_holder(**recycled))
    # Of another machine, or of another container on this one, nothing is known.
    assert not has_ended(_holder(**{**gone, "host_key": "elsewhere:1"}))
    assert not has_ended(_holder())


def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
        here = _metadata(this_process())
        assert has_ended(_holder(**{**here, "pid": child.pid}))
    finally:
        child.wait()


def test_the_refusal_says_what_to_do() -> None:
    own = describe("t", "math", _holder(**_metadata(this_process())), "owned")
    assert own.startswith("another Publisher of this very process runs as trainer 't'")
    text = describe("t", "math", _holder(), "owned by process 7 on h")
    assert "process 7 on h" in text
    assert "takeover=True" in text
