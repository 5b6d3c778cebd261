"""What working threads say, how often, and that long steps let them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from weft_rl import interrupts
from weft_rl.contract.errors import TransferAbortedError, TransferTimeoutError
from weft_rl.transport import member
from weft_rl.transport.group import CPU, Operation, SideGroup
from weft_rl.transport.member import Progress
from weft_rl.transport.wire.buckets import WHOLE, BucketOptions
from weft_rl.transport.wire.lane_options import LaneOptions
from weft_rl.v1 import rendezvous_pb2 as pb


class Stream:
    def __init__(self) -> None:
        self.sent_at = 100.0
        self.sent: list[pb.AttendRequest] = []

    def send(self, request: pb.AttendRequest) -> None:
        self.sent.append(request)
        self.sent_at = time.monotonic()


def test_nothing_is_said_right_after_something_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = Stream(), 100.0
    monkeypatch.setattr(member.time, "monotonic", lambda: now)
    said = Progress(stream)  # type: ignore[arg-type]
    for step in range(40):
        now = 100.0 + step * 0.1
        said.report(pb.ACTIVITY_WAITING, "t1", bucket=step)
    assert [m.progress.bucket for m in stream.sent] == [10, 20, 30]
    assert stream.sent[0].progress == pb.Progress(
        transfer_id="t1", activity=pb.ACTIVITY_WAITING, bucket=10
    )
    stream.sent_at = now  # a bucket was reported
    now += 0.9
    said.report(pb.ACTIVITY_ALLOCATING, done=1, total=2)
    assert len(stream.sent) == 3


class SlowWork:
    """Ends with its ``num_looks``-th wait."""

    done = True

    def __init__(self, num_looks: int) -> None:
        self.deadlines: list[float] = []
        self._left = num_looks

    def wait_until(self, deadline: float) -> bool:
        self.deadlines.append(deadline)
        self._left -= 1
        return self._left <= 0

    def finish(self) -> None:
        pass

    def wake(self) -> None:
        pass


class AnyGroup:
    error: Exception | None = None

    def check(self) -> None:
        if self.error:
            raise self.error

    def finished(self, operation: Operation) -> None:
        pass


def _operation(work: SlowWork, group: AnyGroup) -> Operation:
    return Operation(group, work, torch.empty(0))  # type: ignore[arg-type]


def test_a_wait_for_bytes_speaks_again_and_again() -> None:
    work, spoken = SlowWork(4), []
    began = time.monotonic()
    _operation(work, AnyGroup()).wait(began + 1000.0, lambda: spoken.append(1))
    assert len(spoken) == 3
    assert all(d <= began + 10.0 for d in work.deadlines), "never the whole of it at once"


def test_a_wait_ends_with_its_deadline_or_its_group() -> None:
    with pytest.raises(TransferTimeoutError):
        _operation(SlowWork(9), AnyGroup()).wait(time.monotonic() - 1.0, lambda: None)
    group = AnyGroup()

    def abort() -> None:
        group.error = TransferAbortedError("it is over")

    with pytest.raises(TransferAbortedError):
        _operation(SlowWork(9), group).wait(time.monotonic() + 1000.0, abort)


def test_one_long_call_is_spoken_for_and_may_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PROGRESS_SECONDS", 0.001)
    go_on, spoken = threading.Event(), []

    def work() -> int:
        assert go_on.wait(10.0)
        return 7

    def on_progress() -> None:
        spoken.append(1)
        if len(spoken) == 3:
            go_on.set()

    assert interrupts.report_while(work, on_progress) == 7
    assert len(spoken) >= 3
    with pytest.raises(ZeroDivisionError):
        interrupts.report_while(lambda: 1 // 0, lambda: None)
    go_on.clear()

    def give_up() -> None:
        raise TransferAbortedError("aborted meanwhile")

    with pytest.raises(TransferAbortedError):
        interrupts.report_while(work, give_up)
    go_on.set()


def test_a_group_that_takes_long_to_form_is_spoken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PROGRESS_SECONDS", 0.001)
    formed, spoken = threading.Event(), []

    class Backend:
        is_formed = False

        def broadcast(
            self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
        ) -> SlowWork:
            assert formed.wait(10.0)
            self.is_formed = True
            return SlowWork(1)

        def abort(self) -> None:
            pass

    monkeypatch.setattr("weft_rl.transport.group.open_backend", lambda *args, **kw: Backend())
    group = SideGroup(None, 1, 2, LaneOptions(host="127.0.0.1"), device=CPU)  # type: ignore[arg-type]

    def forming() -> None:
        spoken.append(1)
        if len(spoken) == 3:
            formed.set()

    group.broadcast(torch.empty(4, dtype=torch.uint8), 10.0, forming).wait(time.monotonic() + 10)
    assert len(spoken) >= 3
    group.broadcast(torch.empty(4, dtype=torch.uint8), 10.0).wait(time.monotonic() + 10)
    group.close()
