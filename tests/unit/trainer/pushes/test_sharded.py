"""One push at one rank: its sum is begun whatever fails, and it sends in its caller's stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.doubles.shards import held_push
from trainer_side.delta_selection import DeltaSelection
from trainer_side.pool import peer as module
from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.pool.peer import SideGroupRank
from trainer_side.pushes.rank_push import HeldPush, RankPushFactory
from trainer_side.pushing import PushExecutor
from trainer_side.ranks.ranks import OneRank, RankSum
from trainer_side.sources.source import CastRule, tensor_source
from weft_rl.contract.errors import PeerUnavailableError, TransferAbortedError, WeftError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.rpc.security.credentials import credentials_of
from weft_rl.v1 import publish_pb2 as pb


class _Unlinked(OneRank):
    """A rank whose link is gone."""

    def add_up(self, values: torch.Tensor) -> RankSum:
        raise PeerUnavailableError("this rank has left the push", reason="RANK_GONE")


def _push(ranks: OneRank) -> HeldPush:
    source: Any = tensor_source({"a.weight": torch.ones(4)}, CastRule(), "test")
    push = held_push(source, [None], ranks, plan_buckets(source.metas))
    push._is_shared = True
    return push


def test_a_sum_that_cannot_begin_keeps_nobody_waiting() -> None:
    push = _push(_Unlinked())
    with pytest.raises(PeerUnavailableError):
        push.add_up()
    began = time.monotonic()
    push.wait_added_up(30)
    assert time.monotonic() - began < 5


class _Sender:
    """One that fails, or ends."""

    device, usable = torch.device("cpu"), True

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.in_streams: list[str] = []

    def begin(self, begun: Any, push: HeldPush, *rest: Any) -> HeldPush:
        return push

    def send(self, push: HeldPush) -> None:
        self.in_streams.append(_IN_STREAM.get(threading.current_thread().name, ""))
        if self._error is not None:
            raise self._error
        push.add_up([7])

    def stand_by(self, outcome: Any) -> None:
        outcome.result(10)

    def close(self) -> None:
        self.usable = False


_IN_STREAM: dict[str, str] = {}


def _same_stream(device: torch.device) -> Callable[[], Any]:
    of = threading.current_thread().name

    @contextmanager
    def inside() -> Iterator[None]:
        _IN_STREAM[threading.current_thread().name] = of
        yield
        del _IN_STREAM[threading.current_thread().name]

    return inside


@pytest.mark.parametrize(
    "error", [None, TransferAbortedError("gone", reason="ABORTED"), RuntimeError("out of memory")]
)
def test_a_rank_sends_in_its_callers_stream_and_adds_up_in_any_case(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "same_stream", _same_stream)
    peer = SideGroupRank(
        "127.0.0.1:1", None, BackendSelection("auto", None), credentials_of(None, None)
    )
    sender = peer._sender = _Sender(error)  # type: ignore[assignment]
    push = _push(OneRank())
    deadline = time.monotonic() + 20
    with peer.sending(pb.BeginTransferResponse(), push, False, deadline):
        pass
    assert sender.in_streams == [threading.current_thread().name]
    assert push.add_up().result() == ([7] if error is None else [0])


class _Waiting(_Sender):
    """One whose receivers do not verify its bucket, until it is aborted."""

    def __init__(self) -> None:
        super().__init__(None)
        self.begun, self.aborted = threading.Event(), threading.Event()

    def send(self, push: HeldPush) -> None:
        self.begun.set()
        assert self.aborted.wait(30)
        raise TransferAbortedError("interrupted", reason="ABORTED")

    def abort(self, error: WeftError) -> None:
        self.aborted.set()


def test_an_interrupt_while_it_sends_waits_for_no_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = SideGroupRank(
        "127.0.0.1:1", None, BackendSelection("auto", None), credentials_of(None, None)
    )
    sender = peer._sender = _Waiting()  # type: ignore[assignment]
    push = _push(OneRank())

    def interrupted(timeout_seconds: float) -> None:
        assert sender.begun.wait(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(push, "wait_added_up", interrupted)
    began = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        peer.sending(pb.BeginTransferResponse(), push, False, began + 60),
    ):
        pass
    assert time.monotonic() - began < 5


class _Gone(OneRank):
    """The second of two ranks, of which the first goes away once this one has joined."""

    rank, size = 1, 2

    def agree(self, error: BaseException | None = None, flags: int = 0, same: bytes = b"") -> int:
        raise PeerUnavailableError("another rank is gone", reason="RANK_GONE")


def test_a_sender_whose_push_ends_before_it_sends_leaves_the_group() -> None:
    told: list[str] = []

    class Joined:
        def join(self, begun: pb.BeginTransferResponse, number: int) -> None:
            told.append("join")

        def close(self) -> None:
            told.append("close")

    push = _push(_Gone())
    push.sender = 1
    push.is_prepared_together = True
    deltas = DeltaSelection("never", _Gone(), BackendSelection())
    pushing = PushExecutor(_Gone(), None, RankPushFactory(_Gone(), None), Joined(), deltas)  # type: ignore[arg-type]
    begun = pb.BeginTransferResponse(group=pb.GroupPlan(group_id="g"))
    with pytest.raises(PeerUnavailableError):
        pushing._carry_out(begun, push, False, time.monotonic() + 5)
    assert told == ["join", "close"]
