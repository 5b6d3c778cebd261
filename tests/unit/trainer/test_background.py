"""Which pushes wait beside the training, with a copy of the weights, and which calls block."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.waits import until
from trainer_side.background import BackgroundPusher
from trainer_side.push_request import PushRequest
from trainer_side.pushing import PublisherLock
from trainer_side.ranks.ranks import OneRank
from weft_rl.contract.errors import InvalidRequestError, TransferAbortedError, TransferTimeoutError
from weft_rl.contract.names import PolicyVersion


class Content:
    """Weights whose copies are counted."""

    def __init__(self, copies, name):
        self.copies, self.name = copies, name

    def kept(self, memory):
        self.copies.append(self.name)
        memory.copy(torch.zeros(8))
        return self


class Trainer:
    """A rank whose pushes are held until they are let go."""

    def __init__(self, ranks=None):
        self.copies, self.pushed = [], []
        self.gate, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.turn = PublisherLock()
        self.background = BackgroundPusher(self, ranks or OneRank())

    def push(self, request, *, began, is_replaced, parent, cost):
        if is_replaced():
            raise TransferAbortedError("replaced", reason="REPLACED")
        self.begun.release()
        assert self.gate.acquire(timeout=10)
        self.pushed.append(request.content().name)
        return PolicyVersion(request.policy, len(self.pushed))

    def ask(self, name, *, policy="math", seconds=10.0, when_busy="queue"):
        content = Content(self.copies, name)
        return self.submit(policy, lambda: content, seconds, when_busy)

    def submit(self, policy, content, seconds=10.0, when_busy="queue"):
        request = PushRequest(
            policy=policy,
            content=content,
            check_finite=False,
            require="all",
            timeout_seconds=seconds,
        )
        return self.background.submit(request, when_busy)

    def ask_until_full(self):
        """One under way and two that wait."""
        first = self.ask("a")
        assert self.begun.acquire(timeout=10)
        return [first, self.ask("b"), self.ask("c")]

    def let_go(self, number=1):
        self.gate.release(number)

    @property
    def num_held(self):
        """Copies whose memory is not given back yet."""
        return len(self.background._memory._taken)


@pytest.fixture
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.let_go(99)
    trainer.background.close()


@pytest.fixture
def caller():
    """Threads that may block."""
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_a_third_that_would_wait_blocks_before_it_copies_until_one_has_begun(trainer, caller):
    futures = trainer.ask_until_full()
    call = caller.submit(trainer.ask, "d")
    with pytest.raises(TimeoutError):
        call.result(0.2)
    assert trainer.copies == ["a", "b", "c"]
    trainer.let_go()
    futures.append(call.result(10))
    assert trainer.copies == ["a", "b", "c", "d"]
    assert not futures[1].done()  # it has begun; it need not have ended
    trainer.let_go(3)
    assert [future.result(10).version for future in futures] == [1, 2, 3, 4]
    assert trainer.pushed == ["a", "b", "c", "d"]


def test_pushes_of_another_policy_are_counted_by_themselves(trainer):
    trainer.ask_until_full()
    futures = [trainer.ask(name, policy="code") for name in "de"]
    trainer.let_go(5)
    assert [future.result(10).version for future in futures] == [4, 5]


def test_a_call_that_finds_no_room_in_its_time_is_a_failed_push_without_a_copy(trainer):
    trainer.ask_until_full()
    began = time.monotonic()
    future = trainer.ask("d", seconds=0.2)
    assert time.monotonic() - began >= 0.2
    with pytest.raises(TransferTimeoutError, match=r"2 pushes of 'math' wait already.* 0\.2 s"):
        future.result(0)
    assert trainer.copies == ["a", "b", "c"]
    trainer.let_go(4)
    assert trainer.ask("e").result(10).version == 4
    assert trainer.pushed == ["a", "b", "c", "e"]


def test_a_replacing_push_blocks_for_none_of_those_that_it_replaces(trainer):
    first, *waiting = trainer.ask_until_full()
    assert trainer.num_held == 3
    last = trainer.ask("d", seconds=0.2, when_busy="replace")
    assert trainer.num_held == 2
    other = trainer.ask("e", seconds=0.2)
    assert trainer.num_held == 3
    trainer.let_go(3)
    assert [future.result(10).version for future in (first, last, other)] == [1, 2, 3]
    assert trainer.num_held == 0
    for future in waiting:
        with pytest.raises(TransferAbortedError, match="replaced"):
            future.result(10)
    assert trainer.pushed == ["a", "d", "e"]


def test_a_copy_that_fails_is_the_pushs_failure_and_takes_no_place(trainer):
    def fail():
        raise InvalidRequestError("no such adapter")

    future = trainer.submit("math", fail)
    trainer.let_go()
    with pytest.raises(InvalidRequestError, match="no such adapter"):
        future.result(10)
    trainer.let_go()
    assert trainer.ask("b").result(10).version == 1


def test_who_blocks_is_served_before_the_background_closes(trainer, caller):
    trainer.ask_until_full()
    call = caller.submit(trainer.ask, "d")
    until(lambda: len(trainer.background._queue) == 3)  # else it may be closed before it is asked
    closing = caller.submit(trainer.background.close)
    trainer.let_go(4)
    assert call.result(10).result(10).version == 4
    closing.result(10)
    with pytest.raises(InvalidRequestError, match="closed"):
        trainer.ask("e")


# -- several ranks --------------------------------------------------------------------


class Meeting:
    """What the ranks of one trainer meet by; each side is a ``Ranks``."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.errors, self.shared = [None] * size, b""
        self.sides = [Side(self, rank) for rank in range(size)]


class Side:
    size = 2

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.number = meeting, rank, 0

    def open(self, deadline, arguments):
        self.meeting.barrier.wait(10)
        self.number += 1

    def agree(self, error=None):
        self.meeting.errors[self.rank] = error
        self.meeting.barrier.wait(10)
        failure = error or next((e for e in self.meeting.errors if e is not None), None)
        self.meeting.barrier.wait(10)
        if failure is not None:
            raise failure

    def share(self, produce):
        if self.rank == 0:
            self.meeting.shared = produce()
        self.meeting.barrier.wait(10)
        shared = self.meeting.shared
        self.meeting.barrier.wait(10)
        return shared

    def close_call(self):
        pass

    def leave(self, error):
        pass

    def close(self):
        pass


@pytest.fixture
def ranks(caller):
    trainers = [Trainer(side) for side in Meeting(2).sides]
    yield trainers
    for trainer in trainers:
        trainer.let_go(99)
        trainer.background.close()


def on_all(caller, ranks, method, *args, **kwargs):
    calls = [caller.submit(getattr(trainer, method), *args, **kwargs) for trainer in ranks]
    return [call.result(10) for call in calls]


@pytest.mark.parametrize("behind", [0, 1])
def test_where_one_rank_finds_no_room_none_copies_and_all_say_so(ranks, caller, behind):
    on_all(caller, ranks, "ask_until_full")
    ranks[1 - behind].let_go()
    assert ranks[1 - behind].begun.acquire(timeout=10)  # there, one has begun
    futures = on_all(caller, ranks, "ask", "d", seconds=0.2)
    assert len({str(future.exception(0)) for future in futures}) == 1
    assert {type(future.exception(0)) for future in futures} == {TransferTimeoutError}
    assert [trainer.copies for trainer in ranks] == [["a", "b", "c"]] * 2
    ranks[behind].let_go()
    on_all(caller, ranks, "ask", "e")
    assert [trainer.copies for trainer in ranks] == [["a", "b", "c", "e"]] * 2


def test_a_rank_that_has_room_waits_for_one_that_has_none_yet(ranks, caller):
    on_all(caller, ranks, "ask_until_full")
    ranks[0].let_go()
    assert ranks[0].begun.acquire(timeout=10)
    calls = [caller.submit(trainer.ask, "d") for trainer in ranks]
    with pytest.raises(TimeoutError):
        calls[0].result(0.2)
    assert ranks[0].copies == ["a", "b", "c"]
    ranks[1].let_go()
    assert not any(call.result(10).done() for call in calls)
    assert [trainer.copies for trainer in ranks] == [["a", "b", "c", "d"]] * 2


def test_the_sender_says_which_pushes_are_replaced(ranks, caller):
    """Its second push has begun, the other rank's has not: it is not replaced there either."""
    on_all(caller, ranks, "ask_until_full")
    ranks[0].let_go()
    assert ranks[0].begun.acquire(timeout=10)
    on_all(caller, ranks, "ask", "d", when_busy="replace")
    for trainer in ranks:
        trainer.let_go(9)
        trainer.background.wait_idle("a push", time.monotonic() + 20)
    assert [trainer.pushed for trainer in ranks] == [["a", "b", "d"]] * 2


def test_an_interrupted_call_leaves_no_place_behind():
    class Broken(OneRank):
        def open(self, deadline, arguments):
            raise KeyboardInterrupt

    trainer = Trainer(Broken())
    with pytest.raises(KeyboardInterrupt):
        trainer.ask("a")
    trainer.background.close()  # would wait for it
    assert trainer.copies == []
