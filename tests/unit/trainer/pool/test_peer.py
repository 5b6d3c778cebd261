"""A further sender is in its group once the coordinator says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.pool.peer import SideGroupRank
from weft_rl.contract.errors import PeerUnavailableError, StaleEpochError
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport import sender as module
from weft_rl.v1 import publish_pb2 as pb


class Attendance:
    """Of a coordinator that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.refuses = False
        self.failures: list[Exception] = []
        self.said: list[object] = []

    def send(self, message: object) -> None:
        self.said.append(message)

    def wait_welcome(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        assert self.answers.wait(10)
        if self.refuses:
            raise StaleEpochError("the group was dropped")


class Membership:
    """What is made of a ticket."""

    made: Membership | None = None

    def __init__(self, *_: object, **__: object) -> None:
        Membership.made = self
        self.attendance, self.left = Attendance(), False

    def leave(self) -> bool:
        self.left = True
        return True


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> tuple[SideGroupRank, pb.BeginTransferResponse]:
    monkeypatch.setattr(module, "Membership", Membership)
    group = pb.GroupPlan(group_id="g", epoch=1, size=3, backend="gloo", token="t0",
                         further_tokens=["t1"], num_senders=2)  # fmt: skip
    peer = SideGroupRank("127.0.0.1:1", "127.0.0.1", BackendSelection("gloo"), Credentials())
    return peer, pb.BeginTransferResponse(transfer_id="t", group=group)


def test_the_ranks_go_on_once_the_coordinator_attends_it(
    joining: tuple[SideGroupRank, pb.BeginTransferResponse],
) -> None:
    """Where it died between the two nobody would know, and all would wait for it."""
    peer, begun = joining
    thread = threading.Thread(target=peer.join, args=(begun, 1), daemon=True)
    Membership.made = None
    thread.start()
    while (made := Membership.made) is None:
        assert thread.is_alive()
    thread.join(0.05)
    assert thread.is_alive()
    made.attendance.answers.set()
    thread.join(10)
    assert not thread.is_alive()
    peer.join(begun, 1)  # it is there
    peer.close()
    assert made.left


@pytest.mark.parametrize(("reason", "num_tries"), [("COORDINATOR_AWAY", 3), ("PEER_GONE", 1)])
def test_a_connection_that_is_not_made_is_tried_again(
    joining: tuple[SideGroupRank, pb.BeginTransferResponse],
    reason: str,
    num_tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link between the ranks ends with a rank that cannot join: nobody could begin again."""
    peer, begun = joining
    failures = [PeerUnavailableError("no answer", reason=reason) for _ in range(2)]
    made: list[Membership] = []

    def make(*_: object, **__: object) -> Membership:
        made.append(Membership())
        made[-1].attendance.failures = failures
        made[-1].attendance.answers.set()
        return made[-1]

    monkeypatch.setattr(module, "Membership", make)
    if num_tries > 1:
        peer.join(begun, 1)
    else:
        with pytest.raises(PeerUnavailableError):
            peer.join(begun, 1)
    assert len(made) == num_tries
    assert [each.left for each in made[:-1]] == [True] * (num_tries - 1)
    peer.close()


def test_one_that_is_refused_says_why(
    joining: tuple[SideGroupRank, pb.BeginTransferResponse],
) -> None:
    peer, begun = joining
    errors: list[Any] = []

    def join() -> None:
        try:
            peer.join(begun, 1)
        except StaleEpochError as error:
            errors.append(error)

    thread = threading.Thread(target=join, daemon=True)
    Membership.made = None
    thread.start()
    while (made := Membership.made) is None:
        assert thread.is_alive()
    made.attendance.refuses = True
    made.attendance.answers.set()
    thread.join(10)
    assert [error.reason for error in errors] == ["EPOCH_FENCED"]
    peer.close()
    assert made.left
