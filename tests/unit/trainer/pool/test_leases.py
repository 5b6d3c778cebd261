"""What an owner learns with its lease, and when its trainer is called."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waits import until
from trainer_side.pool.leases import Leases, NoticeQueue
from weft_rl.contract.errors import LeaseFencedError
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.rpc.status import InvalidResponseError
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2

ADAPTER = types_pb2.POLICY_KIND_ADAPTER


class Coordinator:
    """Says what it is told to, and waits to be asked."""

    def __init__(self) -> None:
        self.lost = 0
        self.renewals = 0
        self.token, self.last_version = 1, 0
        self.asked: list[Any] = []
        self.fenced: LeaseFencedError | None = None
        self.renewed = threading.Condition()

    def AcquirePolicy(self, request: Any, **kwargs: Any) -> pb.AcquirePolicyResponse:  # noqa: N802
        self.asked.append(request)
        return pb.AcquirePolicyResponse(
            lease=self._lease(request.policy),
            last_version=self.last_version,
            publish_again_version=self.lost,
        )

    def RenewLease(self, request: Any, **kwargs: Any) -> pb.RenewLeaseResponse:  # noqa: N802
        with self.renewed:
            self.renewals += 1
            self.renewed.notify_all()
            if self.fenced is not None:
                error, self.fenced = self.fenced, None
                raise InvalidResponseError(error)
            return pb.RenewLeaseResponse(
                lease=self._lease(request.policy), publish_again_version=self.lost
            )

    def ReleasePolicy(self, request: Any, **kwargs: Any) -> pb.ReleasePolicyResponse:  # noqa: N802
        return pb.ReleasePolicyResponse()

    def _lease(self, policy: str) -> pb.Lease:
        return pb.Lease(
            policy=policy, fencing_token=self.token, time_to_live=duration_to_proto(0.03)
        )

    def say(self, lost: int) -> None:
        """Return once an answer with that was taken in: the one before the last."""
        with self.renewed:
            self.lost, seen = lost, self.renewals
            assert self.renewed.wait_for(lambda: self.renewals >= seen + 2, 10)


def test_each_demand_is_told_once_and_ends_with_the_push() -> None:
    coordinator, told = Coordinator(), list[str]()
    leases = Leases(coordinator, "trainer", told.append)  # type: ignore[arg-type]
    try:
        leases.token("math", ADAPTER, time.monotonic() + 10)
        coordinator.say(0)
        assert (told, leases.wanted) == ([], frozenset())
        coordinator.say(3)
        coordinator.say(3)
        assert (told, leases.wanted) == (["math"], {"math"})
        leases.published("math")
        coordinator.say(3)  # an answer from before the commit
        assert (told, leases.wanted) == (["math"], frozenset())
        coordinator.say(4)  # and that was lost, too
        assert (told, leases.wanted) == (["math", "math"], {"math"})
        coordinator.say(0)
        assert leases.wanted == frozenset()
        coordinator.say(4)
        assert told == ["math"] * 3
        leases.forget("math")
        assert leases.wanted == frozenset()
    finally:
        leases.close()


def test_notices_come_in_turn_and_survive_what_they_raise(caplog: pytest.LogCaptureFixture) -> None:
    seen, done = list[tuple[str, str]](), threading.Event()

    def function(name: str) -> None:
        seen.append((name, threading.current_thread().name))
        if name == "a":
            raise ValueError("the user's")
        done.set()

    notices = NoticeQueue(function)
    notices.put("a")
    notices.put("b")
    assert done.wait(10)
    notices.close()
    assert seen == [("a", "weft-notices_0"), ("b", "weft-notices_0")]
    assert "the user's" in caplog.text


def test_notices_are_bounded_and_those_that_wait_are_dropped_at_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_side.pool.leases._MAX_WAITING", 1)
    seen, begun, gate = list[str](), threading.Event(), threading.Event()

    def function(name: str) -> None:
        seen.append(name)
        begun.set()
        assert gate.wait(10)

    notices = NoticeQueue(function)
    notices.put("a")
    assert begun.wait(10)
    notices.put("b")
    notices.put("c")
    assert "the notice of c is dropped" in caplog.text
    threading.Timer(0.1, gate.set).start()
    notices.close()
    notices.put("d")
    assert seen == ["a"]


def test_closing_from_within_does_not_wait_for_itself() -> None:
    box, done = SimpleNamespace(), threading.Event()

    def function(name: str) -> None:
        box.notices.close()
        done.set()

    box.notices = NoticeQueue(function)
    box.notices.put("a")
    assert done.wait(10)
    box.notices._thread.join(10)
    assert not box.notices._thread.is_alive()


def test_what_was_told_before_is_said_with_the_next_lease() -> None:
    coordinator = Coordinator()
    coordinator.token, coordinator.last_version = 7, 4
    leases = Leases(coordinator, "trainer")  # type: ignore[arg-type]
    try:
        for last_version in (0, 4, 9, 9):
            leases.token("math", ADAPTER, time.monotonic() + 10)
            asked = coordinator.asked[-1]
            assert asked.last_version == last_version
            assert asked.last_fencing_token == (7 if last_version else 0)
            if last_version == 4:
                leases.assigned("math", 9)
                leases.assigned("math", 8)
            leases.forget("math")  # it was fenced: the coordinator may have lost its catalog
    finally:
        leases.close()


def test_what_fails_at_a_renewal_does_not_end_the_renewing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = Coordinator()
    leases = Leases(coordinator, "trainer", lambda policy: 1 / 0)  # type: ignore[arg-type]
    try:
        leases.token("math", ADAPTER, time.monotonic() + 10)
        coordinator.say(3)
        coordinator.say(3)
        assert leases.held_token("math")
        assert "ZeroDivisionError" in caplog.text
    finally:
        leases.close()


def test_a_lease_that_nobody_holds_is_acquired_anew_by_the_renewal() -> None:
    coordinator, told = Coordinator(), list[str]()
    leases = Leases(coordinator, "trainer", told.append)  # type: ignore[arg-type]
    try:
        leases.token("math", ADAPTER, time.monotonic() + 10)
        coordinator.say(3)
        coordinator.token, coordinator.last_version = 9, 5
        coordinator.fenced = LeaseFencedError("it ran out")
        coordinator.say(3)
        assert [request.kind for request in coordinator.asked] == [ADAPTER, ADAPTER]
        assert coordinator.asked[1].last_fencing_token == 1
        assert leases.held_token("math") == 9
        assert told == ["math"], "the same need is told once"
    finally:
        leases.close()


def test_a_lease_that_another_holds_is_left_to_it() -> None:
    coordinator = Coordinator()
    leases = Leases(coordinator, "trainer")  # type: ignore[arg-type]
    try:
        leases.token("math", ADAPTER, time.monotonic() + 10)
        coordinator.fenced = LeaseFencedError("it was taken", metadata={"holder": "other"})
        until(lambda: not leases.held_token("math"))
        assert len(coordinator.asked) == 1
    finally:
        leases.close()
