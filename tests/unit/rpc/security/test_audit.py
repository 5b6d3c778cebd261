"""The audit log: refusals are bounded for each caller, and what is left out is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles.audit_log import audit_lines
from weft_rl.rpc.security import guard
from weft_rl.rpc.security.guard import audit

Refusals = guard._Refusals


class Clock:
    """Seconds, as the guard reads them, and what it refused."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.refusals: Any = None

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guard.time, "monotonic", clock.monotonic)
    clock.refusals = Refusals()
    monkeypatch.setattr(guard, "_REFUSALS", clock.refusals)
    return clock


@pytest.fixture
def lines() -> Iterator[list[dict[str, str]]]:
    with audit_lines() as found:
        yield found


def _refuse(times: int, host: str = "ipv4:10.0.0.7", who: str = "") -> None:
    for port in range(times):
        audit(who, f"{host}:{1024 + port}", "weft.v1.X/Y", {}, "UNAUTHENTICATED")


def test_a_stranger_that_hammers_fills_a_few_lines_and_is_counted(
    clock: Clock, lines: list[dict[str, str]]
) -> None:
    for _ in range(60):  # a minute of 1,000 calls a second, each from another port
        _refuse(1000)
        clock.now += 1.0
    assert len(lines) <= Refusals.BURST + 60
    counted = sum(int(line.get("left_out", 0)) for line in lines)
    assert counted + len(lines) > 58_000, "what was left out is told with the next line"
    clock.now += Refusals.SILENT_SECONDS
    before = len(lines)
    audit("anna", "ipv4:10.0.0.9:1", "weft.v1.X/Y", {}, "ROLE_MISSING")
    told, own = lines[before:]
    assert (told["result"], told["from"]) == ("LEFT_OUT", "ipv4:10.0.0.7")
    assert own["who"] == "anna"
    assert counted + int(told["left_out"]) + before == 60_000


def test_what_was_done_is_always_written(clock: Clock, lines: list[dict[str, str]]) -> None:
    _refuse(500)
    before = len(lines)
    for _ in range(500):
        audit("trainer", "ipv4:10.0.0.7:1", "weft.v1.X/Y", {}, "OK")
    assert len(lines) - before == 500


def test_one_callers_refusals_leave_room_for_anothers(
    clock: Clock, lines: list[dict[str, str]]
) -> None:
    _refuse(500)
    _refuse(1, host="ipv4:10.0.0.8")
    _refuse(1, who="known")
    assert [line["from"].rpartition(":")[0] for line in lines[-2:]] == [
        "ipv4:10.0.0.8",
        "ipv4:10.0.0.7",
    ]
    assert lines[-1]["who"] == "known"


def test_many_strangers_together_are_bounded_too(clock: Clock, lines: list[dict[str, str]]) -> None:
    for number in range(5000):
        _refuse(2, host=f"ipv6:[2001:db8::{number:x}]")
    assert len(lines) <= Refusals.BURST_OF_ALL
    assert clock.refusals.num_pending <= Refusals.MAX_CALLERS + 1
    clock.now += Refusals.SILENT_SECONDS
    clock.refusals.tell(clock.now)
    assert (
        sum(int(line.get("left_out", 0)) for line in lines)
        + len([line for line in lines if line["result"] != "LEFT_OUT"])
        == 10_000
    )
