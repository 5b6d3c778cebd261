"""Receiving what a sender lends: whose fault it is when other bytes are found there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_side.receive.incoming_buckets import IncomingPart, receive_buckets
from weft_rl.contract.errors import DigestMismatchError, PeerUnavailableError, WeftError
from weft_rl.contract.manifest import WireBucket, make_send_plan
from weft_rl.transport.wire.buckets import IN_ITS_BUFFER
from weft_rl.transport.wire.change_coding import WrongBaseError


def _part(num_buckets: int) -> IncomingPart:
    wires = [WireBucket(0, index, 256, 1) for index in range(num_buckets)]
    return IncomingPart(make_send_plan(1, wires), 0)


class _Lent:
    """A receive that has arrived in memory that its sender lends."""

    done, arrived = True, IN_ITS_BUFFER

    def __init__(self, *, sender_left: bool, comes_again: bool = False) -> None:
        self._sender_left, self._lent = sender_left, True
        self._comes_again = comes_again
        self.num_given_back = self.num_kept = self.num_again = 0

    def wait(self, deadline: float, on_progress: Callable[[], None]) -> None:
        pass

    def give_back(self) -> None:
        if not self._lent:
            return
        self._lent = False
        self.num_given_back += 1
        if self._sender_left:
            raise PeerUnavailableError("the sender left while its memory was read")

    def receive_again(self, deadline: float) -> bool:
        self.num_again += 1
        return self._comes_again

    def keep(self) -> bool:
        self.num_kept += 1
        return True


class _OtherBytes:
    """Ring of one bucket and its sink, that finds other bytes than were sent."""

    num_kept, ahead, copies_lent, is_dropped, copies_to_gpu = 0, 1, True, False, False

    def __init__(self, *, at_once: bool, num_wrong: int = 2, why: str = "") -> None:
        self._at_once, self._num_wrong, self._why = at_once, num_wrong, why

    def is_load_due(self) -> bool:
        return False

    def num_runs(self, index: int) -> int:
        return 1

    def make_room(self, index: int, *, wait: bool) -> bool:
        return True

    def wire(self, index: int) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def payload_bytes(self, index: int) -> int:
        return 8

    def accept(self, index: int, nonce: int, arrived: object = None) -> Callable[[], None]:
        def end() -> None:
            self._num_wrong -= 1
            if self._why:
                raise WrongBaseError(self._why)
            if self._num_wrong >= 0:
                raise DigestMismatchError("bucket 0 is not what was sent")
            self.num_kept = 1

        if self._at_once:
            end()
        return end


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("sender_left", "error"), [(True, PeerUnavailableError), (False, DigestMismatchError)]
)
def test_what_a_sender_has_left_behind_is_not_taken_for_what_it_sent(
    error: type[WeftError], *, sender_left: bool, at_once: bool
) -> None:
    lent = _Lent(sender_left=sender_left)
    lane = SimpleNamespace(broadcast=lambda *given, **how: lent)
    membership: Any = SimpleNamespace(
        lanes={0: lane}, progress=SimpleNamespace(report=lambda *said: None)
    )
    prepared: Any = SimpleNamespace(
        transfer_id="t1", nonce=7, deadline=time.monotonic() + 10,
    )  # fmt: skip
    ring: Any = _OtherBytes(at_once=at_once)
    with pytest.raises(error):
        receive_buckets(membership, prepared, ring, _part(1), 0)
    assert lent.num_given_back == 1
    assert lent.num_kept == 0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("num_wrong", "why", "error", "num_again"),
    [
        (1, "", None, 1),
        (2, "", DigestMismatchError, 1),
        (0, "the weights here are others", WrongBaseError, 0),
    ],
)
def test_a_garbled_bucket_is_received_once_more(
    num_wrong: int, why: str, error: type[WeftError] | None, num_again: int, *, at_once: bool
) -> None:
    """Not one that has arrived as it was sent, and fits no weights here."""
    arrived = _Lent(sender_left=False, comes_again=True)
    lane = SimpleNamespace(broadcast=lambda *given, **how: arrived)
    membership: Any = SimpleNamespace(
        lanes={0: lane},
        progress=SimpleNamespace(report=lambda *said: None),
        attendance=SimpleNamespace(send=lambda report: None),
    )
    prepared: Any = SimpleNamespace(
        transfer_id="t1",
        nonce=7,
        deadline=time.monotonic() + 10,
        version="base@1",
        span=SimpleNamespace(set=lambda **seconds: None),
    )
    ring: Any = _OtherBytes(at_once=at_once, num_wrong=num_wrong, why=why)
    refused = contextlib.nullcontext() if error is None else pytest.raises(error)
    with refused:
        receive_buckets(membership, prepared, ring, _part(1), 0)
    assert arrived.num_again == num_again
    assert arrived.num_kept == (error is None)


class _InPairs(_OtherBytes):
    """Ring of two buckets, of which the first is kept once the second has come."""

    ahead = 2

    def __init__(self) -> None:
        super().__init__(at_once=False)
        self.num_kept = 0

    def accept(self, index: int, nonce: int, arrived: object = None) -> Callable[[], None]:
        def end() -> None:
            self.num_kept = 2 * index

        return end


@pytest.mark.parametrize(
    ("is_told", "expected"),
    [
        (True, ["kept", "kept", "reported 1"]),
        (False, ["kept", "reported 0", "kept", "reported 1"]),  # the sender waits for it
    ],
)
def test_what_is_kept_is_told_and_nothing_that_only_was_verified(
    is_told: bool, expected: list[str]
) -> None:
    order: list[str] = []

    class Receive(_Lent):
        def keep(self) -> bool:
            order.append("kept")
            return is_told

    receives = [Receive(sender_left=False) for _ in range(2)]
    posted = iter(receives)
    lane = SimpleNamespace(broadcast=lambda *given, **how: next(posted))

    def report(request: Any) -> None:
        order.append(f"reported {request.bucket_verified.bucket}")

    membership: Any = SimpleNamespace(
        lanes={0: lane},
        progress=SimpleNamespace(report=lambda *said: None),
        attendance=SimpleNamespace(send=report),
    )
    prepared: Any = SimpleNamespace(
        transfer_id="t1", nonce=7, deadline=time.monotonic() + 10,
        version="base@1", span=SimpleNamespace(set=lambda **told: None),
    )  # fmt: skip
    ring: Any = _InPairs()
    receive_buckets(membership, prepared, ring, _part(2), 0)
    assert order == expected
    assert [receive.num_given_back for receive in receives] == [1, 1]
