"""The send loop of rank 0, over a group that only writes down what it is to do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.waits import in_thread, stays, until
from weft_rl.contract.errors import PeerUnavailableError, WeftError
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.manifest import SendPlan, WireBucket, make_send_plan, plan_buckets, whole_plan
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport import sender
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.sender import MembersLostError, SenderProgress, SendingRank
from weft_rl.transport.wire.buckets import BucketOptions, SealedBucket
from weft_rl.v1 import publish_pb2, rendezvous_pb2

MANIFEST = plan_buckets([TensorMeta(f"w{i}", DataType.FLOAT32, (64,)) for i in range(5)], 256)
NUM_BUCKETS = 5
TICKET = GroupTicket(
    coordinator="127.0.0.1:1", host="127.0.0.1", group_id="g", token="t", epoch=1, rank=0, size=2,
    backend="gloo",
)  # fmt: skip


class _Operation:
    """A broadcast of a ``Group``, that receivers may keep."""

    def __init__(self, group: Group, options: BucketOptions) -> None:
        self._group, self._options = group, options
        self.is_kept = False

    def wait(self, deadline: float, on_progress: Any) -> None:
        if self._group.lost:
            raise PeerUnavailableError("a connection broke")

    def keep(self) -> None:
        """All receivers say that they keep it."""
        self.is_kept = True
        assert self._options.on_kept is not None
        self._options.on_kept()


class Group:
    """Stands for ``Membership``: remembers what is sent, and says what it is told to say."""

    def __init__(self, ticket: GroupTicket, device: torch.device, **told: Any) -> None:
        self.on_message, self.on_closed = told["on_message"], told["on_closed"]
        self.sent: list[int] = []
        self.operations: list[_Operation] = []
        self.reports: list[rendezvous_pb2.AttendRequest] = []
        self.lanes = {ticket.rank: self}
        self.attendance = SimpleNamespace(send=self.reports.append)
        self.progress = SimpleNamespace(report=lambda *args: None)
        self.lost = False

    def abort(self, error: WeftError) -> None:
        pass

    def broadcast(
        self, wire: torch.Tensor, seconds: float, on_progress: Any, options: BucketOptions
    ) -> Any:
        assert options[:3] == (False, 2, bytes([wire[0]]))  # each goes with its own
        self.sent.append(int(wire[0]))
        operation = _Operation(self, options)
        self.operations.append(operation)
        return operation

    def say(self, **message: Any) -> None:
        self.on_message(rendezvous_pb2.AttendResponse(**message))

    def start(self, first_bucket: int = 0) -> None:
        start = rendezvous_pb2.Start(transfer_id="t1", first_bucket=first_bucket)
        self.say(start=start)

    def release(self, num_buckets: int) -> None:
        self.say(released=rendezvous_pb2.Released(transfer_id="t1", num_buckets=num_buckets))


class Buckets:
    """Bucket k holds k, and its digest is k + 10."""

    manifest = MANIFEST
    num_buffers = 2

    def __init__(self, plan: SendPlan | None = None, sender: int = 0) -> None:
        self.plan, self.sender = plan or whole_plan(MANIFEST), sender
        self.made: list[int] = []
        self.buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]

    def make(self, index: int, on_progress: Any) -> SealedBucket:
        on_progress()
        self.made.append(index)
        self.wire(index)[0] = index
        return SealedBucket(index + 10, 6, bytes([index]))

    def are_summed(self) -> bool:
        return True

    def digests(self, made: list[int]) -> list[int]:
        return made

    def wire(self, index: int) -> torch.Tensor:
        return self.buffers[index % 2]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> SendingRank:
    monkeypatch.setattr(sender, "Membership", Group)
    return SendingRank(TICKET, torch.device("cpu"))


def group_of(rank: SendingRank) -> Any:
    return rank._membership


def _send(rank: SendingRank, buckets: Buckets) -> tuple[Group, SenderProgress, Future[bytes]]:
    sending = SenderProgress("t1", buckets, time.monotonic() + 20)
    future = in_thread(rank.send, sending)
    return group_of(rank), sending, future


def test_a_buffer_is_used_again_once_its_bucket_is_released(rank: SendingRank) -> None:
    buckets = Buckets()
    group, sending, future = _send(rank, buckets)
    until(lambda: buckets.made == [0])  # while the group still forms
    assert group.sent == []
    group.start()
    for released in range(NUM_BUCKETS - 1):
        until(lambda n=released: group.sent == [*range(min(n + 2, NUM_BUCKETS))])  # type: ignore[misc]
        group.release(released + 1)
    digest = content_digest([10, 11, 12, 13, 14])
    until(lambda: group.reports)  # as soon as all is handed over: nobody waits for it then
    (told,) = group.reports
    assert not future.done()
    group.release(NUM_BUCKETS)
    assert future.result(10) == digest
    assert group.reports == [told]
    assert (told.staged.transfer_id, told.staged.content_digest.value) == ("t1", digest)
    assert sending.digests == [10, 11, 12, 13, 14]


def test_a_buffer_is_used_again_as_soon_as_its_receivers_keep_the_bucket(
    rank: SendingRank,
) -> None:
    """By their own word: the coordinator's takes its time."""
    buckets = Buckets()
    group, sending, future = _send(rank, buckets)
    group.start()
    for kept in range(NUM_BUCKETS - 2):
        until(lambda n=kept: len(group.operations) == n + 2)  # type: ignore[misc]
        group.operations[kept].keep()
    until(lambda: group.sent == [*range(NUM_BUCKETS)])
    assert sending.num_released == NUM_BUCKETS - 2
    assert not future.done(), "the push ends by the coordinator's word"
    group.release(NUM_BUCKETS)
    assert future.result(10) == content_digest([10, 11, 12, 13, 14])


def test_another_group_is_not_sent_what_receivers_kept_and_the_coordinator_had_not_heard(
    rank: SendingRank,
) -> None:
    """Its memory holds the next bucket already."""
    buckets = Buckets()
    group, sending, future = _send(rank, buckets)
    group.start()
    until(lambda: group.sent == [0, 1])
    group.operations[0].keep()
    until(lambda: group.sent == [0, 1, 2])
    plan = publish_pb2.GroupPlan(group_id="g2", token="u", epoch=2, rank=0, size=2, backend="gloo")
    group.say(reform=rendezvous_pb2.Reform(transfer_id="t1", group=plan, message="r1 died"))
    with pytest.raises(MembersLostError):
        future.result(10)
    assert (rank.num_released("t1"), sending.num_released) == (0, 1)


def test_the_digest_is_said_once_the_other_senders_parts_are_known(rank: SendingRank) -> None:
    known = threading.Event()
    buckets = Buckets()
    buckets.are_summed = known.is_set  # type: ignore[method-assign]
    group, _, future = _send(rank, buckets)
    group.start()
    group.release(NUM_BUCKETS)
    until(lambda: group.sent == [*range(NUM_BUCKETS)])
    stays(lambda: not group.reports and not future.done(), 0.05)
    known.set()
    assert future.result(10) == content_digest([10, 11, 12, 13, 14])
    assert len(group.reports) == 1


def test_a_group_with_all_buckets_is_left_for_the_next_one(rank: SendingRank) -> None:
    """A sender that stands by sends again: it is a member that the next group waits for."""
    group, sending, future = _send(rank, Buckets())
    group.start(first_bucket=NUM_BUCKETS)
    group.release(NUM_BUCKETS)
    future.result(10)
    plan = publish_pb2.GroupPlan(group_id="g2", token="u", epoch=2, rank=0, size=2, backend="gloo")
    group.say(reform=rendezvous_pb2.Reform(transfer_id="t1", group=plan, message="r1 died"))
    with pytest.raises(MembersLostError):
        rank.send(sending)


def test_what_receivers_have_is_made_for_its_digest_and_not_sent(rank: SendingRank) -> None:
    buckets = Buckets()
    group, _, future = _send(rank, buckets)
    group.start(first_bucket=3)
    group.release(NUM_BUCKETS)
    assert future.result(10) == content_digest([10, 11, 12, 13, 14])
    assert (buckets.made, group.sent) == ([0, 1, 2, 3, 4], [3, 4])


def test_another_group_is_sent_what_is_not_released_and_is_still_held(rank: SendingRank) -> None:
    buckets = Buckets()
    group, sending, future = _send(rank, buckets)
    group.start()
    group.release(1)
    until(lambda: group.sent == [0, 1, 2])
    plan = publish_pb2.GroupPlan(group_id="g2", token="u", epoch=2, rank=0, size=2, backend="gloo")
    group.say(reform=rendezvous_pb2.Reform(transfer_id="t1", group=plan, message="r1 died"))
    with pytest.raises(MembersLostError):
        future.result(10)
    assert rank.successor is not None
    assert (rank.successor.group_id, rank.successor.coordinator) == ("g2", TICKET.coordinator)
    assert not rank.usable
    sending.num_released = rank.num_released("t1")
    assert rank.num_released("another") == 0
    after = SendingRank(rank.successor, torch.device("cpu"))
    other = group_of(after)
    other.start(first_bucket=1)
    other.release(NUM_BUCKETS)
    assert after.send(sending) == content_digest([10, 11, 12, 13, 14])
    assert (buckets.made, other.sent) == ([0, 1, 2, 3, 4], [1, 2, 3, 4])


def test_what_is_released_has_been_sent_also_where_the_group_has_ended_since(
    rank: SendingRank,
) -> None:
    """The last word on a clone's buckets and the end of its group come together."""
    group = group_of(rank)
    group.start()
    group.release(NUM_BUCKETS)
    group.on_closed(WeftError("the group has ended"))
    _, sending, future = _send(rank, Buckets())
    assert future.result(5) == content_digest([10, 11, 12, 13, 14])
    assert sending.num_released == NUM_BUCKETS


def test_a_receiver_that_lost_what_is_no_longer_held_ends_it(rank: SendingRank) -> None:
    sending = SenderProgress(
        "t1", Buckets(), time.monotonic() + 20, digests=[10, 11, 12], num_released=2
    )
    group = group_of(rank)
    group.start(first_bucket=1)
    with pytest.raises(PeerUnavailableError, match="lost bucket 1"):
        rank.send(sending)
    assert group.reports == []  # who calls decides whether another group helps
    rank.give_up("t1", ValueError("boom"))
    (told,) = group.reports
    assert (told.failed.transfer_id, told.failed.message) == ("t1", "ValueError('boom')")
    assert not rank.usable


def test_a_broken_connection_waits_for_the_coordinators_word(rank: SendingRank) -> None:
    group, _, future = _send(rank, Buckets())
    group.lost = True
    group.start()
    group.release(1)
    until(lambda: len(group.reports) == 1)
    assert group.reports[0].failed.reason == "PEER_GONE"
    assert not future.done()
    abort = rendezvous_pb2.Abort(transfer_id="t1", reason="PEER_GONE", message="r1 died")
    group.say(abort=abort)
    with pytest.raises(WeftError, match="r1 died"):
        future.result(10)


#: Sender 1 of 2 has the wire buckets 1, 3, 5 and 6, which are its 0 to 3.
PLAN = make_send_plan(
    2,
    [
        WireBucket(sender, bucket, 256, 1)
        for sender, bucket in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (1, 3), (0, 4))
    ],
)


def test_one_of_several_senders_sends_its_own_and_counts_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "Membership", Group)
    ticket = replace(TICKET, rank=1, size=4, num_senders=2)
    rank, buckets = SendingRank(ticket, torch.device("cpu")), Buckets(PLAN, 1)
    sending = SenderProgress("t1", buckets, time.monotonic() + 20)
    group = group_of(rank)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rank.send, sending)
        group.start()
        until(lambda: group.sent == [0, 1])
        group.release(1)  # the other's first, not its own
        stays(lambda: group.sent == [0, 1], 0.05)
        group.release(2)
        until(lambda: group.sent == [0, 1, 2])
        group.release(4)
        until(lambda: group.sent == [0, 1, 2, 3])
        group.release(7)  # not the other's last
        stays(lambda: not future.done(), 0.05)
        group.release(8)
        assert future.result(10) == content_digest([10, 11, 12, 13])


def test_it_resumes_with_its_next_from_the_first_that_a_receiver_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "Membership", Group)
    ticket = replace(TICKET, rank=1, size=4, num_senders=2)
    rank, buckets = SendingRank(ticket, torch.device("cpu")), Buckets(PLAN, 1)
    sending = SenderProgress("t1", buckets, time.monotonic() + 20)
    group = group_of(rank)
    group.start(first_bucket=4)  # after its 1 and 3
    group.release(8)
    assert rank.send(sending) == content_digest([10, 11, 12, 13])
    assert (buckets.made, group.sent) == ([0, 1, 2, 3], [2, 3])
